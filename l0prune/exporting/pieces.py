"""The captured parts of an exported model, each as the programs that its files are made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from l0prune.capture.copying import copied
from l0prune.capture.recording import examples_in
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import Answer, answers_of, output_of
from l0prune.exporting.certify.certificate import LARGEST
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.proof import Proven
from l0prune.exporting.slicing.dtypes import Dtypes, restored
from l0prune.exporting.slicing.program import programs, reexport, reexport_part
from l0prune.exporting.subject import Subject
from l0prune.infer.parts import Parts
from l0prune.running.stages import stage

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
        answers: what the gated part computes, or the dense one that has learned on; its files
            are compared with that.
        least: the smallest batch that they are for, where its size is free.
        form: a part that its model calls in several ways, such as with tensors of two and of three
            dims, is a piece for each of them; they are counted from 1.
    """

    path: str
    program: ExportedProgram
    single: ExportedProgram
    dynamic: bool
    answers: tuple[Answer, ...]
    least: int = 1
    form: int = 1

    @property
    def batches(self) -> str:
        """The batch sizes that program and file take."""
        if self.dynamic:
            return f"{self.least} or more"
        return f"{examples_in(self.answers[0].inputs)} only"


@stage("making a program of the smaller model")
def pieces_of(subject: Subject, parts: Parts, proven: Proven) -> tuple[Piece, ...]:
    """The programs of what was proven; its modules are in the model's dtype afterwards."""
    whole_or_islands = _whole if subject.plan.parts == ("",) else _islands
    pieces = tuple(whole_or_islands(subject, parts, proven))
    restored(proven.module, subject.dtypes)
    return pieces


def _whole(subject: Subject, parts: Parts, proven: Proven) -> Iterator[Piece]:
    captured = parts.found[0].analysis.captured
    export = partial(reexport, dynamic=captured.dynamic, least=captured.least)
    made = programs(proven.graphs[""], subject.dtypes, subject.example, export)
    yield Piece("", *made, proven.answers[""], captured.least)


def _islands(subject: Subject, parts: Parts, proven: Proven) -> Iterator[Piece]:
    """Each part of the dense model, on what it receives in the gated one."""
    for part in parts.found:
        answers = proven.answers[part.path]
        if not answers:  # it was called on the example alone
            answers = answers_of(subject.gated, [part.example], part.path)
        for form, alike in enumerate(_forms(answers), start=1):
            yield _island(subject, proven, part.path, alike, form)


def _island(
    subject: Subject, proven: Proven, path: str, answers: tuple[Answer, ...], form: int
) -> Piece:
    dense = proven.module.get_submodule(path)
    made = programs(dense, subject.dtypes, answers[0].inputs, reexport_part)
    is_graph = bool(proven.comparisons[path].reason)  # captured at the example's sizes
    if is_graph or not made[2]:
        return Piece(path, *made[:2], False, answers, form=form)
    alone = [answer for answer in answers if examples_in(answer.inputs) == 1]
    several = tuple(answer for answer in answers if examples_in(answer.inputs) != 1)
    if not several or all(_holds(made[1], answer) for answer in alone):
        return Piece(path, *made, answers, form=form)
    made = programs(dense, subject.dtypes, answers[0].inputs, partial(reexport_part, least=2))
    return Piece(path, *made, several, least=2, form=form)


def _holds(single: ExportedProgram, answer: Answer) -> bool:
    """Does the program of float32 compute what was answered, were it asked?"""
    try:
        found = output_of(single.module(check_guards=False), answer.inputs, torch.float32)
    except CertificateError:
        return False
    return difference(answer.single, found) <= LARGEST


def _forms(answers: Sequence[Answer]) -> list[tuple[Answer, ...]]:
    """The answers to inputs of which one program takes all: of one structure, as many dims."""
    forms: dict[Any, list[Answer]] = {}
    for answer in answers:
        leaves, structure = pytree.tree_flatten(answer.inputs)
        ranks = [leaf.ndim if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        forms.setdefault((str(structure), *ranks), []).append(answer)
    return [tuple(alike) for alike in forms.values()]


def note_on_batches(pieces: Sequence[Piece]) -> str:
    """What the user has to know about the batches that programs and files take."""
    lines = []
    for piece in pieces:
        is_limited = piece.least > 1 if piece.path else piece.batches != "1 or more"
        if is_limited:
            of = f" of {piece.path}" if piece.path else ""
            why = _FROM_TWO if piece.dynamic else _FIXED
            lines.append(f"Program and ONNX file{of} are for batches of {piece.batches}: {why}.")
    return "\n".join(lines)


def renewed(piece: Piece, module: nn.Module) -> Piece:
    """The same part of the module as it is now."""
    part = module.get_submodule(piece.path)
    inputs = [answer.inputs for answer in piece.answers]
    whole = partial(reexport, dynamic=piece.dynamic, least=piece.least)
    export = partial(reexport_part, least=piece.least) if piece.path else whole
    made = programs(copied(part), Dtypes.of(part), inputs[0], export)
    return Piece(piece.path, *made, answers_of(part, inputs), piece.least, piece.form)
