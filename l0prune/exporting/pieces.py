"""The captured parts of an exported model, each as the programs that its files are made from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from l0prune.exporting.network import Network
from l0prune.exporting.own_class.replacement import class_programs
from l0prune.exporting.slicing.program import Exported, programs, reexport, reexport_part
from l0prune.running.device import device_of
from l0prune.running.stages import stage


@dataclass(frozen=True)
class ExportedPart:
    """One captured part of the exported model; the only one where the whole was captured.

    Attributes:
        path: of the submodule, empty for the whole model.
        program: the dense part as a ``torch.export`` program, in the model's dtype.
        single: the same in float32, which is what ONNX files are in.
        dynamic: whether its batch size is free.
        answers: what the gated part computes, or the dense one that has learned on; its files
            are compared with that.
        batches: those that they are for, where their size is free.
        free: further sizes that are free, by leaf of the inputs.
        why_fixed: why one is not that was to be, as a clause.
        form: a part that its model calls in several ways, such as with tensors of two and of three
            dims, is a piece for each of them; they are counted from 1.
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

    @property
    def module(self) -> nn.Module:
        """Program as a module for evaluation."""
        module = self.program.module(check_guards=False)
        return marked(module, Dtypes.of(module))

    @property
    def _read(self) -> list[int]:
        """The numbers of the leaves of its inputs that its file reads: tensors, free numbers."""
        values = enumerate(inputs_of(self.single))
        return [number for number, value in values if isinstance(value, Tensor | SymInt)]

    def read(self, inputs: Inputs) -> list[Any]:
        """Inputs that the file reads."""
        leaves = pytree.tree_leaves(inputs)
        return [leaves[number] for number in self._read]

    @property
    def sizes(self) -> list[dict[int, str]]:
        """For each of the inputs that its file reads, what its free dims are called."""
        size = examples_in(self.answers[0].inputs)

        def named(leaf: Any) -> dict[int, str]:
            is_batched = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size
            return {0: "batch"} if self.dynamic and is_batched else {}

        leaves = self.read(self.answers[0].inputs)
        free = map(self.free.of, self._read)
        return [named(leaf) | dict(dims) for leaf, dims in zip(leaves, free, strict=True)]

    def file_of(self, path: str | os.PathLike[str]) -> Path:
        """Return its file: the name before the ending, and after the first form the number."""
        whole = Path(path)
        form = f"-{self.form}" if self.form > 1 else ""
        part = re.sub(r"[/\\\0]", "_", self.path)  # a name in a ModuleDict may hold anything
        return whole.with_stem(f"{whole.stem}.{part}{form}") if part else whole

    @property
    def takes(self) -> str:
        """The batch sizes that program and file take."""
        return str(self.batches) if self.dynamic else f"{examples_in(self.answers[0].inputs)} only"


@dataclass(frozen=True)
class Whole:
    """The one piece of a model that is captured whole, and what it is made from.

    Attributes:
        module: the dense model, for nothing else: what the user gets may learn on.
        dtypes: of the model.
        example: its inputs.
        answers: what the gated model computes.
        make: makes programs of the module.
        free: sizes that are to be free beside the batch.
        why_fixed: why one of them is not, if that is known.
    """

    module: nn.Module
    dtypes: Dtypes
    example: Inputs
    answers: tuple[Answer, ...]
    make: Callable[[nn.Module, Dtypes, Inputs], tuple[Exported, ExportedProgram]]
    free: FreeSizes = ALL_FIXED
    why_fixed: str = ""

    @cached_property
    @stage("making a program of the smaller model")
    def pieces(self) -> tuple[ExportedPart, ...]:
        """The piece, with what of the answers its programs take.

        Raises:
            CaptureError: torch.export cannot follow the module.
        """
        made, single = self.make(self.module, self.dtypes, self.example)
        free = self.free.only(made.free)
        if made.dynamic:
            answers = [a for a in self.answers if examples_in(a.inputs) in made.batches]
        else:
            batch = examples_in(self.example)
            answers = [a for a in self.answers if examples_in(a.inputs) == batch]
        own = self.free.sizes(self.example)
        fixed = {name: size for name, size in own.items() if name not in made.free}
        answers = [a for a in answers if fixed.items() <= self.free.sizes(a.inputs).items()]
        # torch.export takes a size of 1 for a case of its own
        answers = [
            a for a in answers if 1 not in free.sizes(a.inputs).values() or _holds(single, a)
        ]
        if not answers:  # the module was shown to compute what the gated one does at other sizes
            answers = list(answers_of(self.module, [self.example], whose="module"))
        piece = ExportedPart("", made.program, single, made.dynamic, tuple(answers), made.batches)
        return (replace(piece, free=free, why_fixed=made.why_fixed or self.why_fixed),)

    @property
    def trials(self) -> list[tuple[str, Inputs]]:
        """A path, and what the submodule there can be given."""
        return [("", self.example)]

    @stage("comparing the program with the module")
    def checks(self) -> list[Check]:
        """Comparisons of the program with the module that it was made from.

        That one was compared with the gated model before its weights were rounded to its dtype.
        """
        (piece,) = self.pieces
        inputs = [answer.inputs for answer in piece.answers]
        answers = answers_of(self.module, inputs, whose="module")
        return list(compare(answers, piece.module, "program"))

    def of(self, module: nn.Module) -> Whole:
        """Pieces of the module as it is now."""
        inputs = [answer.inputs for answer in self.answers]
        answers = answers_of(module, inputs, whose="module")
        return replace(self, module=copied(module), dtypes=Dtypes.of(module), answers=answers)


@dataclass(frozen=True)
class InParts:
    """The pieces of a model that is captured in parts."""

    pieces: tuple[ExportedPart, ...]

    @property
    def trials(self) -> list[tuple[str, Inputs]]:
        """Paths, and what the submodules there can be given."""
        return [(piece.path, piece.answers[0].inputs) for piece in self.pieces]

    def checks(self) -> list[Check]:
        """None: the modules that they are made from were compared."""
        return []

    def of(self, module: nn.Module) -> InParts:
        """Pieces of the module as it is now."""
        return InParts(tuple(_renewed(piece, module) for piece in self.pieces))


def whole(network: Network, captured: Captured | None, state: Mapping[str, Tensor]) -> Whole:
    """The program is made from the graph that was captured, where one was, else from the class.

    The module that is handed out is in the model's dtypes afterwards; that of the programs shares
    the tensors of the state_dict.
    """
    module, make = network.small, partial(class_programs, free=network.free)
    if captured is not None:
        module = network.graphs[""]
        free = network.free.only(captured.free)
        export = partial(reexport, dynamic=captured.dynamic, batches=captured.batches, free=free)
        make = partial(programs, export=export)
    is_shared, dtypes = module is network.small, network.dtypes
    exact = module
    if is_shared and not dtypes.are_one:  # placed first: what it is lent from is let go of then
        exact = placed(copied(module), CPU)
    restored(network.small, dtypes)
    if dtypes.are_one:
        exact = _around(module, state) if is_shared else restored(module, dtypes)
    exact = placed(exact, CPU)
    why_fixed = captured.why_fixed if captured else ""
    example = network.narrow(network.example)
    return Whole(exact, dtypes, example, network.answers[""], make, network.free, why_fixed)


def _around(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy that has the tensors of the state for its parameters of the same names."""
    parameters = {}
    for name, old in module.named_parameters():
        new = state.get(name)
        if new is not None and (new.dtype, new.shape) == (old.dtype, old.shape):
            parameters[id(old)] = nn.Parameter(new, old.requires_grad)
    return copied(module, parameters)


@stage("making programs of the smaller model's parts")
def in_parts(network: Network) -> InParts:
    """The programs of each part of the dense model, on what it receives in the gated one.

    The module that is handed out is in the model's dtypes afterwards.
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
    """The pieces for inputs of one form: one, or for each number that it is told one."""
    small = network.small.get_submodule(path)
    small = small if device_of(small) == CPU else placed(copied(small), CPU)
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


def _holds(single: ExportedProgram, answer: Answer) -> bool:
    """Return whether the program of float32 gives the answer, if it was run."""
    try:
        found = output_of(single.module(check_guards=False), answer.inputs, torch.float32)
    except CertificateError:
        return False
    return difference(answer.single, found) <= LARGEST


def _forms(answers: Sequence[Answer], is_free: bool = True) -> list[tuple[Answer, ...]]:
    """The answers to inputs of which one program takes all: of one structure, as many dims.

    A number that is the batch's may be another one with another batch, if it ``is_free``.
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
    """Piece of the same part of the module as it is now."""
    part = module.get_submodule(piece.path)
    inputs = [answer.inputs for answer in piece.answers]
    export = partial(reexport_part, batches=piece.batches)
    made, single = programs(placed(copied(part), CPU), Dtypes.of(part), inputs[0], export)
    answers = answers_of(part, inputs, whose="module")
    return ExportedPart(
        piece.path, made.program, single, made.dynamic, answers, piece.batches, piece.form
    )
