"""Guess of a model's example inputs: from images, library metadata, else from its first layer.

A guess is a text as ``--input`` takes it. It counts if the model's forward runs on it; one whose
examples do not affect each other is preferred, so that dim 0 is the batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import chain, islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.model_checks import same_draws
from l0prune.capture.threads import muted
from l0prune.capture.undisturbed import trying
from l0prune.errors import UsageError, in_a_line
from l0prune.files.model_sources import parse_input

_BATCH, _LENGTH = 2, 16  # examples; tokens, or steps of a sequence
_SIDES = (224, 256, 32, 28, 64, 128, 96, 299, 384, 512, 160, 192, 48, 16, 8, *range(4, 65))
# Sizes besides the channels, by number of dims, in the order in which they are tried.
_USUAL: dict[int, tuple[tuple[int, ...], ...]] = {
    1: tuple((length,) for length in (1024, 16000, 3000, 256, 128, 64, 32)),
    2: tuple((side, side) for side in _SIDES),
    3: ((16, 112, 112), (16, 224, 224), (32, 224, 224), (64, 64, 64), (32, 32, 32)),
}
_Layer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear | nn.RNNBase | nn.Embedding
_MOST_CHOICES, _MOST_SHOWN = 64, 4
_PROBES = ("2x3x224x224", f"2x{_LENGTH}:int64", f"2x{_LENGTH}x64", "2x64")


class Guess(NamedTuple):
    """Example inputs that a model's forward runs on.

    Attributes:
        text: as ``--input`` takes it.
        origin: source of the guess, for messages.
    """

    text: str
    origin: str


def guess_example(model: nn.Module, side: int | None = None) -> Guess:
    """Return example inputs that the model's forward runs on; the model stays as it is.

    Args:
        model: with metadata, maybe. Lightning's ``example_input_array`` and transformers'
            ``dummy_inputs`` come before all else; sizes that a library says (transformers'
            configuration, timm's, the transforms of torchvision's weights) after ``side``.
        side: of available images, if these are squares of one size.

    Raises:
        UsageError: none was found; the text says what was tried.
    """
    tried: dict[str, str] = {}
    first: Guess | None = None
    with trying(model), muted():
        layers = _first_layers(model)
        for found in _candidates(model, layers, side):
            if found.text in tried:
                continue
            tried[found.text], is_apart = _tried(model, found.text)
            if is_apart:
                return _with_refused(found, tried, side)
            first = first or (None if tried[found.text] else found)
    if first is None:
        raise UsageError(_no_guess(model, layers, tried))
    return _with_refused(first, tried, side)


def _with_refused(found: Guess, tried: Mapping[str, str], side: int | None) -> Guess:
    """Return the guess; where the model refused the size of the images, its origin says so."""
    images = f"{side}x{side}"
    if found.text.endswith(images) or not any(text.endswith(images) for text in tried):
        return found
    refused = f"the model does not run on {images}, the size of the images in this folder"
    return Guess(found.text, f"{found.origin} ({refused})")


def _candidates(
    model: nn.Module, layers: Mapping[str, _Layer], side: int | None
) -> Iterator[Guess]:
    """Yield candidate inputs, the likeliest first."""
    for origin, given in _examples_said(model):
        yield Guess(_text_of(given), origin)
        yield from _with_an_image(model, Guess(_text_of(given), origin))
    names, after = _required(model), _decoder_text(model)
    said = list(_sizes_said(model))
    if side is not None:
        others = [f"{name} says {h}x{w}" for name, (h, w) in said if (h, w) != (side, side)]
        conflict = f" ({'; '.join(others)})" if others else ""
        said.insert(0, (f"the images in this folder{conflict}", (side, side)))

    def text(each: Iterable[str]) -> str:
        inputs = (f"{name}{one}" for name, one in zip(names, each, strict=True))
        return ",".join((*inputs, *after))

    for path, layer in layers.items():
        for origin, one in _inputs_of(layer, said):
            yield Guess(text([one] * len(names)), origin or f"its first layer{_named(path)}")
    if not layers:  # only custom layers, or none
        for sizes, channels in product(_USUAL[2], (3, 1)):
            one = "x".join(map(str, (_BATCH, channels, *sizes)))
            yield Guess(text([one] * len(names)), "usual sizes of images")
    listed = [each for each in model.modules() if isinstance(each, _Layer)][: len(names)]
    if len(listed) == len(names) > 1:
        choices = product(*([one for _, one in _inputs_of(each, said)] for each in listed))
        for each in islice(choices, _MOST_CHOICES):
            yield Guess(text(each), f"its first {len(names)} layers")


def _examples_said(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the examples in the model's attributes, each after its origin."""
    for name in ("example_input_array", "dummy_inputs"):
        with suppress(Exception):  # a property may raise anything
            given = getattr(model, name, None)
            leaves = pytree.tree_leaves(given)
            if leaves and all(isinstance(leaf, Tensor) for leaf in leaves):
                yield f"its {name}", given


def _text_of(given: Any) -> str:
    """Return an example as ``--input`` takes it."""
    named = given.items() if isinstance(given, Mapping) else None
    plain = given if isinstance(given, tuple | list) else (given,)
    pairs = [(f"{name}=", each) for name, each in named] if named else [("", t) for t in plain]
    texts = (
        f"{name}{'x'.join(map(str, each.shape))}" + _dtype_text(each.dtype) for name, each in pairs
    )
    return ",".join(texts)


def _with_an_image(model: nn.Module, tokens: Guess) -> Iterator[Guess]:
    """Yield tokens with an image for each text, for vision-language models of transformers."""
    vision = getattr(getattr(model, "config", None), "vision_config", None)
    side, channels = (getattr(vision, each, None) for each in ("image_size", "num_channels"))
    if isinstance(side, int) and "pixel_values" in inspect.signature(model.forward).parameters:
        batch = tokens.text.partition("=")[2].partition("x")[0]
        image = f"pixel_values={batch}x{channels or 3}x{side}x{side}"
        yield Guess(f"{tokens.text},{image}", f"{tokens.origin} and configuration (transformers)")


def _sizes_said(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield image heights and widths from the library's metadata, each after its origin."""
    for name in ("pretrained_cfg", "default_cfg"):  # timm
        found = getattr(model, name, None)
        if isinstance(found, Mapping) and found.get("input_size"):
            theirs, own = found.get("num_classes"), getattr(model, "num_classes", None)
            is_other = None not in (theirs, own) and theirs != own
            other = f", of weights with {theirs:,} classes, not {own:,}" if is_other else ""
            height, width = found["input_size"][-2:]
            yield f"its {name} (timm{other})", (height, width)
    config = getattr(model, "config", None)  # transformers
    for part in (config, getattr(config, "vision_config", None)):
        side = getattr(part, "image_size", None)
        sides = (side, side) if isinstance(side, int) else side
        if isinstance(sides, tuple | list):
            yield "its configuration (transformers)", (sides[-2], sides[-1])
    size = sum(parameter.numel() for parameter in model.parameters())
    for weights in _published(model):
        if weights.meta.get("num_params") != size:  # not this network's: fewer classes, maybe
            continue
        found = weights.transforms()
        if side := getattr(found, "crop_size", None) or getattr(found, "resize_size", None):
            origin = f"the transforms of the weights {weights} for a network of its size"
            yield f"{origin} (torchvision)", (side[0], side[-1])
            return


def _published(model: nn.Module) -> Iterator[Any]:
    """Yield the published weights in the torchvision module of the model's class."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("torchvision.models."):
            for value in vars(sys.modules[kind.__module__]).values():
                if isinstance(value, type) and issubclass(value, Enum):
                    yield from (each for each in value if hasattr(each, "transforms"))


def _required(model: nn.Module) -> list[str]:
    """Return a prefix for each required input of the forward: empty, or ``name=``."""
    return ["" if p.kind in _BY_PLACE else f"{p.name}=" for p in _needed(model)] or [""]


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _needed(model: nn.Module) -> list[inspect.Parameter]:
    """Return the required parameters of the forward, positional ones first."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in parameters if p.default is p.empty and p.kind in kinds]


def _decoder_text(model: nn.Module) -> tuple[str, ...]:
    """Return the text of the decoder's tokens, an input of transformers' encoder-decoders."""
    config = getattr(model, "config", None)
    has_decoder = getattr(config, "is_encoder_decoder", False) is True
    takes_tokens = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return (f"decoder_input_ids={_BATCH}x5:int64",) if has_decoder and takes_tokens else ()


class _Reached(Exception):
    """Signal that a forward has reached a layer, whose path is the message."""


def _first_layers(model: nn.Module) -> dict[str, _Layer]:
    """Return the layers that forwards reach first, by path, then the first registered layer.

    A forward reaches its first layer for any sizes, often also for inputs of another kind.
    """
    layers = {path: each for path, each in model.named_modules() if isinstance(each, _Layer)}

    def stop_at(path: str) -> Any:
        def stop(*_: Any) -> None:
            raise _Reached(path)

        return stop

    parts = _required(model)
    handles = [each.register_forward_pre_hook(stop_at(path)) for path, each in layers.items()]
    reached: list[str] = []
    try:
        for probe in _PROBES:
            try:
                args, kwargs = parse_input(",".join(name + probe for name in parts))
                model(*args, **kwargs)
            except _Reached as stop:
                reached.append(str(stop))
            except Exception:  # no input of this kind
                continue
    finally:
        for handle in handles:
            handle.remove()
    return {path: layers[path] for path in (*reached, *list(layers)[:1])}


def _inputs_of(
    layer: _Layer, said: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, str]]:
    """Yield texts of inputs that the layer accepts, each after the size's origin, if any."""
    dtype = _dtype_text(
        torch.int64 if isinstance(layer, nn.Embedding) else next(layer.parameters()).dtype
    )
    for origin, sizes in _sizes_of(layer, said):
        yield origin, "x".join(map(str, (_BATCH, *sizes))) + dtype


def _sizes_of(
    layer: _Layer, said: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield sizes of one example that the layer accepts, each after its origin, if any."""
    if isinstance(layer, nn.Embedding):
        yield from (("", sizes) for sizes in ((_LENGTH,), ()))
    elif isinstance(layer, nn.RNNBase):
        yield "", (_LENGTH, layer.input_size)
    elif isinstance(layer, nn.Linear):
        yield from (("", sizes) for sizes in ((layer.in_features,), (_LENGTH, layer.in_features)))
        yield from (  # an image that the layer reads in patches or flattened
            (origin, (channels, *sizes))
            for origin, sizes in chain(said, (("", sizes) for sizes in _USUAL[2]))
            for channels in (3, 1)
        )
    else:
        places = len(layer.kernel_size)
        usual = (("", sizes) for sizes in _USUAL[places])
        for origin, sizes in chain(_at_places(said, places), usual):
            yield origin, (layer.in_channels, *sizes)
            if places == 1 and layer.in_channels == 1:
                yield origin, sizes  # the model itself adds the channel


def _at_places(
    said: Sequence[tuple[str, tuple[int, ...]]], places: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield image sizes for a 2-D layer; for a 3-D layer after a number of frames."""
    for origin, sizes in said:
        if places > 1:
            yield origin, (*_USUAL[3][0][:1], *sizes)[-places:]


def _dtype_text(dtype: torch.dtype) -> str:
    """Return the dtype suffix of an input's text; empty for float32."""
    return "" if dtype == torch.float32 else f":{str(dtype).removeprefix('torch.')}"


def _tried(model: nn.Module, text: str) -> tuple[str, bool]:
    """Call the model on an example; return its error, and whether examples are independent.

    Inputs of less than four dims are run again with another first example: in a sequence without
    a batch dim it changes the rest. Images have only one order of dims.
    """
    try:
        args, kwargs = parse_input(text)
        tensors = (*args, *kwargs.values())
        outputs = []
        for _ in range(2 if min(tensor.ndim for tensor in tensors) < 4 else 1):
            with same_draws(model, seed=0):
                outputs.append(pytree.tree_leaves(model(*args, **kwargs)))
            for tensor in tensors:
                tensor[:1] = 1 - tensor[:1].double()
    except Exception as error:  # whatever a forward raises
        return in_a_line(error), False
    pairs = zip(outputs[0], outputs[-1], strict=False)
    return "", all(_is_rest_alike(a, b) for a, b in pairs if isinstance(a, Tensor) and a.ndim)


def _is_rest_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two outputs of any dtype agree in all rows but the first."""
    if a.shape != b.shape:
        return False
    rests = (each[1:].to(torch.complex128) for each in (a, b))
    return torch.allclose(next(rests), next(rests), rtol=1e-3, atol=1e-5, equal_nan=True)


def _named(path: str) -> str:
    return f", {path}" if path else ""


def _no_guess(model: nn.Module, layers: Mapping[str, _Layer], tried: Mapping[str, str]) -> str:
    """Return the error message: the inputs tried, and how to give one."""
    need = "an example input is needed to look at the model, and none could be guessed"
    (text, why), *rest = tried.items()
    first = next(iter(layers.items()), None)
    layer = "" if first is None else f" Its first layer, {first[0] or 'itself'}, is {first[1]}."
    others = ", ".join(each for each, _ in rest[:_MOST_SHOWN])
    more = f"; nor did {others}{' …' if rest[_MOST_SHOWN:] else ''}" if rest else ""
    return f"{need}.{layer} {text} did not work ({why}){more}. {_way_on(model)}"


def _way_on(model: nn.Module) -> str:
    """Return advice on how to name the forward's inputs."""
    names = [p.name for p in _needed(model)]
    if len(names) < 2:
        return "Name one: --input 1x3x224x224 (batch first), or data whose inputs fit: --data NAME."
    shapes = ",".join(f"{name}=SHAPE" for name in names)
    return (
        f"The forward takes {', '.join(names)}: name the shape of each, --input {shapes} (2x64, or "
        "2x16:int64 for whole numbers). Where their values matter, gate in Python: "
        "l0prune.gate(model, args, kwargs)."
    )
