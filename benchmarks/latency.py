"""Milliseconds in ONNX Runtime: how well they are predicted, and are budgets in them met?

    python -m benchmarks.latency --networks resnet50 mobilenet_v2 … [--budgets 0.5 0.3]
    python -m benchmarks.latency --table

For each network of torchvision, with random weights: a latency table is made (one thread, batch 1);
networks of random widths that it has not seen are exported, and their files timed beside the dense
one's, predicted over measured; then ``l0prune.fit`` is given each budget, with group magnitude as
the score, the result is exported, and the file is timed in the same way. Rows are JSON lines in
``runs/latency.jsonl``; ``--table`` prints them. Tables are kept in ``runs/latency``, and one that
is there is not made again.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torchvision
from torch import nn

import l0prune
from benchmarks.faster import looks, roughened
from benchmarks.isolation import ROOT, Row, append, rows
from benchmarks.runner import options, table
from l0prune.exporting.onnx import collect
from l0prune.features.latency.network_files import DENSE, INPUTS, NetworkFiles
from l0prune.features.latency.sizes import sampled_widths, slots_of

NETWORKS = (
    "resnet50", "mobilenet_v2", "densenet121", "efficientnet_b0", "convnext_tiny", "vit_b_16",
)  # fmt: skip
UNSEEN = 8
PATH = ROOT / "runs" / "latency.jsonl"
TABLES = PATH.parent / "latency"


class Bench:
    """Times exported files beside the dense one's."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.files = NetworkFiles(model, 1, folder)
        self._inputs = dict(np.load(folder / INPUTS).items())
        self._dense = collect.Network(folder / DENSE, 1, collect.CPU)

    def share(self, path: Path) -> tuple[float, float]:
        """The file's time over the dense one's, and how far some looks at it differ."""
        return looks(collect.Network(path, 1, collect.CPU), self._dense, self._inputs)

    def exported(self) -> tuple[float, float, l0prune.Export]:
        """The share and its spread, of the file that an export of the model writes."""
        small = l0prune.export(self._model)
        path = self._folder / "exported.onnx"
        small.save_onnx(path, time=False)
        return *self.share(path), small


def steps(name: str, samples: int, budgets: list[float]) -> Iterator[Row]:
    """The rows of one network."""
    torch.manual_seed(0)
    model = roughened(getattr(torchvision.models, name)(weights=None).eval())
    l0prune.gate(model, (torch.randn(1, 3, 224, 224),), branches=False)
    gates = l0prune.gates(model)
    kept = TABLES / f"{name}.json"
    start = time.perf_counter()
    is_made = kept.exists()
    made = l0prune.LatencyTable.load(kept) if is_made else l0prune.measure(model, samples=samples)
    seconds = time.perf_counter() - start
    about = {"network": name, "setting": str(made.setting), "samples": samples}
    if not is_made:
        TABLES.mkdir(parents=True, exist_ok=True)
        made.save(kept)
        yield {**about, "what": "table", "seconds": seconds, "dense": made.dense,
               "held_out": vars(made.quality)}  # fmt: skip
    measure = made.of(gates.plan)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, Path(folder))
        ratios = []
        drawn = sampled_widths(gates.plan, seed=99, aligned=(0.0, 1.0))
        for widths in islice(drawn, 1, UNSEEN + 1):  # the first is the dense network
            open_ = slots_of(gates.plan, widths)
            share, _ = bench.share(bench.files.write("unseen.onnx", gates.plan.kept(open_)))
            ratios.append(measure.actual(open_) / made.dense / share)
        yield {**about, "what": "unseen", "predicted over measured": ratios}
        scores = l0prune.score(model, "group-magnitude")
        for budget in budgets:
            gates.set_open(torch.ones(gates.plan.size, dtype=torch.bool))
            start = time.perf_counter()
            l0prune.fit(model, f"latency={budget}", scores, latency=made)
            seconds = time.perf_counter() - start
            share, spread, dense = bench.exported()
            yield {**about, "what": "budget", "budget": budget, "share": share, "spread": spread,
                   "macs": dense.macs / dense.macs_before, "seconds": seconds}  # fmt: skip


def cells() -> Iterator[tuple[str, ...]]:
    """The rows of each network in one, for a page."""
    found = rows(PATH, ("network", "what", "budget"))
    for name in dict.fromkeys(row["network"] for row in found):
        mine = [row for row in found if row["network"] == name]
        made = next(row for row in mine if row["what"] == "table")
        errors = [abs(r - 1) for row in mine for r in row.get("predicted over measured", ())]
        kept = [row for row in mine if row["what"] == "budget"]
        yield (
            name,
            f"{made['dense']:.1f}",
            f"{made['seconds']:.0f}",
            f"{statistics.median(errors):.1%}, {max(errors):.1%}" if errors else "-",
            "; ".join(f"{row['budget']:g}: {row['share']:.3f}" for row in kept),
            "; ".join(f"{row['macs']:.3f}" for row in kept),
            "; ".join(f"{row['macs'] / row['share']:.2f}" for row in kept),
        )


def main() -> None:
    given = options(
        __doc__, networks=[*NETWORKS], budgets=[0.5, 0.3], samples=48,
        table=(False, "print what there is, and no more"),
    )  # fmt: skip
    for name in given.networks if not given.table else ():
        for row in steps(name, given.samples, given.budgets):
            append(PATH, {"budget": None, **row})
            print(row, flush=True)
    unseen = "predicted / measured − 1, unseen: median, worst"
    after = "budget: measured share | MACs | speed-up over MAC reduction"
    table(f"network | dense, ms | table, s | {unseen} | {after}", cells())


if __name__ == "__main__":
    main()
