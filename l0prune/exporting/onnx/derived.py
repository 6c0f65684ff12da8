"""Files of fewer bits that features make of the certified ONNX file in float32, beside it.

Each is asked for by a keyword of ``Export.save_onnx``, as ``int8=`` or ``dtype=``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from l0prune.doors import Registry
from l0prune.errors import UsageError
from l0prune.exporting.onnx.file import describe
from l0prune.exporting.pieces import ExportedPart
from l0prune.plan.globs import listed

_OF_FLOAT32 = ("certificate", "changed", "speedup", "times")  # metadata about that file alone


class InFewerBits(Protocol):
    """Comparison of a file in fewer bits with the file in float32 that it was made from."""

    @property
    def warnings(self) -> list[str]:
        """Warnings about weights and errors of the file; empty if there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""


@dataclass(frozen=True)
class InFloat32:
    """The certified file in float32 from which a file of fewer bits is made.

    Attributes:
        path: of the file.
        piece: that it was made from.
        facts: its metadata.
        threads: that a call may use when it is timed.
        is_timed: whether files made from it are timed, beside it.
        dense: the dense network's file in float32, beside which they are timed, too.
        ranges: of the rounding that the network was trained with; None without it.
    """

    path: Path
    piece: ExportedPart
    facts: Mapping[str, str]
    threads: int
    is_timed: bool = True
    dense: Path | None = None
    ranges: Any = None

    @property
    def is_apart(self) -> bool:
        """Return whether the weights are in a separate file."""
        import onnx

        graph = onnx.load(str(self.path), load_external_data=False).graph
        return any(tensor.external_data for tensor in graph.initializer)

    def describe(self, made: Path, **about: Any) -> None:
        """Write this file's metadata and the facts ``about`` into a file made from it.

        Facts about this file alone get a prefix, as in ``float32.certificate``.
        """
        facts = {
            f"float32.{name}" if name in _OF_FLOAT32 else name: value
            for name, value in self.facts.items()
        }
        describe(made, {**facts, "batch": self.piece.takes, **about})


class Derived(ABC):
    """File of fewer bits, made of one in float32.

    Args:
        given: value of its keyword.
        opset: that was asked for; None for the exporter's own choice.
        pieces: of the export.
        more: values of the further keywords.

    Raises:
        UsageError: it cannot be made of these.

    Attributes:
        keyword: of ``save_onnx`` that asks for it.
        also: further keywords, about this file.
        effort: about how long it takes, in the time of a translation to ONNX.
        name: before the suffix of the file, as ``int8`` in ``model.int8.onnx``.
        opset: of both files; None for the exporter's own choice.
    """

    keyword: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
    effort: ClassVar[int] = 1
    name: str
    opset: int | None

    @abstractmethod
    def __init__(
        self, given: Any, opset: int | None, pieces: Sequence[ExportedPart], **more: Any
    ) -> None: ...

    @abstractmethod
    def write(self, proven: InFloat32, target: Path, data: Path) -> InFewerBits:
        """Write the file, its weights into ``data`` if they are separate, and compare the two."""


DERIVED: Registry[type[Derived]] = Registry("option of save_onnx", "derived")


@dataclass(frozen=True)
class Wanted:
    """File of fewer bits that keywords of ``save_onnx`` ask for, before it is known what of.

    Attributes:
        kind: of the file.
        given: value of its keyword.
        more: values of the further keywords.
    """

    kind: type[Derived]
    given: Any
    more: Mapping[str, Any]

    def of(self, opset: int | None, pieces: Sequence[ExportedPart]) -> Derived:
        """Return the file of these pieces; see ``Derived``."""
        return self.kind(self.given, opset, pieces, **self.more)


def wanted(asked: Mapping[str, Any]) -> list[Wanted]:
    """Return the files of fewer bits that keywords ask for.

    Raises:
        UsageError: a keyword is unknown, or its file is not asked for.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    found: list[Wanted] = []
    for kind in dict.fromkeys(map(DERIVED.named, given)):
        more = {name: given[name] for name in kind.also if name in given}
        if kind.keyword in given:
            found.append(Wanted(kind, given[kind.keyword], more))
        elif any(more.values()):
            raise UsageError(
                f"{listed([*more])}= is about the file that {kind.keyword}= asks for: give "
                f"{kind.keyword}, too"
            )
    return found


def check_in_one(pieces: Sequence[ExportedPart], what: str, way_on: str) -> None:
    """Raise UsageError for a model in parts, or with state: ``what`` is made from a single file.

    Raises:
        UsageError: it is in parts, or has state.
    """
    if len(pieces) != 1 or pieces[0].path:
        raise UsageError(
            f"this model becomes {len(pieces)} ONNX files, since it could only be captured in "
            f"parts, and {what} is made of one: {way_on}"
        )
    if pieces[0].state:
        raise UsageError(
            f"this model keeps {listed([*pieces[0].state])} from one call to the next, and {what} "
            f"is compared in single calls, which does not say what becomes of that: {way_on}"
        )
