"""Early exits: what an ``If`` costs, and whether they beat a network that is only cut.

    python -m benchmarks.exits
    python -m benchmarks.exits --epochs 15 --budgets 0.5 0.25 0.12
    python -m benchmarks.exits --overhead resnet20
    python -m benchmarks.exits --network resnet56 --data cifar10 --batch-size 128 --augment

A network with exits is trained, gated and fine-tuned to each budget in MACs; so is one without.
Thresholds are chosen on a fifth of the training examples, which nothing learns from, for each
tolerance; errors are those of the test examples, times those of ONNX Runtime on one thread, one
example at a time, each way through the file beside the way to its end. ``overhead`` is the time
through the first exit over that of a file of the network up to there and its head alone; with
``--overhead`` nothing else is looked at, of CIFAR networks that have not learned.
"""

from __future__ import annotations

import copy
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.budgets import part
from benchmarks.runner import options, published, table
from l0prune.capture.example_inputs import first_rows
from l0prune.data import Data, Tensors
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.file import to_onnx
from l0prune.exporting.slicing.program import reexport
from l0prune.features.exits.file import forced_to
from l0prune.files.consent import RECIPES

SETTINGS: dict[str, Any] = {
    "schedule": "cosine", "ema": 0.99, "report": False, "progress": False,
}  # fmt: skip
SECONDS = 2.0


class First(nn.Module):
    """A network up to its first exit, with the head of that."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (n, …) to (n, classes)."""
        return self.network(x).exits[0]


def divided(data: Data) -> tuple[Data, Tensors]:
    """Return the data with a fifth of the training examples less, and those."""
    train = data.train
    assert isinstance(train, Tensors)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
    parts = [
        replace(train, inputs=train.inputs[i], targets=train.targets[i])
        for i in order.split(4 * len(order) // 5)
    ]
    return Data(data.name, parts[0], data.test, data.classes, data.preprocessing), parts[1]


def network(name: str, data: Data, exits: int, settings: dict[str, Any]) -> nn.Module:
    """Return a trained network, with exits where some are asked for."""
    torch.manual_seed(0)
    model = published(name)
    if exits:
        model = l0prune.add_exits(model, (data.train.example(2),), at=exits)
    l0prune.train_dense(model, data, lr=2e-3, **settings)
    return model


def cut(model: nn.Module, data: Data, budget: float, settings: dict[str, Any]) -> l0prune.Export:
    """Return the export of a copy that was fine-tuned to a budget."""
    model = l0prune.gate(copy.deepcopy(model), (data.train.example(2),))
    l0prune.finetune(model, data, budget=f"macs={budget}", lr=1e-3, **settings)
    return l0prune.export(model)


def ms(files: dict[str, Path], example: torch.Tensor, base: str) -> dict[str, float]:
    """Return milliseconds of each file, all in turns with one of them."""
    networks = {name: collect.Network(path, 1, collect.CPU) for name, path in files.items()}
    feeds = {
        name: {each.session.get_inputs()[0].name: example.numpy()}
        for name, each in networks.items()
    }
    medians = {name: partial(each.median, feeds[name]) for name, each in networks.items()}
    turns = {n: collect.turns(each, medians[base], SECONDS) for n, each in medians.items()}
    whole = collect.typical([ms for each in turns.values() for ms in each["dense"]])
    return {name: collect.share(each["own"], each["dense"]) * whole for name, each in turns.items()}


def ms_of_ways(early: l0prune.EarlyExits, file: Path, example: torch.Tensor) -> dict[str, float]:
    """Return milliseconds of each way through a file, and of the first exit ``alone``."""
    exits, folder = len(early.exits) - 1, file.parent
    files = {str(number): folder / f"{number}.onnx" for number in range(exits + 1)}
    for number, path in enumerate(files.values()):
        path.write_bytes(forced_to(file, exits, number))
    first = First(copy.deepcopy(early.module.network)).eval()
    program = reexport(first, first_rows(((example,), {})), dynamic=False).program
    files["alone"] = folder / "alone.onnx"
    files["alone"].write_bytes(to_onnx(program).SerializeToString())
    return ms(files, example, str(exits))


def overheads(names: list[str], exits: int) -> Iterator[tuple[str, ...]]:
    """Yield rows of what the ``If`` costs in networks that have not learned."""
    for name in names:
        torch.manual_seed(0)
        x = torch.randn(8, 3, 32, 32)
        model = l0prune.load_model(f"{RECIPES / 'vision.py'}:{name}")
        model = l0prune.gate(l0prune.add_exits(model, (x,), at=exits), (x,))
        held_out = Tensors(x, torch.arange(8))
        early = l0prune.choose_exits(l0prune.export(model), held_out, tolerance=0.5)
        with tempfile.TemporaryDirectory() as folder:
            times = ms_of_ways(early, early.save_onnx(Path(folder) / "early.onnx"), x[:1])
        ways = " / ".join(f"{times[str(n)]:.3f}" for n in range(exits + 1))
        yield name, ways, f"{times['alone']:.3f}", f"{times['0'] / times['alone']:.3f}"


def of_exits(
    dense: l0prune.Export, held_out: Tensors, data: Data, tolerances: list[float], folder: Path
) -> Iterator[tuple[str, ...]]:
    """Yield rows: each tolerance, and what the ``If`` costs."""
    example = data.test.example(1)
    test = data.test
    assert isinstance(test, Tensors)
    early = None
    for tolerance in tolerances:
        early = l0prune.choose_exits(dense, held_out, tolerance=tolerance)
        file = early.save_onnx(folder / "early.onnx")
        exits = len(early.exits) - 1
        times = ms_of_ways(early, file, example)
        with torch.no_grad():
            found = early.module.decide(test.inputs)
        wrong = float((found.output.argmax(1) != test.targets).float().mean())
        shares = [float((found.exit == number).float().mean()) for number in range(exits + 1)]
        mean = sum(share * times[str(number)] for number, share in enumerate(shares))
        ways = " / ".join(f"{times[str(n)]:.4f}" for n in range(exits + 1))
        left = " / ".join(f"{share:.0%}" for share in shares)
        way, overhead = f"exits, tolerance {tolerance:.1%}", times["0"] / times["alone"]
        numbers = f"{mean:.4f}", f"{wrong:.2%}", f"{overhead:.3f}"
        yield way, f"{dense.macs:,}", left, ways, *numbers


def rows(options: Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    data = l0prune.load_data(options.data)
    data, held_out = divided(data if options.examples is None else part(data, options.examples))
    settings = {name: getattr(options, name) for name in ("epochs", "batch_size", "augment")}
    settings |= SETTINGS
    for exits in (0, options.exits):
        model = network(options.network, data, exits, settings)
        for budget in options.budgets:
            dense = cut(model, data, budget, settings)
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                if exits:
                    yield from of_exits(dense, held_out, data, options.tolerances, folder)
                    continue
                (file,) = dense.save_onnx(folder / "cut.onnx", time=False)
                time = ms({"cut": file}, data.test.example(1), "cut")["cut"]
                wrong = l0prune.evaluate(dense.module, data)["error"]
                yield "cut alone", f"{dense.macs:,}", "", "", f"{time:.4f}", f"{wrong:.2%}", ""


def main() -> None:
    given = options(
        __doc__, threads=(1, "of training; times are of one"), data="digits", exits=2, epochs=10,
        network=("digits_resnet", "a function of vision.py"), batch_size=32, augment=False,
        examples=(int, "of the training data, and of the test data"), budgets=[0.5, 0.25, 0.12],
        tolerances=[0.003, 0.01], overhead=([str], "networks"),
    )  # fmt: skip
    if given.overhead:
        head = "network | ms of each way | ms of the first exit alone | overhead"
        return table(head, overheads(given.overhead, given.exits))
    head = "way | MACs | leave at | ms of each way | expected ms | error | overhead"
    table(head, rows(given))


if __name__ == "__main__":
    main()
