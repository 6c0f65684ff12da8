"""Model sources: nn.Modules from files, code and names, and example inputs from texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.configurations import class_of_transformers
from l0prune.errors import FileError, UsageError
from l0prune.files.atomic import PathLike
from l0prune.files.beside_weights import bring_along
from l0prune.files.consent import makers
from l0prune.files.pickles import load_pickle
from l0prune.files.smaller_model import from_pretrained, is_smaller_model, resize
from l0prune.files.tensor_file import GATED, is_tensor_file, read_tensors, read_texts
from l0prune.files.user_code import (
    check_no_gates,
    from_code,
    is_rebuildable,
    torchvision_model,
)
from l0prune.gating.bank import Gates
from l0prune.plan.names import no_model

# Keys under which training scripts keep the weights in their checkpoints.
_STATE_KEYS = ("state_dict", "model_state_dict", "model")


def load_model(
    spec: PathLike, weights: PathLike | None = None, *, trust_pickle: bool = False
) -> nn.Module:
    """Build the model that ``spec`` names, and load ``weights`` into it if given.

    Args:
        spec: a file written by ``torch.save(model, path)``, an ONNX file, ``torchvision:NAME``,
            ``file.py:factory``, ``timm:NAME`` or ``transformers:NAME``; or a smaller model: a
            folder of ``Export.save_pretrained``, a file of ``Export.save``.
        weights: a file with a state_dict, bare or in a checkpoint; for torchvision also the name
            of published weights, such as ``DEFAULT``, which are downloaded. Those of a smaller
            model, as ``Export`` writes them, give the model that ``spec`` builds its sizes.
        trust_pickle: unpickle any class, which runs whatever code the file names.

    Raises:
        FileError: a file is missing, damaged or not to be trusted.
        UsageError: the spec names nothing, or the weights do not fit.
    """
    spec, weights = os.fspath(spec), None if weights is None else os.fspath(weights)
    published = _published(spec, weights)
    if published is not None:
        return published
    model = _build(spec, trust_pickle)
    if not isinstance(model, nn.Module):
        raise FileError(_no_module(spec, model))
    if weights is not None:
        _load_weights(model, weights, trust_pickle)
    return model


def _build(spec: str, trust_pickle: bool) -> Any:
    if is_rebuildable(spec):
        return from_code(spec)
    if is_smaller_model(spec):
        return from_pretrained(spec, trust_pickle=trust_pickle)
    if Path(spec).suffix == ".py":
        raise UsageError(_code_without_name(spec))
    if not Path(spec).exists() and not Path(spec).suffix:
        raise no_model(spec)
    return _read(spec, trust_pickle)


def _read(path: str, trust_pickle: bool) -> Any:
    """Read a file of torch or of safetensors; for a gated model add the key ``GATED``."""
    if not is_tensor_file(path):
        return load_pickle(path, trust=trust_pickle)
    mark = {GATED: True} if GATED in read_texts(path) else {}
    return {**read_tensors(path), **mark}


def _code_without_name(path: str) -> str:
    """Return the error for code without a name, with candidates; the file is not run."""
    names = makers(path)[:3]
    shown = " or ".join(f"{path}:{name}" for name in names) or f"{path}:build"
    return (
        f"{path} is code. Name what makes the model in it, a function, a class or a module: {shown}"
    )


def _published(spec: str, weights: str | None) -> nn.Module | None:
    """Return a torchvision model with published weights; None if ``weights`` are no such name."""
    kind, _, name = spec.partition(":")
    if kind != "torchvision" or weights is None or Path(weights).exists():
        return None
    from torchvision import models

    known = list(models.get_model_weights(name).__members__) if name in models.list_models() else []
    if weights not in (*known, "DEFAULT"):
        if Path(weights).suffix or not known:
            return None  # meant as a file, or as another model: opening it raises the error
        raise UsageError(
            f"{weights!r} is neither a file nor weights of {spec}; there are {', '.join(known)}."
        )
    try:
        return torchvision_model(name, weights)
    except OSError as error:
        raise FileError(f"the weights {weights} cannot be downloaded: {error}") from error


def _no_module(spec: str, found: Any) -> str:
    if isinstance(found, Mapping) and GATED in found:
        return (
            f"{spec} is a gated model already. Fine-tune it (l0prune finetune {spec}), export it "
            f"(l0prune export {spec}), or open it in Python with l0prune.load."
        )
    if _states_in(found):
        return (
            f"{spec} holds a state_dict, the weights without the class they belong to. Say how to "
            f"build the model: --model path.py:factory --weights {spec}"
        )
    return f"{spec} holds a {type(found).__name__}, not an nn.Module."


def _states_in(found: Any) -> dict[str, Mapping[str, Any]]:
    """Return the state_dicts in a file, by their key; "" for the file as a whole."""
    if not isinstance(found, Mapping):
        return {}
    if _is_state(found):
        return {"": found}
    return {str(key): value for key, value in found.items() if _is_state(value)}


def _is_state(found: Any) -> bool:
    """Return whether the object is a state_dict, in which not all entries need be tensors."""
    return (
        isinstance(found, Mapping)
        and all(isinstance(name, str) for name in found)
        and any(isinstance(value, Tensor) for value in found.values())
    )


def _load_weights(model: nn.Module, path: str, trust_pickle: bool) -> None:
    """Load a state_dict, bare or in a checkpoint, with or without the names' usual prefixes.

    The file of a smaller model also resizes the model.
    """
    if is_smaller_model(path):
        resize(model, path)
        return
    found = _read(path, trust_pickle)
    states = _states_in(found.state_dict() if isinstance(found, nn.Module) else found)
    if not states:
        raise FileError(f"{path} holds no state_dict.")
    key = next((key for key in ("", *_STATE_KEYS) if key in states), None)
    if key is None and len(states) > 1:
        raise FileError(
            f"{path} holds several state_dicts ({', '.join(states)}). Save the one to use alone, "
            "with torch.save."
        )
    state = _unwrapped(states[next(iter(states)) if key is None else key], model)
    if not any(isinstance(module, Gates) for module in model.modules()):
        check_no_gates(state, path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = "\n".join(str(error).splitlines()[:6])
        raise UsageError(f"the weights in {path} do not fit the model:\n{lines}") from error


def _unwrapped(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Remove the prefixes of wrappers (DataParallel, torch.compile) from the state's names."""
    result, own = dict(state), model.state_dict().keys()
    for prefix in ("module.", "_orig_mod.", "module."):
        if all(n.startswith(prefix) for n in result) and not result.keys() & own:
            result = {name.removeprefix(prefix): value for name, value in result.items()}
    return result


def write_model(model: nn.Module, folder: Path) -> None:
    """Write a model into a folder: by transformers for its models, else pickled as model.pt.

    The files of its tokenizer and processor come along.
    """
    writer: Any = model
    if class_of_transformers(type(model)):
        writer.save_pretrained(folder)
        bring_along(model, folder)
    else:
        torch.save(model, folder / "model.pt")


def parse_input(text: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return example inputs from ``"1x3x224x224"``; several by comma; a dtype after a colon.

    With a name before them (``"input_ids=2x16:int64"``) they are keyword arguments. Floats are
    drawn from a normal distribution, integers (``"2x16:int64"``) are zeros and ones.

    Returns:
        Positional arguments, and those by name.

    Raises:
        UsageError: the text does not parse, or the input does not fit into memory.
    """
    generator = torch.Generator().manual_seed(0)
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for part in text.split(","):
        name, equals, sizes = (each.strip() for each in part.rpartition("="))
        tensor = _parse_one(sizes, text, generator)
        if not equals and not kwargs:
            args.append(tensor)
        elif name.isidentifier() and name not in kwargs:
            kwargs[name] = tensor
        else:
            raise UsageError(_no_input(text))
    return tuple(args), kwargs


def _no_input(text: str) -> str:
    return (
        f"{text!r} is no input. Write the sizes with x between them, batch first, such as "
        "1x3x224x224, several inputs with a comma, a dtype after a colon (2x16:int64); those by "
        "name come last, each name once (mask=2x16:bool)."
    )


def _parse_one(part: str, text: str, generator: torch.Generator) -> Tensor:
    match = re.fullmatch(r"([1-9][0-9]*(?:x[1-9][0-9]*)*)(?::(\w+))?", part, re.ASCII)
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise UsageError(_no_input(text))
    shape = [int(size) for size in match[1].split("x")]
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    except (RuntimeError, NotImplementedError, OverflowError) as error:
        raise UsageError(f"no input {part!r} can be made here: {error}") from error
