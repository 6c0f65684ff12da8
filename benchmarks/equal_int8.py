"""ResNet-20 on CIFAR-10 (JPEG) at the same milliseconds of its int8 file, in four ways.

    python -m benchmarks.equal_int8 [--latency 0.85] [--examples 5000] [--epochs 2] [--seed 0]
                                    [--samples 24] [--device cpu]

Each way starts from the published network and has the same epochs (SGD at 0.01, augmentation):

- ``learned``: gates of widths and whole branches learn under ``--latency``, a share of the dense
  network's time by a table of int8 files, with ``quantize="int8"``. The file has the ranges that
  were trained with;
- ``then quantized``: the same gates under the same table without ``quantize``, and ONNX Runtime's
  quantizer after training. The budget is the time that the file of ``learned`` really takes;
- ``macs, then quantized``: the same gates under as many MACs as ``learned`` has, in eights. Nothing
  says what that takes in int8;
- ``shallower``: nothing is learned but weights, with ``quantize="int8"``. As few branches are
  closed, evenly spread, as ``--latency`` by the table asks for: widths alone do not come to it.

*budget* is what a way was given and *of dense* what its file takes of the dense network's int8
file (ONNX Runtime's quantizer), the files in turns, one thread, batch 1. Errors are of the files,
in float32 and in int8, on as many test images as ``--examples``. A way that cannot come to its
budget has a row that says so. What ``measure`` timed is kept in ``runs/equal_int8``, for the next
run. Widths of 16 and more stay in blocks of 16 there, so that a network of few maps can lose
branches and little else: below some share of the time no budget leaves a network that learns.
"""

from __future__ import annotations

import copy
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.budgets import part
from benchmarks.eight_bits import by_turns, resnet20
from benchmarks.isolation import ROOT, parser_of
from benchmarks.ways import BATCH, SGD
from l0prune.data import Data
from l0prune.data.dataset import WHOLE
from l0prune.errors import UsageError, first_line
from l0prune.exporting.onnx import collect
from l0prune.exporting.opened import OnnxFile
from l0prune.running.batches import test_batches
from l0prune.running.evaluate import evaluate_batches
from l0prune.running.task import Task

DENSE, LEARNED, SHALLOWER = "dense", "learned", "shallower"
THEN_QUANTIZED, MACS = "then quantized", "macs, then quantized"


class Ways:
    """All ways from one dense network, and their files.

    Args:
        data: part of CIFAR-10.
        options: of the command line.
        folder: for files.
    """

    def __init__(self, data: Data, options: Namespace, folder: Path) -> None:
        self._data, self._options, self._folder = data, options, folder
        self._model, self._images = resnet20(), data.train.example(2)
        self._files: dict[str, l0prune.Export] = {}
        gated = self._gated()
        self._table = l0prune.measure(
            gated,
            runtime="onnxruntime-int8",
            samples=options.samples,
            folder=ROOT / "runs" / "equal_int8" / str(options.samples),
        )
        self._write(DENSE, gated)

    def table(self) -> str:
        """How well the table of times predicts networks that it has not seen."""
        quality = self._table.quality
        return (
            f"table: dense {self._table.dense:.3g} ms, off by {quality.median:.1%} (median) and "
            f"{quality.worst:.1%} (worst) of {quality.networks} networks"
        )

    def row(self, way: str) -> str:
        """Train one way; return its line of the table."""
        gated, begin = self._gated(), time.perf_counter()
        try:
            budget = self._trained(way, gated)
        except UsageError as error:
            return f"| {way} | {first_line(error)} |"
        seconds = time.perf_counter() - begin
        if way != DENSE:
            self._write(way, gated)
        made = self._files[way]
        assert made.int8 is not None
        ms, share = self._time(way)
        cells = [way, budget, f"{ms:.3f}", f"{share:.1%}", f"{made.macs / made.macs_before:.1%}"]
        cells += [f"{self._error(f'{way}{end}'):.2%}" for end in (".onnx", ".int8.onnx")]
        return f"| {' | '.join([*cells, made.int8.method, f'{seconds:.0f}'])} |"

    def _error(self, name: str) -> float:
        """Share of the test images that a file tells wrong."""
        task, cpu = Task.of(self._data), torch.device("cpu")
        batches = test_batches(task, 100, cpu, WHOLE)
        return evaluate_batches(OnnxFile(self._folder / name), batches, task, cpu)["error"]

    def _trained(self, way: str, gated: nn.Module) -> str:
        """Train a network in one way; return the budget that the way was given."""
        share = self._options.latency
        if way == DENSE:
            return "–"
        if way == SHALLOWER:
            self._close_branches(gated, share)
            self._finetune(gated, learn=False, quantize="int8")
            return f"latency={share:.4g}"
        if way == LEARNED:
            budget, how = f"latency={share:.4g}", {"quantize": "int8", "latency": self._table}
        elif LEARNED not in self._files:
            raise UsageError(f"there is no network of {LEARNED} to compare with")
        elif way == THEN_QUANTIZED:
            _, share = self._time(LEARNED)
            budget, how = f"latency={share:.4g}", {"latency": self._table}
        else:
            made = self._files[LEARNED]
            budget, how = f"macs={made.macs / made.macs_before:.4g}", {"round_to": 8}
        self._finetune(gated, budget=budget, **how)
        return budget

    def _finetune(self, gated: nn.Module, **how: Any) -> None:
        common = {"batch_size": BATCH, "augment": True, "progress": False}
        common["device"] = self._options.device
        drawn = {"epochs": self._options.epochs, "seed": self._options.seed, "report": False}
        l0prune.finetune(gated, self._data, **SGD, **common, **drawn, **how)

    def _close_branches(self, gated: nn.Module, share: float) -> None:
        """Close as few branches as the table of times asks for, evenly spread."""
        gates = l0prune.gates(gated)
        latency = self._table.of(gates.plan)
        starts = [axis.start for axis in gates.plan.axes if axis.kind == "branch"]
        for closed in range(len(starts) + 1):
            open_ = torch.ones(gates.plan.size, dtype=torch.bool)
            for number in range(closed):
                open_[starts[(2 * number + 1) * len(starts) // (2 * closed)]] = False
            if latency.actual(open_) <= share * self._table.dense:
                return gates.set_open(open_)
        raise UsageError(f"no number of branches comes to {share:.0%} of the dense network's time")

    def _gated(self) -> nn.Module:
        """A copy of the dense network with gates of widths and branches, all open."""
        return l0prune.gate(copy.deepcopy(self._model), self._images, branches=True)

    def _write(self, way: str, gated: nn.Module) -> None:
        """Write both files of a network."""
        self._files[way] = l0prune.export(gated.eval(), verify="float32")
        self._files[way].save_onnx(self._folder / f"{way}.onnx", int8=self._data, time=False)

    def _time(self, way: str) -> tuple[float, float]:
        """Milliseconds of the int8 file, and their share of those of the dense network's."""
        files = {each: self._folder / f"{each}.int8.onnx" for each in (DENSE, way)}
        networks = {each: collect.Network(path, 1, collect.CPU) for each, path in files.items()}
        (given,) = networks[DENSE].session.get_inputs()
        ms = by_turns(networks, {given.name: self._images[:1].numpy()})
        return ms[way], ms[way] / ms[DENSE]


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--latency", type=float, default=0.85, help="of the dense int8 file's")
    parser.add_argument("--examples", type=int, default=5000, help="of the training data")
    parser.add_argument("--epochs", type=int, default=2, help="of each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="that trains; times are the CPU's")
    parser.add_argument("--samples", type=int, default=24, help="networks of the table of times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"onnxruntime {collect.version()}, {collect.processor()}, one thread, batch 1")
    with tempfile.TemporaryDirectory() as folder:
        data = part(l0prune.load_data("cifar10"), options.examples)
        ways = Ways(data, options, Path(folder))
        print(ways.table(), end="\n\n")
        print(
            "| way | budget | int8, ms | of dense | MACs | float32, error | int8, error | by | s |"
        )
        print("|" + "---|" * 9, flush=True)
        for way in (DENSE, LEARNED, THEN_QUANTIZED, MACS, SHALLOWER):
            print(ways.row(way), flush=True)


if __name__ == "__main__":
    main()
