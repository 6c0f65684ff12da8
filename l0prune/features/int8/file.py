"""The int8 file of a smaller model: calibration, writing, and comparison with float32.

It is not certified itself. It is compared with the file in float32, which is.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from l0prune.capture.example_inputs import examples_in
from l0prune.data.dataset import WHOLE
from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.derived import DERIVED, Derived, InFloat32, check_in_one
from l0prune.exporting.onnx.differences import as_texts
from l0prune.exporting.onnx.times import Times, as_text, one_example, times_beside
from l0prune.exporting.opened import OnnxFile
from l0prune.exporting.pieces import ExportedPart
from l0prune.features.int8.calibration import divided, feeds_of, is_source, rows_in
from l0prune.features.int8.each_call import EachCall, EachCallSearch
from l0prune.features.int8.fastest import FASTER, Speed
from l0prune.features.int8.quantizer import (
    FIRST_OPSET,
    Feed,
    Quantizer,
    has_dot_products,
)
from l0prune.features.int8.ranges import Ranges
from l0prune.features.int8.search import SMALL, Comparison, Search, least_kept
from l0prune.features.int8.trained import quantized
from l0prune.plan.globs import listed
from l0prune.plan.numbers import tolerance_of
from l0prune.progress.stages import stage, steps
from l0prune.running.batches import Batch, test_batches
from l0prune.running.criteria import judged
from l0prune.running.evaluate import evaluate_batches
from l0prune.running.task import Task

TRAINED = "trained"  # the method with the ranges of training
_LARGE = 0.1  # errors above this give a warning
_TESTED = 2000  # test examples at most
_TOGETHER = 50  # of these in a batch
_NAMED = 8  # layers in float32
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Int8:
    """Comparison of an int8 file with the file in float32 that it was made from.

    Attributes:
        method: of calibration: ``minmax``, ``entropy`` or ``percentile 99.99``, by the least error;
            ``trained`` where the ranges are those of a training with fake quantization, ``ranges of
            each call`` where none are in the file (see ``each_call``).
        calibrated, compared: number of examples that the ranges are from, and of others by which
            the two files are compared.
        errors: by output, the root mean square of the difference over that of the output; None
            for whole numbers.
        agreement: by output, the share of examples (or places) where the largest score is the
            same one; for whole numbers, the share of equal ones.
        kept: operators and layers that are computed in float32, since eight bits cost most there,
            in error or in time; the latter have weights that are stored in eight bits.
        costly: the layers that cost most, with the error that each alone makes; empty where the
            whole error is small.
        times: of the two files in turns; ``dense`` are those of the one in float32. None if
            nothing was to be timed.
        beside_dense: of the dense network's file in float32 and of this one; None if unknown.
        metrics: loss and metric on test data, of the file in float32 and in int8.
        tested: test examples.
        has_vnni: whether the processor multiplies and adds bytes in one instruction.
        bits: of the weights and of the input of each layer, by path, where they were learned.
        compensated: the largest error without and with weights that make up for the rounding; the
            file has the better ones. None where they were not tried.
        speed: milliseconds with eight bits wherever the error allows, and with the layers in
            float32 that are faster so. None where they were not looked for.
    """

    method: str
    calibrated: int
    compared: int
    errors: Mapping[str, float | None]
    agreement: Mapping[str, float]
    kept: tuple[str, ...]
    costly: tuple[tuple[str, float], ...]
    times: Times | None
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tested: int = 0
    has_vnni: bool = True
    bits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    compensated: tuple[float, float] | None = None
    beside_dense: Times | None = None
    speed: Speed | None = None

    @property
    def is_compensated(self) -> bool:
        """Return whether the file has weights that make up for the rounding."""
        return self.compensated is not None and self.compensated[1] < self.compensated[0]

    @property
    def warnings(self) -> list[str]:
        """Return warnings about speed and errors of the file; empty if there are none."""
        found = [self._slowness] if self._slowness else []
        if not self.has_vnni:
            found.append(
                "this processor has no VNNI instructions, so that weights have 7 bits and little "
                "time is saved: make the int8 file on a machine like the one that will serve it"
            )
        worst = max((e for e in self.errors.values() if e is not None), default=0.0)
        if worst > _LARGE and not self.bits:  # else float32 is not the trained network
            names = ", ".join(f"{name} ({error:.0%})" for name, error in self.costly)
            found.append(
                f"eight bits change the outputs by {worst:.0%}. The layers that cost most: {names}"
                ". The usual causes are calibration examples unlike those of use, and layers whose "
                "channels have very unlike sizes: compare the metric before it is served"
            )
        return found

    @property
    def _slowness(self) -> str:
        """Warning that the file is not faster than the one in float32; empty if it is."""
        speed, way_on = self.speed, "serve the one in float32, or choose"
        if speed is not None and speed.is_all:
            what = (
                f" ({speed.float32:.3g} ms): with eight bits wherever the error allows it takes "
                f"{speed.everywhere:.3g} ms, so that all layers are computed in float32, with "
                "weights stored in eight bits"
            )
            way_on = "choose"
        elif self.times is not None and self.times.share * FASTER > 1:
            what = f": {self.times}"
        else:
            return ""
        return (
            f"the int8 file is not faster than the one in float32{what}. The usual cause is narrow "
            "layers, or operators that ONNX Runtime has in float32 only, with conversions around "
            f"them: {way_on} widths by the times of int8 files "
            '(measure(runtime="onnxruntime-int8"))'
        )

    def __str__(self) -> str:
        parts = as_texts(self.errors, self.agreement)
        parts += [f"{k} {a:.4g} → {b:.4g}" for k, (a, b) in self.metrics.items()]
        kept = f"; in float32: {listed(self.kept, most=_NAMED)}" if self.kept else ""
        if self.speed is not None and self.speed.chosen < self.speed.everywhere:
            kept += f" (so {self.speed.everywhere:.3g} → {self.speed.chosen:.3g} ms)"
        bits = ", ".join(f"{path} {weight}/{read}" for path, (weight, read) in self.bits.items())
        parts += [f"bits of weights/inputs {bits}"] if bits else []
        if self.compensated is not None and self.is_compensated:
            parts += [f"rounding compensated ({self.compensated[0]:.2%} without)"]
        times = as_text(self.times, self.beside_dense) or "not timed"
        return f"{'; '.join(parts)} ({self.compared} examples, {self.method}){kept}; {times}"

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return asdict(self)


class Int8File(Derived):
    """File in eight bits beside one in float32.

    Args:
        given: calibration data, as ``calibration.feeds_of`` takes it.
        opset: of both files; None for the exporter's own choice.
        pieces: that the files are made of.
        compensate: whether weights that make up for the rounding are tried; see ``compensation``.
            Weights that were trained with fake quantization stay as they are.
        fastest: whether layers that are faster in float32 are computed so, and ranges of each call
            are taken where that is faster; see ``fastest`` and ``each_call``. A
            network that was trained with fake quantization has the layers of its training.
        tolerance: how much worse the file may be, as ``"1%"`` or 0.01, by ``judge``, else by the
            metric of the test data against the file in float32, in its own units: as many of the
            layers that cost most are computed in float32 as that takes, and no others.
        judge: function of a network, the file, that says how much worse it is; see ``shrink``.

    Raises:
        UsageError: no data are given, the model is captured in parts, or the opset is too old; or
            there is a judge without a tolerance, or nothing to judge one by.
    """

    keyword, effort = "int8", 20
    also = "compensate", "fastest", "tolerance", "judge"
    name = "int8"

    def __init__(
        self,
        given: Any,
        opset: int | None,
        pieces: Sequence[ExportedPart],
        compensate: bool = True,
        fastest: bool = True,
        tolerance: float | str | None = None,
        judge: Callable[[OnnxFile], float] | None = None,
    ) -> None:
        if judge is not None and tolerance is None:
            raise UsageError("judge decides whether the int8 file is within a tolerance: give one")
        if tolerance is not None and judge is None and not _is_tested(given):
            raise UsageError(
                "a tolerance of the int8 file is by the metric of labelled test data, and int8 was "
                "given none: give data with a test part (--data), or, in Python, a judge: a "
                "function of the file's network that says how much worse it is"
            )
        self._allowed = None if tolerance is None else tolerance_of(tolerance)
        self._judge = judge
        if isinstance(given, bool):
            raise UsageError("int8 takes inputs to calibrate with, such as the training data")
        quantizer = "onnxruntime.quantization.quantize_static"
        way_on = f"quantize the files of the parts with what each is given ({quantizer})"
        check_in_one(pieces, "an int8 file", way_on)
        if opset is not None and opset < FIRST_OPSET:
            raise UsageError(
                "an int8 file has a scale for each output of a layer, which opset "
                f"{opset} cannot say: give {FIRST_OPSET} or more, or leave opset out"
            )
        self._given, self.opset = given, opset
        self._compensates, self._is_fastest = compensate, fastest

    def write(self, proven: InFloat32, target: Path, data: Path) -> Int8:
        """Write the file of one in float32, and compare the two.

        Args:
            proven: the file in float32.
            target: of the int8 file, which has the ranges of the training, if there are any.
            data: unused, since weights in eight bits are in the file.

        Raises:
            UsageError: the weights are in a separate file; the inputs do not fit, or are too few.
            L0pruneError: ONNX Runtime cannot quantize it.
        """
        if proven.is_apart:
            raise UsageError(
                "no int8 file is made of one whose weights lie beside it (external_data, or more "
                "than 2 GB): ONNX Runtime's quantizer is given files in one piece. Leave int8 or "
                "external_data out"
            )
        path, piece, threads = proven.path, proven.piece, proven.threads
        ranges: Ranges | None = proven.ranges
        network = collect.Network(path, threads, collect.CPU)
        names = [each.name for each in network.session.get_inputs()]
        seen, unseen = divided(feeds_of(self._given, piece, names))
        tests = _Tests(self._given, piece, path)
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(network, unseen)
            if ranges is not None:
                there = {name for name, tensor in piece.single.state_dict.items() if tensor.numel()}
                made = quantized(onnx.load(str(path)), ranges, there)
                method, search, seen = TRAINED, None, []
            else:
                is_within = self._judged_by(tests, Path(folder))
                search = self._searched(proven, seen, comparison, is_within, Path(folder))
                made, method = search.made(), search.method
            del made.metadata_props[:]  # facts about the file in float32
            target.write_bytes(made.SerializeToString())
            found = collect.Network(target, threads, collect.CPU)
            errors, agreement = comparison.with_outputs(comparison.outputs(found))
            times, beside_dense = None, None
            if proven.is_timed:
                with stage("timing the int8 file beside the one in float32"):
                    times, beside_dense = times_beside(target, path, proven.dense, piece, threads)
        about_it = Int8(
            method=method,
            calibrated=rows_in(seen, piece),
            compared=rows_in(unseen, piece),
            errors=errors,
            agreement=agreement,
            kept=tuple(search.kept) if search else (),
            costly=tuple(search.costly) if search else (),
            times=times,
            beside_dense=beside_dense,
            metrics=tests.beside(target),
            tested=tests.examples,
            has_vnni=has_dot_products(),
            bits={} if ranges is None else ranges.by_layer,
            compensated=None if search is None else search.compensated,
            speed=None if search is None else search.speed,
        )
        proven.describe(target, int8=json.dumps(about_it.to_dict()))
        return about_it

    def _searched(
        self,
        proven: InFloat32,
        seen: Sequence[Feed],
        comparison: Comparison,
        is_within: Callable[[Search], bool] | None,
        folder: Path,
    ) -> Search:
        """Calibrate a file, choose its nodes in float32, and compensate the rounding."""
        with stage("calibrating the int8 file"):
            quantizer = Quantizer.of(proven.path, seen, folder)
        given, tried = (one_example(proven.piece)[0], proven.threads), folder / "tried.onnx"

        def complete(search: Search) -> bool:
            if self._is_fastest:
                with stage("timing what is faster in float32"):
                    search.keep_slow(*given)
            if self._compensates:
                with stage("making up for the rounding"):
                    search.compensate(seen)
            return is_within is None or is_within(search)

        search = Search(quantizer, comparison, tried)
        with stage("choosing what of it stays in float32"):
            search.run(tries_layers=is_within is None)
        search = least_kept(search, complete)
        if not self._is_fastest:
            return search
        with stage("trying ranges of each call"):
            other = EachCallSearch(EachCall.beside(quantizer), comparison, tried)
            if not other.gains(search, *given):
                return search
            if is_within is None:
                error = max(SMALL, search.error())
                other = least_kept(other, lambda own: own.error() <= error)
            else:
                other = least_kept(other, is_within)
            return other if other.gains(search, *given) else search

    def _judged_by(self, tests: _Tests, folder: Path) -> Callable[[Search], bool] | None:
        """Return the function that says whether a search's file is within; None if none is asked.

        The judge is the user's, else the metric of the test examples.
        """
        if (allowed := self._allowed) is None:
            return None
        judge, path = self._judge or tests.worse, folder / "judged.onnx"

        def is_within(search: Search) -> bool:
            path.write_bytes(search.made().SerializeToString())
            with stage("judging the int8 file"):
                return judged(judge, OnnxFile(path)) <= allowed

        return is_within


DERIVED.update(dict.fromkeys((Int8File.keyword, *Int8File.also), Int8File))


def _is_tested(given: Any) -> bool:
    return is_source(given) and Task.of(given).test is not None


class _Tests:
    """Test examples of data, on which files are compared with one in float32; none without labels.

    Attributes:
        examples: how many there are.
    """

    def __init__(self, given: Any, piece: ExportedPart, single: Path) -> None:
        self._single = single
        self._batches: list[Batch] = []
        if is_source(given):
            self._task = Task.of(given)
            size = examples_in(piece.answers[0].inputs)
            if piece.dynamic:
                size = next(each for each in count(_TOGETHER) if each in piece.batches)
            batches = test_batches(self._task, size, _CPU, WHOLE)
            self._batches = list(islice(batches, max(1, _TESTED // size)))
        self.examples = sum(batch.examples for batch in self._batches)

    @cached_property
    def _before(self) -> dict[str, float]:
        """Loss and metric of the file in float32."""
        with stage("testing the file in float32"):
            return self._of(OnnxFile(self._single))

    def _of(self, file: nn.Module) -> dict[str, float]:
        return evaluate_batches(file, steps(self._batches), self._task, _CPU)

    def worse(self, file: nn.Module) -> float:
        """Return how much worse a file's metric is than that of the one in float32."""
        name, sign = self._task.metric_name, -1 if self._task.larger_is_better else 1
        return sign * (self._of(file)[name] - self._before[name])

    def beside(self, path: Path) -> dict[str, tuple[float, float]]:
        """Return loss and metric of the file in float32 and of another; empty without examples."""
        if not self._batches:
            return {}
        before = self._before
        with stage("testing the int8 file"):
            after = self._of(OnnxFile(path))
        return {name: (before[name], after[name]) for name in before}
