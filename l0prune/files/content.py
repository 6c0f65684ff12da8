"""The JSON part of our own files: what it holds, and that it does."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from l0prune.files.atomic import PathLike
from l0prune.files.checked_json import Strict, checked


class GatesContent(Strict):
    """A bank of gates: its plan and kind as they write themselves, and the example as JSON."""

    plan: dict[str, Any]
    gate: dict[str, Any]
    fixed: bool
    example: Any
    free: list[dict[str, str]] = Field(default_factory=list)


class StructureContent(Strict):
    """Of the pickled module: whether anybody may read it, and the names of its empty tensors."""

    is_ordinary: bool
    hollow: list[str]


class Content(Strict):
    """Everything but the tensors.

    Attributes:
        version: of the format.
        info: what the user had to add.
        training: names of the modules in training mode.
        frozen: names of the parameters without a gradient.
        extra: what modules put into the state_dict beside tensors.
        ties: further names of tensors that are stored under another one.
        notes: on tensors that are stored in another way.
        gates, structure: None where there is none.
    """

    version: int
    info: dict[str, Any]
    training: list[str]
    frozen: list[str]
    extra: dict[str, Any]
    ties: dict[str, str]
    notes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    gates: GatesContent | None = None
    structure: StructureContent | None = None


def parsed(text: str, version: int, path: PathLike) -> Content:
    """The content that the text of a file says.

    Raises:
        FileError: it is damaged, or of another version.
    """
    return checked(text, Content, version, path)
