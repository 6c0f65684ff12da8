"""ONNX file of a network with early exits: writing, and comparison with the gated model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.capture.example_inputs import first_rows
from l0prune.capture.sizes import Inputs
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.certificate import Check, compare_file
from l0prune.exporting.onnx.file import Session, rename, to_onnx
from l0prune.exporting.pieces import ExportedPart
from l0prune.exporting.slicing.program import reexport
from l0prune.features.exits.deciding import EarlyExit, answers_of
from l0prune.features.exits.nested import OUTPUTS, THRESHOLDS, Level, nested
from l0prune.features.exits.thresholds import Array
from l0prune.features.exits.ways import forced, milliseconds_of_ways
from l0prune.files.around import innermost
from l0prune.progress.stages import stage


class _AllWays(nn.Module):
    """Module for the exporter that returns all answers and decisions of a network with exits."""

    def __init__(self, early: EarlyExit) -> None:
        super().__init__()
        self.early = early

    def forward(self, *args: Any, thresholds: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return answer, decision and margin of each exit, and the last answer."""
        exits, last = answers_of(self.early.network, args, kwargs)
        self.early.thresholds = thresholds
        found, least = list[Tensor](), None
        for number, answer in enumerate(exits):
            passes, margin = self.early.judge(number, exits[: number + 1])
            least = margin if least is None else torch.minimum(least, margin)
            found += [answer, passes, least]
        return (*found, last)


@stage("writing the file with early exits")
def write(early: EarlyExit, example: Inputs, path: Path) -> None:
    """Write the ONNX file, with the thresholds as an initializer.

    Args:
        early: in float32, on the CPU.
        example: inputs of the network, of which the exporter gets the first row.
        path: of the file.

    Raises:
        CaptureError: torch.export cannot follow it.
        L0pruneError: torch's exporter has no translation.
    """
    import onnx
    from onnx import numpy_helper

    thresholds = early.thresholds.clone()
    args, kwargs = first_rows(example)
    one = (args, {**kwargs, THRESHOLDS: thresholds})
    program = reexport(_AllWays(copied(early)), one, dynamic=False).program
    model: onnx.ModelProto = to_onnx(program)
    graph = model.graph
    own = iter(input_names(early.network, example, len(graph.input) - 1))
    given = [each.name if each.name == THRESHOLDS else next(own) for each in graph.input]
    rename(model, (), (), given)
    names = [output.name for output in graph.output]
    levels = [Level(*names[start : start + 3]) for start in range(0, len(names) - 1, 3)]
    inputs = [each for each in graph.input if each.name != THRESHOLDS]
    del graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.append(numpy_helper.from_array(thresholds.numpy(), THRESHOLDS))
    path.write_bytes(nested(model, levels, names[-1], OUTPUTS[0]).SerializeToString())


def input_names(network: nn.Module, example: Inputs, count: int) -> Sequence[str]:
    """Return the argument names of the network's forward; numbered ones if they do not fit."""
    args, kwargs = example
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(innermost(network).forward).parameters.values()
    own = [each.name for each in parameters if each.kind in kinds][: len(args)]
    names = [*own, *kwargs]
    is_plain = len(own) == len(args) and len(names) == count
    return names if is_plain else [f"input_{number}" for number in range(count)]


def forced_to(path: Path, exits: int, number: int) -> bytes:
    """Return the file with thresholds by which every example leaves at one exit."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    (thresholds,) = (each for each in model.graph.initializer if each.name == THRESHOLDS)
    thresholds.CopyFrom(numpy_helper.from_array(forced(exits, number).numpy(), THRESHOLDS))
    return bytes(model.SerializeToString())


class ExitFile:
    """File with early exits in ONNX Runtime, run one example at a time.

    Args:
        path: of the file.
        piece: the captured program of the export.
        exits: number of early exits.

    Raises:
        L0pruneError: ONNX Runtime does not take it.
    """

    def __init__(self, path: Path, piece: ExportedPart, exits: int) -> None:
        self._path, self._piece, self._exits = path, piece, exits
        self._session = Session(str(path))

    def decide(self, inputs: Inputs) -> tuple[Tensor, int, float]:
        """Return the answer to one example, its exit and its margin."""
        output, exit_, margin = self._session(list(map(_single, self._piece.read(inputs))))
        return output, int(exit_), float(margin)

    @stage("comparing each way through the file with the gated model")
    def checks(self) -> list[Check]:
        """Compare all ways through the file with the gated model, in float32.

        Raises:
            CertificateError: an exit is taken that was not asked for.
        """
        found = []
        for number in range(self._exits + 1):
            place = 0 if number == self._exits else number + 1  # the last answer comes first
            answers = [_only(answer, place) for answer in self._piece.answers]
            name = f"exit {number}" if number < self._exits else "the last exit"
            session = Session(forced_to(self._path, self._exits, number))
            run = partial(_one_by_one, session, number)
            found += compare_file("onnx", answers, run, name, self._piece.read)
        return found


def _single(leaf: Any) -> Tensor:
    tensor = torch.as_tensor(leaf).detach().cpu()
    return tensor.float() if tensor.is_floating_point() else tensor


def _one_by_one(session: Session, number: int, leaves: list[Tensor]) -> list[Tensor]:
    """Return the answers to a batch; raise CertificateError where another exit answers."""
    outputs, exits, _ = one_by_one(session, leaves)
    for exit_ in exits.tolist():
        if exit_ != number:
            raise CertificateError(
                f"The file answers at exit {exit_} where {number} was asked for, so nothing "
                "was written: please report this with the model's code."
            )
    return [outputs]


def one_by_one(session: Session, leaves: list[Tensor]) -> list[Tensor]:
    """Run the examples of a batch one at a time; return the concatenated outputs."""
    size = max(len(leaf) for leaf in leaves if leaf.ndim)
    found = [
        session([x[row : row + 1] if x.ndim and len(x) == size else x for x in leaves])
        for row in range(size)
    ]
    return [torch.cat(each) for each in zip(*found, strict=True)]


def times(path: Path, inputs: Inputs, piece: ExportedPart, exits: int, threads: int) -> Array:
    """Return the milliseconds of one example up to each exit; write files beside the path."""
    import onnx

    leaves = (_single(leaf).numpy() for leaf in piece.read(inputs))
    names = (each.name for each in onnx.load(path).graph.input)
    paths = [path.with_name(f"{number}.onnx") for number in range(exits + 1)]
    for number, each in enumerate(paths):
        each.write_bytes(forced_to(path, exits, number))
    return milliseconds_of_ways(paths, dict(zip(names, leaves, strict=True)), threads)


def _only(answer: Answer, place: int) -> Answer:
    """Return an answer reduced to one of its tensors."""
    alone = answer.of_tensors()
    assert alone.single is not None
    return replace(
        alone,
        exact=[alone.exact[place]],
        single=[alone.single[place]],
        names=alone.names[place : place + 1],
        scales=alone.scales[place : place + 1],
        measured=lambda: (found[place : place + 1] for found in answer.measured()),
    )
