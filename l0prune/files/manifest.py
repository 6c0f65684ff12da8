"""Manifest of a smaller model: all but its tensors, with the code that builds it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from l0prune.capture.configurations import class_of_transformers, configured, offline
from l0prune.capture.copying import copied
from l0prune.errors import FileError, UsageError, in_a_line
from l0prune.files.atomic import PathLike
from l0prune.files.checked_json import Strict, checked
from l0prune.files.consent import check_consent
from l0prune.files.user_code import from_code, is_rebuildable

FORMAT = 1  # raised when older versions cannot read what this one writes


class Sizes(Strict):
    """Shape of a tensor before the cut and after it."""

    old: list[int]
    new: list[int]


class Origin(Strict):
    """Code that builds the model at its old sizes.

    Attributes:
        kind: module and name of the class, for messages.
        transformers: the name of a class of transformers, which ``config`` builds.
        config: its configuration; None where there is none.
        spec: of a package or a Python file, as ``load_model`` takes it.
    """

    kind: str
    transformers: str = ""
    config: dict[str, Any] | None = None
    spec: str = ""

    @property
    def is_known(self) -> bool:
        """Return whether a class of transformers or a spec builds the model."""
        return bool(self.transformers or self.spec)


class Rebuild(Strict):
    """Result of the check of a resized class: verified, or the reason why not."""

    verified: bool
    reason: str = ""
    training: str = ""


class Manifest(Strict):
    """A smaller model without its tensors.

    Attributes:
        version: of the file format.
        versions: of the packages that wrote it.
        origin: what builds the model at its old sizes.
        shapes: of every tensor of the state_dict.
        constants: of tensors that are cut and not in the state_dict.
        attributes: by module path, those that have changed.
        layers: by module path, the class of ``cut_layers`` that the module has become.
        dropped: sizes of parameters of removed branches, which are zeros in the class, by name.
        rebuild: whether the class can be used.
        tied: further names of tensors that are stored under another one.
        save: random id of the save, which the file of the tensors has, too.
        certificate: the comparisons of the export, where its weights are those of the file.
        changed: note for the user if they are not; else empty.
        preprocessing: of images, as ``l0prune.data.preprocessing`` has it; None where unknown.
        digest: of all the rest.
    """

    version: int
    versions: dict[str, str] = Field(default_factory=dict)
    origin: Origin
    shapes: dict[str, Sizes]
    constants: dict[str, Sizes] = Field(default_factory=dict)
    attributes: dict[str, dict[str, Any]]
    layers: dict[str, str]
    dropped: dict[str, list[int]] = Field(default_factory=dict)
    rebuild: Rebuild
    tied: dict[str, str] = Field(default_factory=dict)
    save: str = ""
    certificate: list[dict[str, Any]] = Field(default_factory=list)
    changed: str = ""
    preprocessing: dict[str, Any] | None = None
    digest: str = ""

    @property
    def kind(self) -> str:
        """Name of the class."""
        return self.origin.kind.rpartition(".")[2]


def parsed(content: Any, where: object) -> Manifest:
    """Parse a manifest from JSON, as text or data; messages call it ``where``."""
    return checked(content, Manifest, FORMAT, where, ", or no manifest of l0prune")


GENERATION = "generation_config.json"


def built(origin: Origin, where: str, *, trust: bool = False) -> nn.Module:
    """Build the model at its old sizes, with arbitrary weights.

    Messages call the file that names it ``where``. With ``trust`` any code that it names is run.
    Raises:
        FileError: it names code that it may not run, or builds no model.
        UsageError: the package that builds it is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        if origin.transformers:
            return _of_transformers(origin, where)
        if not is_rebuildable(origin.spec):
            raise FileError(f"{where} is damaged: {origin.spec!r} names no code.")
        if not trust:
            check_consent(origin.spec, where)
        model = from_code(origin.spec)
    if not isinstance(model, nn.Module):
        raise FileError(f"{where} names {origin.spec}, which made no nn.Module.")
    return copied(model)  # a file may return the same model each time


def _of_transformers(origin: Origin, where: str) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"{where} holds a {origin.transformers} of transformers, which is not installed here: "
            "pip install 'l0prune[transformers]'"
        ) from error
    name = origin.transformers
    kind: Any = getattr(transformers, name, None) if name.isidentifier() else None
    if class_of_transformers(kind) != name:
        raise FileError(
            f"{where} holds a {name}, which transformers {transformers.__version__} does not have."
        )
    try:
        model = configured(kind, origin.config or {})
    # A foreign configuration can raise anything.
    except Exception as error:
        raise FileError(
            f"{where} does not say how to build its {name}: {in_a_line(error)}"
        ) from error
    return model


def settled(model: nn.Module, folder: PathLike) -> nn.Module:
    """Return the model in eval mode, with its folder's settings for generation, if any.

    A model of transformers has the folder's name, by which its tokenizer is found.
    """
    if class_of_transformers(type(model)) and Path(folder).is_dir():
        named: Any = model
        named.name_or_path = str(folder)
    if hasattr(model, "generation_config") and (Path(folder) / GENERATION).is_file():
        transformers = importlib.import_module("transformers")
        try:
            with offline():
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        except (OSError, TypeError, ValueError) as error:
            raise FileError(f"{Path(folder) / GENERATION} is damaged: {error}") from error
    return model.eval()
