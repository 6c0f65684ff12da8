"""Captured parts of an exported model, each with the programs that its files are made from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.export import ExportedProgram

from l0prune.capture.capture import Captured
from l0prune.capture.compat import pytree
from l0prune.capture.copying import copied
from l0prune.capture.example_inputs import examples_in
from l0prune.capture.sizes import ALL_FIXED, ANY, Batches, FreeSizes, Inputs
from l0prune.capture.symbolic import inputs_of
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import Answer, answers_of, output_of
from l0prune.exporting.certify.certificate import LARGEST, Check, compare
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import CPU, Dtypes, marked, placed, restored
from l0prune.exporting.certify.free_shapes import shapes_hold
from l0prune.exporting.handed_out import Mark, are_marked, marks_of
from l0prune.exporting.network import Network, Original
from l0prune.exporting.own_class.replacement import class_programs
from l0prune.exporting.slicing.program import Exported, programs, reexport, reexport_part
from l0prune.exporting.state import attributes_kept, state_of
from l0prune.progress.stages import stage
from l0prune.running.device import device_of


@dataclass(frozen=True)
class ExportedPart:
    """Captured part of the exported model; the only one if the model was captured whole.

    Attributes:
        path: of the submodule, empty for the whole model.
        program: the small part as a ``torch.export`` program, in the model's dtype.
        single: the same in float32, the dtype of ONNX files.
        dynamic: whether its batch size is free.
        answers: outputs of the gated part, or of the small one if that was trained further, for the
            comparison of the files.
        batches: batch sizes that the programs take, if the batch size is free.
        free: further free sizes, by leaf of the inputs.
        why_fixed: why a size requested as free is fixed, as a clause.
        original: returns the user's model, gated or uncut, for the rounding of runtimes; None in
            parts.
        state: of a model captured whole the tensors that carry values from one call to the next, by
            name, as its programs start.
        lost: attributes by which a second call of the part differs from the first: no program keeps
            what is no buffer.
        form: number from 1 of the piece among those of its part: a part that its model calls in
            several ways, such as with tensors of two and of three dims, has a piece for each.
    """

    path: str
    program: ExportedProgram
    single: ExportedProgram
    dynamic: bool
    answers: tuple[Answer, ...]
    batches: Batches = ANY
    form: int = 1
    free: FreeSizes = ALL_FIXED
    why_fixed: str = ""
    original: Original | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The program as a module for evaluation."""
        module = self.program.module(check_guards=False)
        return marked(module, Dtypes.of(module))

    @property
    def _read(self) -> list[int]:
        """Indices of the input leaves that the file reads: tensors and free numbers."""
        values = enumerate(inputs_of(self.single))
        return [number for number, value in values if isinstance(value, Tensor | SymInt)]

    def read(self, inputs: Inputs) -> list[Any]:
        """Return the leaves of ``inputs`` that the file reads."""
        leaves = pytree.tree_leaves(inputs)
        return [leaves[number] for number in self._read]

    @property
    def sizes(self) -> list[dict[int, str]]:
        """Names of the free dims, by dim, for each input leaf that the file reads."""
        size = examples_in(self.answers[0].inputs)

        def named(leaf: Any) -> dict[int, str]:
            is_batched = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size
            return {0: "batch"} if self.dynamic and is_batched else {}

        leaves = self.read(self.answers[0].inputs)
        free = map(self.free.of, self._read)
        return [named(leaf) | dict(dims) for leaf, dims in zip(leaves, free, strict=True)]

    def file_of(self, path: str | os.PathLike[str]) -> Path:
        """Return ``path`` with the part's name and, from form 2 on, form before the suffix."""
        whole = Path(path)
        form = f"-{self.form}" if self.form > 1 else ""
        part = re.sub(r"[/\\\0]", "_", self.path)  # a name in a ModuleDict may hold anything
        return whole.with_stem(f"{whole.stem}.{part}{form}") if part else whole

    @property
    def takes(self) -> str:
        """The batch sizes that program and file take, as text."""
        return str(self.batches) if self.dynamic else f"{examples_in(self.answers[0].inputs)} only"


_PIECES = "_pieces"


@dataclass(frozen=True)
class Whole:
    """Recipe for the one piece of a model that was captured whole; made on first access.

    Attributes:
        module: the small model, used for nothing else: the user's module may be trained further.
        dtypes: of the model.
        example: its inputs.
        answers: outputs of the gated model.
        make: makes the programs from the module.
        free: sizes requested as free beside the batch.
        why_fixed: why one of them is fixed, if that is known.
        original: returns the user's gated model.
        marks: of the module's tensors, if it shares them with the module that the user gets.
    """

    module: nn.Module
    dtypes: Dtypes
    example: Inputs
    answers: tuple[Answer, ...]
    make: Callable[[nn.Module, Dtypes, Inputs], tuple[Exported, ExportedProgram]]
    free: FreeSizes = ALL_FIXED
    why_fixed: str = ""
    original: Original | None = None
    marks: Mapping[str, Mark] = field(default_factory=dict)

    @property
    def pieces(self) -> tuple[ExportedPart, ...]:
        """The piece, with the answers to inputs that its programs take.

        It is kept, unless the module has changed since the export.

        Raises:
            CaptureError: torch.export cannot follow the module.
        """
        found: tuple[ExportedPart, ...] | None = vars(self).get(_PIECES)
        if found is None:
            found = self._new_pieces()
            if are_marked(self.module, self.marks):
                vars(self)[_PIECES] = found
        return found

    @stage("making a program of the smaller model")
    def _new_pieces(self) -> tuple[ExportedPart, ...]:
        module = copied(self.module) if self.marks else self.module  # programs share no tensors
        made, single = self.make(module, self.dtypes, self.example)
        free = self.free.only(made.free)
        if made.dynamic:
            answers = [a for a in self.answers if examples_in(a.inputs) in made.batches]
        else:
            batch = examples_in(self.example)
            answers = [a for a in self.answers if examples_in(a.inputs) == batch]
        own = self.free.sizes(self.example)
        fixed = {name: size for name, size in own.items() if name not in made.free}
        answers = [a for a in answers if fixed.items() <= self.free.sizes(a.inputs).items()]
        answers = [a for a in answers if _fits(single, free, a)]
        if not answers:  # the module was compared with the gated one at other sizes
            answers = list(answers_of(self.module, [self.example], whose="module"))
        piece = ExportedPart("", made.program, single, made.dynamic, tuple(answers), made.batches)
        state = {name: value.clone() for name, value in state_of(single).items()}
        if state:  # all inputs in a row, each of them twice
            inputs = [answer.inputs for answer in answers for _ in range(2)]
            in_a_row = answers_of(self.module, inputs, whose="module")
            piece = replace(piece, state=state, answers=in_a_row)
        else:
            piece = replace(piece, lost=attributes_kept(self.module, piece.answers))
        why_fixed = made.why_fixed or self.why_fixed
        return (replace(piece, free=free, why_fixed=why_fixed, original=self.original),)

    @property
    def trials(self) -> list[tuple[str, Inputs]]:
        """Path and example inputs of the one piece."""
        return [("", self.example)]

    @stage("comparing the program with the module")
    def checks(self) -> list[Check]:
        """Compare the program with the module that it was made from.

        The module was compared with the gated model before its weights were rounded to its dtype.
        """
        (piece,) = self.pieces
        inputs = [answer.inputs for answer in piece.answers]
        answers = answers_of(self.module, inputs, whose="module")
        return list(compare(answers, piece.module, "program"))

    def of(self, module: nn.Module) -> Whole:
        """Return the recipe for the current ``module``, a copy for nobody else."""
        inputs = [answer.inputs for answer in self.answers]
        answers = answers_of(module, inputs, whose="module")
        return replace(self, module=module, dtypes=Dtypes.of(module), answers=answers, marks={})


@dataclass(frozen=True)
class InParts:
    """The pieces of a model that is captured in parts."""

    pieces: tuple[ExportedPart, ...]

    @property
    def trials(self) -> list[tuple[str, Inputs]]:
        """Path and example inputs of each piece."""
        return [(piece.path, piece.answers[0].inputs) for piece in self.pieces]

    def checks(self) -> list[Check]:
        """Return no checks: the modules that the pieces are made from were compared."""
        return []

    def of(self, module: nn.Module) -> InParts:
        """Return the pieces of the current ``module``."""
        return InParts(tuple(_renewed(piece, module) for piece in self.pieces))


def whole(network: Network, captured: Captured | None) -> Whole:
    """Return the recipe for a whole model's program: its captured graph if any, else its class.

    Afterwards the module for the user is in the model's dtypes; the one of the programs shares its
    parameters with that one, if these are as exact and on the CPU.
    """
    module, make = network.small, partial(class_programs, free=network.free)
    if captured is not None:
        module = network.graphs[""]
        free = network.free.only(captured.free)
        export = partial(reexport, dynamic=captured.dynamic, batches=captured.batches, free=free)
        make = partial(programs, export=export)
    is_shared, dtypes = module is network.small, network.dtypes
    exact, twin = module, None
    if is_shared and not dtypes.are_one:  # before ``restored``, which frees the lent tensors
        exact = placed(copied(module), CPU)
        twin = exact if device_of(module) == CPU else None
    restored(network.small, dtypes, twin)
    marks: Mapping[str, Mark] = {}
    if dtypes.are_one:
        exact = _with_its_tensors(module) if is_shared else restored(module, dtypes)
        marks = marks_of(module) if is_shared and device_of(module) == CPU else {}
    exact = placed(exact, CPU)
    why_fixed = captured.why_fixed if captured else ""
    example = network.narrow(network.example)
    answers = tuple(answer.measured_on(exact) for answer in network.answers[""])
    known = network.free, why_fixed, network.original, marks
    return Whole(exact, dtypes, example, answers, make, *known)


def _with_its_tensors(module: nn.Module) -> nn.Module:
    """Copy a module around its parameters' memory."""
    held = module.parameters()
    return copied(module, {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in held})


@stage("making programs of the smaller model's parts")
def in_parts(network: Network) -> InParts:
    """Make the programs of each part of the small model, on the inputs of the gated part.

    Afterwards the module for the user is in the model's dtypes.
    """
    pieces = tuple(_islands(network))
    restored(network.small, network.dtypes)
    return InParts(pieces)


def _islands(network: Network) -> Iterator[ExportedPart]:
    for part in network.captured.found:
        answers = network.answers[part.path]
        if not answers:  # it was called on the example alone
            answers = answers_of(network.gated, [part.example], part.path)
        pieces = (p for alike in _forms(answers) for p in _island(network, part.path, alike))
        for form, piece in enumerate(pieces, start=1):
            yield replace(piece, form=form)


def _island(network: Network, path: str, answers: tuple[Answer, ...]) -> Iterator[ExportedPart]:
    """Yield the pieces for inputs of one form: one, or one for each value of a number input."""
    small = network.small.get_submodule(path)
    small = small if device_of(small) == CPU else placed(copied(small), CPU)
    answers = tuple(answer.measured_on(small) for answer in answers)
    dtypes = network.dtypes.below(path)
    made, single = programs(small, dtypes, answers[0].inputs, reexport_part)
    is_graph = bool(network.comparisons[path].reason)  # captured at the example's sizes
    apart = _forms(answers, is_free=False)
    is_told = any(isinstance(value, SymInt) for value in inputs_of(made.program))
    if len(apart) > 1 and (is_graph or not is_told):
        for alike in apart:
            yield from _island(network, path, alike)
        return
    if is_graph or not made.dynamic:
        yield ExportedPart(path, made.program, single, False, answers)
        return
    alone = [answer for answer in answers if examples_in(answer.inputs) == 1]
    several = tuple(answer for answer in answers if examples_in(answer.inputs) != 1)
    if not several or all(_holds(single, answer) for answer in alone):
        yield ExportedPart(path, made.program, single, True, answers)
        return
    export = partial(reexport_part, batches=ANY.several())
    made, single = programs(small, dtypes, answers[0].inputs, export)
    yield ExportedPart(path, made.program, single, made.dynamic, several, ANY.several())


def _fits(single: ExportedProgram, free: FreeSizes, answer: Answer) -> bool:
    """Return whether the float32 program is right at the free sizes of an answer's inputs.

    torch.export specializes a size of 1, so that the program is run there.
    """
    leaves = zip(inputs_of(single), pytree.tree_leaves(answer.inputs), strict=True)
    found = [
        (given.shape[dim], leaf.shape[dim])
        for number, (given, leaf) in enumerate(leaves)
        for dim in free.of(number)
    ]
    if not shapes_hold(single.graph, found):
        return False
    return all(size != 1 for _, size in found) or _holds(single, answer)


def _holds(single: ExportedProgram, answer: Answer) -> bool:
    """Return whether the float32 program computes the answer; False if it cannot run."""
    try:
        apart = copied(single.module(check_guards=False))  # it may write into its buffers
        found = output_of(apart, answer.inputs, torch.float32)
    except CertificateError:
        return False
    return difference(answer.single, found) <= LARGEST


def _forms(answers: Sequence[Answer], is_free: bool = True) -> list[tuple[Answer, ...]]:
    """Group answers by the form of their inputs (structure, ranks, numbers): one program each.

    With ``is_free`` a number that equals the batch size may vary with it.
    """
    forms: dict[Any, list[Answer]] = {}
    for answer in answers:
        leaves, structure = pytree.tree_flatten(answer.inputs)
        batch = examples_in(answer.inputs) if is_free else None
        kinds = [
            leaf.ndim if isinstance(leaf, Tensor) else leaf == batch or repr(leaf)
            for leaf in leaves
        ]
        forms.setdefault((str(structure), *kinds), []).append(answer)
    return [tuple(alike) for alike in forms.values()]


def _renewed(piece: ExportedPart, module: nn.Module) -> ExportedPart:
    """Return the piece for the same part of the current ``module``."""
    part = module.get_submodule(piece.path)
    inputs = [answer.inputs for answer in piece.answers]
    export = partial(reexport_part, batches=piece.batches)
    made, single = programs(placed(copied(part), CPU), Dtypes.of(part), inputs[0], export)
    answers = answers_of(part, inputs, whose="module")
    return ExportedPart(
        piece.path, made.program, single, made.dynamic, answers, piece.batches, piece.form
    )
