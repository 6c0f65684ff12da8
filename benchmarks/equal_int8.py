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
from benchmarks.eight_bits import by_turns, error_of, resnet20
from benchmarks.isolation import ROOT
from benchmarks.runner import machine, options, table
from benchmarks.ways import BATCH, SGD
from l0prune.data import Data
from l0prune.errors import UsageError, first_line
from l0prune.exporting.onnx import collect
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
        kept = ROOT / "runs" / "equal_int8" / str(options.samples)
        self._table = l0prune.measure(
            gated, runtime="onnxruntime-int8", samples=options.samples, folder=kept
        )
        self._write(DENSE, gated)

    def table(self) -> str:
        """How well the table of times predicts networks that it has not seen."""
        quality = self._table.quality
        return (
            f"table: dense {self._table.dense:.3g} ms, off by {quality.median:.1%} (median) and "
            f"{quality.worst:.1%} (worst) of {quality.networks} networks"
        )

    def row(self, way: str) -> list[str]:
        """Train one way; return its row of the table."""
        gated, begin = self._gated(), time.perf_counter()
        try:
            budget = self._trained(way, gated)
        except UsageError as error:
            return [way, first_line(error)]
        seconds = time.perf_counter() - begin
        if way != DENSE:
            self._write(way, gated)
        made = self._files[way]
        assert made.int8 is not None
        ms, share = self._time(way)
        cells = [way, budget, f"{ms:.3f}", f"{share:.1%}", f"{made.macs / made.macs_before:.1%}"]
        task, files = Task.of(self._data), [f"{way}.onnx", f"{way}.int8.onnx"]
        cells += [f"{error_of(self._folder / file, task):.2%}" for file in files]
        return [*cells, made.int8.method, f"{seconds:.0f}"]

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
        how |= {"batch_size": BATCH, "augment": True, "progress": False, "report": False}
        how |= {name: getattr(self._options, name) for name in ("epochs", "seed", "device")}
        l0prune.finetune(gated, self._data, **SGD, **how)

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
    given = options(
        __doc__, latency=(0.85, "of the dense int8 file's"), examples=5000, epochs=2, seed=0,
        device=("auto", "that trains; times are the CPU's"), samples=24,
    )  # fmt: skip
    print(f"{machine()}, batch 1")
    with tempfile.TemporaryDirectory() as folder:
        data = part(l0prune.load_data("cifar10"), given.examples)
        ways = Ways(data, given, Path(folder))
        print(ways.table(), end="\n\n")
        head = "way | budget | int8, ms | of dense | MACs | float32, error | int8, error | by | s"
        table(head, map(ways.row, (DENSE, LEARNED, THEN_QUANTIZED, MACS, SHALLOWER)))


if __name__ == "__main__":
    main()
