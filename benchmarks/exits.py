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

import argparse
import copy
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.budgets import part
from benchmarks.cifar import CHECKPOINTS
from l0prune.capture.example_inputs import first_rows
from l0prune.data import Data, Tensors
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.file import to_onnx
from l0prune.exporting.slicing.program import reexport
from l0prune.features.exits.file import forced_to
from l0prune.files.consent import RECIPES
from l0prune.files.model_sources import load_model

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
    weights = None
    if name in CHECKPOINTS:
        weights = str(Path(os.environ["L0PRUNE_DATA"]).parent / "models" / CHECKPOINTS[name])
    model: nn.Module = load_model(f"{RECIPES / 'vision.py'}:{name}", weights)
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


def overheads(names: list[str], exits: int) -> Iterator[str]:
    """Yield a table of what the ``If`` costs in networks that have not learned."""
    yield "| network | ms of each way | ms of the first exit alone | overhead |"
    yield "|---" * 4 + "|"
    for name in names:
        torch.manual_seed(0)
        x = torch.randn(8, 3, 32, 32)
        model = load_model(f"{RECIPES / 'vision.py'}:{name}")
        model = l0prune.gate(l0prune.add_exits(model, (x,), at=exits), (x,))
        held_out = Tensors(x, torch.arange(8))
        early = l0prune.choose_exits(l0prune.export(model), held_out, tolerance=0.5)
        with tempfile.TemporaryDirectory() as folder:
            times = ms_of_ways(early, early.save_onnx(Path(folder) / "early.onnx"), x[:1])
        ways = " / ".join(f"{times[str(n)]:.3f}" for n in range(exits + 1))
        yield f"| {name} | {ways} | {times['alone']:.3f} | {times['0'] / times['alone']:.3f} |"


def of_exits(
    dense: l0prune.Export, held_out: Tensors, data: Data, tolerances: list[float], folder: Path
) -> Iterator[str]:
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
        yield (
            f"| exits, tolerance {tolerance:.1%} | {dense.macs:,} | {left} | {ways} | {mean:.4f} | "
            f"{wrong:.2%} | {times['0'] / times['alone']:.3f} |"
        )


def rows(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    data = l0prune.load_data(options.data)
    data, held_out = divided(data if options.examples is None else part(data, options.examples))
    yield "| way | MACs | leave at | ms of each way | expected ms | error | overhead |"
    yield "|---" * 7 + "|"
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
                yield f"| cut alone | {dense.macs:,} | | | {time:.4f} | {wrong:.2%} | |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="digits_resnet", help="a function of vision.py")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--exits", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--examples", type=int, help="of the training data, and of the test data")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25, 0.12])
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.003, 0.01])
    parser.add_argument("--threads", type=int, default=1, help="of training; times are of one")
    parser.add_argument("--overhead", nargs="+", default=[], metavar="NETWORK")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = overheads(options.overhead, options.exits) if options.overhead else rows(options)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
