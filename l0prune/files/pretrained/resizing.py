"""New sizes and tensors for a model at its old sizes, after all of them were checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.provenance import within
from l0prune.errors import FileError
from l0prune.files.pretrained.cut_layers import are_windows
from l0prune.files.pretrained.given_sizes import (
    GIVEN,
    PADDED,
    MixedIn,
    are_sizes_of_calls,
    are_whole_sizes,
)
from l0prune.files.pretrained.layers import LAYERS, change, tensors_of
from l0prune.files.pretrained.manifest import Manifest, Sizes
from l0prune.plan.numbers import LARGEST, MOST, is_count, is_number

_PICKED = "kept"  # the tensor that a layer gains which reads some of its inputs
_DIMS = 64  # of a tensor; torch has no more
# Of attributes that a layer gains and that may not have every value of their type.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    GIVEN: are_sizes_of_calls,
    PADDED: are_whole_sizes,
    "windows": are_windows,
    "inputs": lambda value: is_count(value, MOST) and value > 0,
    "dim": lambda value: type(value) is int and abs(value) <= _DIMS,
    "scale": lambda value: type(value) is float and is_number(abs(value)),
    **dict.fromkeys(("at", "channels", "results"), lambda value: is_count(value, MOST)),
}


def put_on(
    model: nn.Module, manifest: Manifest, tensors: Mapping[str, Tensor] | None, where: str
) -> None:
    """Give the model these sizes and tensors, in place.

    Args:
        model: at its old sizes.
        manifest: what changes.
        tensors: by all names, tied ones one object; None for none, which leaves nan.
        where: what messages call the file.

    Raises:
        FileError: something does not fit; the model is then as it was.
    """
    held = tensors_held(model)
    _check_model(model, manifest, held, where)
    _check_modules(model, manifest, where)
    if tensors is None:
        tensors = {
            name: torch.full(sizes.new, _nothing(held[name]), dtype=held[name].dtype)
            for name, sizes in {**manifest.shapes, **manifest.constants}.items()
        }
        tensors |= {
            name: torch.zeros(weight.new[1], dtype=torch.int64) for name, weight in _picks(manifest)
        }
    elif any(tensor.is_meta for tensor in tensors.values()):
        raise FileError(f"{where} holds shapes without values.")
    else:
        _check_tensors(manifest, tensors, held, where)
        _check_ties(manifest, tensors, held, where)

    new = {
        id(held[name]): _in_place_of(held[name], tensors[name])
        for name in {**manifest.shapes, **manifest.constants}
    }
    for module in model.modules():
        for leaf, old in list(tensors_of(module)):
            if id(old) in new:
                setattr(module, leaf, new[id(old)])
    change(model, manifest.layers, manifest.attributes, tensors, manifest.dropped)


def tensors_held(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, buffer and plain attribute that is a tensor, under all of its names."""
    return {
        within(path, leaf): tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf, tensor in tensors_of(module)
    }


def _in_place_of(old: Tensor, new: Tensor) -> Tensor:
    """What the model holds from now on: on the device of the old one, a parameter if that was."""
    tensor = new if old.is_meta else new.to(old.device)
    if not isinstance(old, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=old.requires_grad)


def _nothing(old: Tensor) -> float:
    return float("nan") if old.is_floating_point() or old.is_complex() else 0


def _check_model(
    model: nn.Module, manifest: Manifest, held: Mapping[str, Tensor], where: str
) -> None:
    """The model must have all that the manifest knows, at its old sizes, and no more."""
    wanted = {**manifest.shapes, **manifest.constants}
    is_new = all(n in held and list(held[n].shape) == sizes.new for n, sizes in wanted.items())
    if is_new and any(sizes.old != sizes.new for sizes in wanted.values()):
        raise FileError(
            f"{where} is for a model at its old sizes, and this one has the new sizes already: "
            "model.load_state_dict loads weights alone."
        )
    state = {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    gone = {id(held.get(name)) for name in manifest.dropped}
    state -= {name for name, tensor in held.items() if id(tensor) in gone}
    absent = [name for name in (*wanted, *manifest.dropped) if name not in held]
    absent = absent or sorted(state - wanted.keys())
    if absent and absent[0] in dict(_picks(manifest)):
        raise FileError(
            f"{where} is for a model that has been cut before: its layers read some of their "
            "inputs. Load the file of that cut into the model first, and then this one."
        )
    if absent:
        owner = "the model" if absent[0] in wanted else "the file"
        raise FileError(
            f"{where} is of another architecture, a {manifest.kind}: {owner} has no {absent[0]}."
        )
    for name, sizes in wanted.items():
        if list(held[name].shape) != sizes.old:
            raise FileError(
                f"{where} does not fit a model of these sizes: {name} is "
                f"{_shown(list(held[name].shape))} in it, and was {_shown(sizes.old)} before the "
                "cut."
            )
        if len(sizes.new) != len(sizes.old) or not all(
            0 <= new <= old for new, old in zip(sizes.new, sizes.old, strict=True)
        ):
            raise FileError(f"{where} is damaged: {name} does not become smaller.")


def _check_modules(model: nn.Module, manifest: Manifest, where: str) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, kind in manifest.layers.items():
        if kind not in LAYERS:
            raise FileError(f"{where} has a layer {kind!r}, which this version does not know.")
        own = (MixedIn, *LAYERS.values())
        base = next(each for each in LAYERS[kind].__mro__ if each not in own)
        if not isinstance(modules.get(path), base):
            raise FileError(f"{where} is of another architecture: {path} is no {base.__name__}.")
    for path, attributes in manifest.attributes.items():
        module = modules.get(path)
        if module is None:
            raise FileError(f"{where} is of another architecture: the model has no {path}.")
        gained = _gained(manifest.layers.get(path))
        for name, value in attributes.items():
            is_there = name in vars(module) and _is_alike(value, vars(module)[name])
            is_gained = type(value) is gained.get(name)
            if name in gained and name in _CHECKS:
                is_gained = _CHECKS[name](value)
            if name.startswith("_") or not (is_there or is_gained):
                raise FileError(
                    f"{where} is of another architecture, or damaged: {within(path, name)} "
                    f"cannot be {value!r}."
                )


def _gained(kind: str | None) -> dict[str, Any]:
    """The attributes that a module gains with its class, each with its type."""
    own = () if kind is None else (k for k in LAYERS[kind].__mro__ if k in LAYERS.values())
    types = {name: what for each in own for name, what in each.__annotations__.items()}
    return {name: what for name, what in types.items() if name != _PICKED}


def _is_alike(new: Any, old: Any) -> bool:
    """Return whether a number, or a few, may stand for another: sizes do not grow."""
    if isinstance(new, list):
        return isinstance(old, tuple | list) and all(is_count(each, MOST) for each in new)
    if type(new) is bool or type(old) is bool:
        return type(new) is type(old)
    if isinstance(old, float):
        return is_number(new, -LARGEST)
    return type(new) is int and isinstance(old, int) and min(0, old) <= new <= max(0, old)


def _check_tensors(
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    where: str,
) -> None:
    wanted = {**manifest.shapes, **manifest.constants}
    picked = dict(_picks(manifest))
    absent = [name for name in (*wanted, *picked) if name not in tensors]
    if absent:
        more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise FileError(f"{where} is incomplete: it lacks {absent[0]}{more}.")
    extra = sorted(tensors.keys() - wanted.keys() - picked.keys())
    if extra:
        raise FileError(f"{where} does not fit its manifest: that knows no {extra[0]}.")
    for name, sizes in wanted.items():
        found, old = tensors[name], held[name]
        if list(found.shape) != sizes.new:
            raise FileError(
                f"{where} does not fit its manifest: {name} is {_shown(list(found.shape))}, and "
                f"should be {_shown(sizes.new)}."
            )
        is_float, was_float = (t.is_floating_point() or t.is_complex() for t in (found, old))
        if is_float != was_float or found.is_complex() != old.is_complex():
            raise FileError(f"{where} is damaged: {name} holds {found.dtype}, not {old.dtype}.")
    for name in picked:
        if not _is_index(tensors[name], picked[name], held.get(name)):
            raise FileError(f"{where} is damaged: {name} does not say which inputs are read.")


def _picks(manifest: Manifest) -> Iterator[tuple[str, Sizes]]:
    """Names of the tensors that layers gain, and the sizes of what reads the inputs."""
    for path, kind in manifest.layers.items():
        weight = within(path, getattr(LAYERS[kind], "reads_by", ""))
        if weight in manifest.shapes:
            yield within(path, _PICKED), manifest.shapes[weight]


def _is_index(kept: Tensor, weight: Sizes, before: Tensor | None) -> bool:
    """Check that it picks as many inputs as the weight has columns, of those read before."""
    inputs = weight.old[1] if before is None else len(before) and int(before.max()) + 1
    if kept.dtype != torch.int64 or list(kept.shape) != weight.new[1:]:
        return False
    return not kept.numel() or (int(kept.min()) >= 0 and int(kept.max()) < inputs)


def _check_ties(
    manifest: Manifest, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor], where: str
) -> None:
    """Names that are one tensor in the model must not be two in the file."""
    first: dict[int, str] = {}
    for name in {**manifest.shapes, **manifest.constants}:
        other = first.setdefault(id(held[name]), name)
        one, two = tensors[other], tensors[name]
        if one is not two and not (one.shape == two.shape and one.equal(two)):
            raise FileError(
                f"{where} is of another model: {other} and {name} are one tensor in this one, and "
                "two in the file."
            )


def _shown(shape: list[int]) -> str:
    return "×".join(map(str, shape)) or "a number"
