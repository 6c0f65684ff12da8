"""Models that code makes: packages know them by name, or a Python file of the user's does."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from torch import nn

from l0prune.capture.quiet import quietly
from l0prune.errors import UsageError, first_line
from l0prune.files.consent import is_code, remember
from l0prune.files.user_code import called, named
from l0prune.gating.gated_class import CHILD


def is_rebuildable(spec: str) -> bool:
    """Whether the spec names code (a package or a Python file), not a pickled file."""
    kind, _, name = spec.partition(":")
    return is_code(spec) or (kind in PACKAGES and bool(name))


def from_code(spec: str) -> Any:
    """What the code makes that a spec names for which ``is_rebuildable`` holds.

    Raises:
        FileError: there is no such file, or it fails while it runs.
        UsageError: it names nothing.
    """
    kind, _, name = spec.partition(":")
    if kind in PACKAGES and name:
        remember(spec)
        return PACKAGES[kind](name)
    factory = named(spec)
    return factory if isinstance(factory, nn.Module) else called(factory, spec)


def torchvision_model(name: str, weights: str | None = None) -> nn.Module:
    """A network of torchvision, with published weights if they are named.

    Raises:
        UsageError: there is none of that name.
    """
    from torchvision import models

    known = models.list_models()
    if name not in known:
        near = " or ".join(get_close_matches(name, known, n=2)) or "one of its list_models()"
        raise UsageError(f"torchvision has no model {name!r}; did you mean {near}?")
    options: dict[str, Any] = {"weights": weights}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # else it downloads some, unasked
    with quietly():  # two families announce that they will initialise otherwise one day
        model: nn.Module = models.get_model(name, **options)
    return model


def _timm(name: str) -> nn.Module:
    timm = _package("timm")
    try:
        model: nn.Module = timm.create_model(name)
    except (RuntimeError, OSError) as error:
        raise UsageError(f"timm has no model {name!r}: {error}") from error
    return model


def _transformers(name: str) -> nn.Module:
    transformers = _package("transformers")
    try:
        model: nn.Module
        model, told = transformers.AutoModel.from_pretrained(
            name, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"transformers cannot load {name!r}: {first_line(error)}") from error
    check_no_gates(told["unexpected_keys"], name)
    return model


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed here: pip install {name}") from error


PACKAGES: dict[str, Callable[[str], nn.Module]] = {
    "torchvision": torchvision_model,
    "timm": _timm,
    "transformers": _transformers,
}


def check_no_gates(names: Iterable[str], where: str) -> None:
    """Refuse weights that are nothing without their gates.

    Raises:
        UsageError: a gated model wrote them.
    """
    if any(CHILD in name.split(".") for name in names):
        raise UsageError(
            f"{where} holds the weights of a gated model: without their gates they compute "
            "something else. Build the model, gate it as it was (l0prune.gate), and load them with "
            "its load_state_dict; or keep gated models with l0prune.save and l0prune.load"
        )
