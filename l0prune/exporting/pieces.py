"""The captured parts of an exported model, each as the programs that its files are made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from l0prune.capture.copying import copied
from l0prune.capture.recording import Inputs, examples_in, filled, record
from l0prune.exporting.certify.proof import Proven
from l0prune.exporting.slicing.dtypes import cast, dtype_of
from l0prune.exporting.slicing.program import programs, reexport, reexport_part
from l0prune.exporting.subject import Subject
from l0prune.infer.parts import Parts

_FIXED = "with a free batch size torch.export finds no graph that is right for it"
_FROM_TWO = "the model's forward treats a single example in another way"


@dataclass(frozen=True)
class Piece:
    """One captured part of the exported model; the only one where the whole was captured.

    Attributes:
        path: of the submodule, empty for the whole model.
        program: the dense part as a ``torch.export`` program, in the model's dtype.
        single: the same in float32, which is what ONNX files are in.
        dynamic: whether its batch size is free.
        gated: the gated part that it stands for, or the dense one that has learned on.
        inputs: what they are compared on, in float32.
        least: the smallest batch that they are for, where its size is free.
        form: a part that its model calls in several ways, such as with tensors of two and of three
            dims, is a piece for each of them; they are counted from 1.
    """

    path: str
    program: ExportedProgram
    single: ExportedProgram
    dynamic: bool
    gated: nn.Module
    inputs: tuple[Inputs, ...]
    least: int = 1
    form: int = 1

    @property
    def batches(self) -> str:
        """The batch sizes that program and file take."""
        if self.dynamic:
            return f"{self.least} or more"
        return f"{examples_in(self.inputs[0])} only"


def pieces_of(subject: Subject, parts: Parts, proven: Proven) -> tuple[Piece, ...]:
    """The programs of what was proven; its modules are in the model's dtype afterwards."""
    whole_or_islands = _whole if subject.plan.parts == ("",) else _islands
    pieces = tuple(whole_or_islands(subject, parts, proven))
    proven.module.to(subject.dtype)
    return pieces


def _whole(subject: Subject, parts: Parts, proven: Proven) -> Iterator[Piece]:
    captured = parts.found[0].analysis.captured
    export = partial(reexport, dynamic=captured.dynamic, least=captured.least)
    made = programs(proven.graphs[""], subject.dtype, subject.example, export)
    yield Piece("", *made, subject.gated, proven.inputs, captured.least)


def _islands(subject: Subject, parts: Parts, proven: Proven) -> Iterator[Piece]:
    """Each part of the dense model, on what it receives in the gated one."""
    paths = [part.path for part in parts.found]
    received: dict[str, list[Inputs]] = {path: [] for path in paths}
    for given in proven.inputs:
        for call in record(subject.gated, paths, cast(given, subject.dtype)):
            received[call.path].append(filled(call.inputs))
    for part in parts.found:
        for form, alike in enumerate(_forms(received[part.path] or [part.example]), start=1):
            yield _island(subject, proven, part.path, alike, form)


def _island(
    subject: Subject, proven: Proven, path: str, inputs: tuple[Inputs, ...], form: int
) -> Piece:
    dense, gated = (model.get_submodule(path) for model in (proven.module, subject.gated))
    program, single, is_free = programs(dense, subject.dtype, inputs[0], reexport_part)
    is_graph = bool(proven.comparisons[path].reason)  # captured at the example's sizes
    return Piece(path, program, single, is_free and not is_graph, gated, inputs, form=form)


def _forms(calls: Sequence[Inputs]) -> list[tuple[Inputs, ...]]:
    """The inputs of which one program takes all: of one structure, with as many dims."""
    forms: dict[Any, list[Inputs]] = {}
    for given in calls:
        leaves, structure = pytree.tree_flatten(given)
        ranks = [leaf.ndim if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        forms.setdefault((str(structure), *ranks), []).append(given)
    return [tuple(alike) for alike in forms.values()]


def note_on_batches(pieces: Sequence[Piece]) -> str:
    """What the user has to know about the batches that programs and files take."""
    lines = []
    for piece in pieces:
        if not piece.path and piece.batches != "1 or more":
            why = _FROM_TWO if piece.dynamic else _FIXED
            lines.append(f"Program and ONNX file are for batches of {piece.batches}: {why}.")
    return "\n".join(lines)


def renewed(piece: Piece, module: nn.Module) -> Piece:
    """The same part of the module as it is now."""
    part = module.get_submodule(piece.path)
    dtype = dtype_of(part)
    whole = partial(reexport, dynamic=piece.dynamic, least=piece.least)
    export = reexport_part if piece.path else whole
    made = programs(copied(part), dtype, cast(piece.inputs[0], dtype), export)
    return Piece(piece.path, *made, part, piece.inputs, piece.least, piece.form)
