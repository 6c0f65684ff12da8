"""Times as fast at half of the MACs, beside what the MACs promise, and budgets in speed.

    python -m benchmarks.faster [--networks resnet18 …] [--ways auto any 16 speed tp tp-16]
                                [--target onnxruntime] [--table]

Networks with random weights, cut by one-shot scores (group magnitude) to ``macs=0.5``: with the
default (``auto``), with any widths (``round_to=1``), with multiples of 16; and to ``speed=2``.
Beside them Torch-Pruning at its defaults and with ``round_to=16``. Each result is exported, written
as ONNX and timed in turns with the dense network's file: one thread, one example. The ratio is
times as fast over 1 ÷ the share of the MACs that is left. Rows are JSON lines in
``runs/faster.jsonl``; ``--table`` prints them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import l0prune
from benchmarks.isolation import ROOT, Row, failure, measure, rows, run
from benchmarks.runner import HIDDEN, Some, lines, options
from l0prune.exporting.onnx import collect
from l0prune.features.latency.runtimes import runtime_of

PATH = ROOT / "runs" / "faster.jsonl"
SECONDS, TIMES, LIMIT = 1.0, 3, 1500
NOISE = 1e-3
SIDES = {
    "resnet18": 64, "resnet50": 224, "mobilenet_v2": 160, "mobilenet_v3_large": 160,
    "efficientnet_b0": 160, "regnet_y_400mf": 160, "densenet121": 128, "convnext_tiny": 128,
    "vit_b_16": 224, "swin_t": 224, "bert": 0, "yolo11n": 320,
}  # fmt: skip
WAYS = ("auto", "any", "16", "speed", "tp", "tp-16")
Built = tuple[nn.Module, tuple]


def build(name: str) -> Built:
    """A network with random weights in eval mode, and an example."""
    torch.manual_seed(0)
    if name == "bert":
        from transformers import BertConfig, BertModel

        model = BertModel(BertConfig(), add_pooling_layer=False)
        example: tuple = (torch.randint(0, 1000, (2, 64)),)
    elif name == "yolo11n":
        from ultralytics import YOLO

        model, example = YOLO("yolo11n.yaml").model, (torch.randn(2, 3, 320, 320),)
    else:
        import torchvision

        model = getattr(torchvision.models, name)(weights=None)
        example = (torch.randn(2, 3, SIDES[name], SIDES[name]),)
    return roughened(model).eval(), example


@torch.no_grad()
def roughened(model: nn.Module) -> nn.Module:
    """The model with noise on its parameters: exporters merge equal tensors, as of constants."""
    for parameter in model.parameters():
        parameter += NOISE * torch.randn_like(parameter)
    return model


def looks(own: Any, dense: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    """The time over the dense network's: the median of a few looks, and how far they differ."""
    turns = (collect.networks_turns(own, dense, inputs, SECONDS) for _ in range(TIMES))
    shares = [collect.share(**each) for each in turns]
    return statistics.median(shares), max(shares) / min(shares) - 1


def steps(name: str, ways: list[str], target: str) -> Iterator[Row]:
    """The rows of one network, one way after the other in one process."""
    yield {"target": target, "processor": collect.processor()}
    model, example = build(name)
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(Path(folder), target, model, example)
        for way in ways:
            torch.manual_seed(0)
            start = time.perf_counter()
            try:
                left = _written(way, *build(name), clock, target)
            except Exception as error:  # a rival's failure is a result, too
                yield {way: {"failed": f"{type(error).__name__}: {error}"[:300]}}
                continue
            seconds = round(time.perf_counter() - start)
            times, spread = clock.times_as_fast("cut.onnx")
            row = {"macs": left, "times": times, "spread": spread, "seconds": seconds}
            yield {way: row}


class Clock:
    """Times files on a runtime beside the dense network's, one thread and one example."""

    def __init__(self, folder: Path, target: str, model: nn.Module, example: tuple) -> None:
        self._folder, self._runtime = folder, runtime_of(target)
        self._values = [value[:1].numpy() for value in example]
        self.write("dense.onnx", lambda path: save(model, example, path))

    def write(self, name: str, save_file: Callable[[str], Any]) -> None:
        """Write a file, converted as the runtime wants it."""
        path = self._folder / name
        save_file(str(path))
        if self._runtime.convert is not None:
            file = onnx.load(str(path))
            onnx.save(self._runtime.convert(file, self._inputs(file)), str(path))

    def _inputs(self, file: onnx.ModelProto) -> dict[str, Any]:
        return {of.name: value for of, value in zip(file.graph.input, self._values, strict=True)}

    def times_as_fast(self, name: str) -> tuple[float, float]:
        """Times as fast as the dense file, and how far some looks at it differ."""
        paths = [self._folder / each for each in (name, "dense.onnx")]
        inputs = self._inputs(onnx.load(str(paths[0]), load_external_data=False))
        both = (self._runtime.load(path, 1, self._runtime.provider) for path in paths)
        share, spread = looks(*both, inputs)
        return 1 / share, spread


def macs_of(model: nn.Module, example: tuple) -> float:
    """MACs of one example, as torch counts them."""
    one = tuple(value[:1] for value in example)
    torch.backends.mha.set_fastpath_enabled(False)  # which the counter does not see
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*one)
    return counter.get_total_flops() / 2


def save(model: nn.Module, example: tuple, path: str) -> None:
    """Write a network with torch's own exporter, for a free batch."""
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        model, example, path, dynamo=True, dynamic_shapes=tuple({0: batch} for _ in example),
        external_data=False, verbose=False,
    )  # fmt: skip


def _written(way: str, model: nn.Module, example: tuple, clock: Clock, target: str) -> float:
    """Cut a network in this way, write its file, and return the share of the MACs that is left."""
    if way.startswith("tp"):
        whole = macs_of(model, example)
        _torch_pruned(model, example, 16 if way == "tp-16" else None)
        clock.write("cut.onnx", lambda path: save(model, example, path))
        return macs_of(model, example) / whole
    l0prune.gate(model, example, branches=False)
    scores = l0prune.score(model, "group-magnitude")
    budget = "speed=2" if way == "speed" else "macs=0.5"
    widths = {"any": {"round_to": 1}, "16": {"round_to": 16}}.get(way, {})
    l0prune.fit(model, budget, scores, target=target, **widths)
    small = l0prune.export(model)
    clock.write("cut.onnx", lambda path: small.save_onnx(path, time=False))
    return small.macs / small.macs_before


def _torch_pruned(model: nn.Module, example: tuple, round_to: int | None) -> None:
    """Prune with Torch-Pruning by magnitude, in steps, until half of the MACs are left."""
    import torch_pruning as tp

    model.requires_grad_(True)
    last = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1:]
    pruner = tp.MagnitudePruner(
        model, example, importance=tp.importance.MagnitudeImportance(p=2), pruning_ratio=1.0,
        max_pruning_ratio=0.9, ignored_layers=last, global_pruning=False, iterative_steps=100,
        round_to=round_to, num_heads={m: m.num_heads for m in model.modules()
                                      if isinstance(m, nn.MultiheadAttention)},
    )  # fmt: skip
    whole = macs_of(model, example)
    for _ in range(100):
        if macs_of(model, example) <= 0.5 * whole:
            return
        pruner.step()
    raise ValueError("it does not reach half of the MACs")


def tables() -> Iterator[str]:
    """The rows as a table for a page: times as fast, and over what the MACs promise."""
    found = rows(PATH, ("model", "target"))
    for target in dict.fromkeys(row["target"] for row in found):
        mine = [row for row in found if row["target"] == target]
        ways = [way for way in WAYS if any(way in row for row in mine)]
        yield f"\n{target}, {mine[0]['processor']}\n"
        none = {"failed": "-"}
        cells = ((row["model"], *(_cell(way, row.get(way, none)) for way in ways)) for row in mine)
        yield from lines(" | ".join(["network", *ways]), cells)
        of_ways = {way: [_ratio(row[way]) for row in mine if "times" in row.get(way, {})]
                   for way in ways if way != "speed"}  # fmt: skip
        ends = (
            f"{w}: {statistics.median(of):.2f}, {min(of):.2f}" for w, of in of_ways.items() if of
        )
        yield f"times as fast ÷ (1 ÷ MACs), median and least: {'; '.join(ends)}"


def _ratio(row: Row) -> float:
    return row["times"] * row["macs"]


def _cell(way: str, row: Row) -> str:
    if "failed" in row:
        return row["failed"].split(":")[0]
    beside = f"of 2: {row['times'] / 2:.2f}" if way == "speed" else f"{_ratio(row):.2f}"
    return f"{row['times']:.2f} × at {row['macs']:.0%} ({beside})"


def main() -> None:
    given = options(
        __doc__, networks=list(SIDES), ways=Some(WAYS), target="onnxruntime", one=HIDDEN,
        table=(False, "print what there is, and no more"),
    )  # fmt: skip
    if given.one:
        name = given.one.partition(":")[2]
        measure(name, steps(name, given.ways, given.target))
        return
    if not given.table:
        also = ["--target", given.target, "--ways", *given.ways]
        run("benchmarks.faster", PATH, "faster", given.networks, LIMIT, _summary, also)
    print("\n".join(tables()))


def _summary(row: Row) -> str:
    ways = (f"{way} {_cell(way, row[way])}" for way in WAYS if way in row)
    return failure(row) or f"{row['model']:20} {'; '.join(ways)}"


if __name__ == "__main__":
    main()
