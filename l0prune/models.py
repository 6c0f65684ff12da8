"""Model sources: where an nn.Module comes from, and the example input to look at it with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import FileError, L0pruneError, UsageError
from l0prune.files import load_pickle


def load_model(spec: str, weights: str | None = None, *, trust_pickle: bool = False) -> nn.Module:
    """Build the model that ``spec`` names, and load ``weights`` into it if given.

    Raises:
        FileError: a file is missing, damaged or not to be trusted.
        UsageError: the spec names nothing, or the weights do not fit.
    """
    model = _build(spec, trust_pickle)
    if not isinstance(model, nn.Module):
        raise FileError(_no_module(spec, model))
    if weights is not None:
        _load_weights(model, weights, trust_pickle)
    return model


def is_rebuildable(spec: str) -> bool:
    """Whether the spec names code (a package or a Python file), not a pickled file."""
    kind = spec.partition(":")[0]
    return kind in _PACKAGES or spec.rpartition(":")[0].endswith(".py")


def _build(spec: str, trust_pickle: bool) -> Any:
    kind, _, name = spec.partition(":")
    if kind in _PACKAGES and name:
        return _PACKAGES[kind](name)
    path, _, factory = spec.rpartition(":")
    if path.endswith(".py"):
        return _call(load_attribute(path, factory), spec)
    if kind and name and not Path(spec).exists():
        raise UsageError(
            f"{spec!r} is no model source. Give a file written by torch.save(model, path), "
            "path.py:factory, or one of " + ", ".join(f"{k}:NAME" for k in _PACKAGES) + "."
        )
    return load_pickle(spec, trust=trust_pickle)


def load_attribute(path: str, name: str) -> Any:
    """Attribute ``name`` of the Python file at ``path``.

    Raises:
        FileError: there is no such file, or it fails while it is imported.
        UsageError: the file has no such attribute.
    """
    file = Path(path)
    if not file.exists():
        raise FileError(f"{path} does not exist.")
    module_name = f"l0prune_user_{file.stem}"
    described = importlib.util.spec_from_file_location(module_name, file)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[module_name] = module
    try:
        described.loader.exec_module(module)
    except Exception as error:
        raise FileError(f"{path} failed while it was imported: {error!r}") from error
    if not hasattr(module, name):
        known = ", ".join(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise UsageError(f"{path} has no {name!r}; it defines: {known or 'nothing callable'}.")
    return getattr(module, name)


def _call(factory: Any, spec: str) -> Any:
    try:
        return factory()
    except L0pruneError:
        raise
    except Exception as error:
        raise UsageError(
            f"{spec} failed when it was called without arguments: {error!r}"
        ) from error


def _torchvision(name: str) -> nn.Module:
    import torchvision

    if name not in torchvision.models.list_models():
        raise UsageError(
            f"torchvision has no model {name!r}; see torchvision.models.list_models()."
        )
    model: nn.Module = torchvision.models.get_model(name)
    return model


def _timm(name: str) -> nn.Module:
    timm = _package("timm")
    try:
        model: nn.Module = timm.create_model(name)
    except RuntimeError as error:
        raise UsageError(f"timm has no model {name!r}: {error}") from error
    return model


def _transformers(name: str) -> nn.Module:
    transformers = _package("transformers")
    try:
        model: nn.Module = transformers.AutoModel.from_pretrained(name)
    except OSError as error:
        raise UsageError(f"transformers cannot load {name!r}: {error}") from error
    return model


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed here: pip install {name}") from error


_PACKAGES: dict[str, Callable[[str], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}


def _no_module(spec: str, found: Any) -> str:
    if isinstance(found, Mapping):
        inner = found.get("state_dict", found)
        if isinstance(inner, Mapping) and any(isinstance(v, Tensor) for v in inner.values()):
            return (
                f"{spec} holds a state_dict, the weights without the class they belong to. Say how "
                f"to build the model: --model path.py:factory --weights {spec}"
            )
    return f"{spec} holds a {type(found).__name__}, not an nn.Module."


def _load_weights(model: nn.Module, path: str, trust_pickle: bool) -> None:
    """Load a state_dict, bare or under the key ``state_dict``, with or without ``module.``."""
    found = load_pickle(path, trust=trust_pickle)
    if isinstance(found, nn.Module):
        found = found.state_dict()
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise FileError(f"{path} holds no state_dict.")
    state = {str(name).removeprefix("module."): tensor for name, tensor in found.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = "\n".join(str(error).splitlines()[:6])
        raise UsageError(f"the weights in {path} do not fit the model:\n{lines}") from error


def parse_input(text: str, seed: int = 0) -> tuple[Tensor, ...]:
    """Example inputs from ``"1x3x224x224"``; several by comma; a dtype after a colon.

    ``"2x16:int64"`` gives zeros and ones, floats are drawn from a normal distribution.

    Raises:
        UsageError: the text does not parse.
    """
    generator = torch.Generator().manual_seed(seed)
    return tuple(_parse_one(part.strip(), text, generator) for part in text.split(","))


def _parse_one(part: str, text: str, generator: torch.Generator) -> Tensor:
    sizes, _, dtype_name = part.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split("x")]
    except ValueError:
        shape = []
    if not isinstance(dtype, torch.dtype) or not shape or min(shape) < 1:
        raise UsageError(
            f"{text!r} is no input. Write the sizes with x between them, batch first, such as "
            "1x3x224x224, several inputs with a comma, a dtype after a colon (2x16:int64)."
        )
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
