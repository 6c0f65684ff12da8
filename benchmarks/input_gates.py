"""Gates that follow the input: beside a network that is only cut, at equal epochs.

    python -m benchmarks.input_gates
    python -m benchmarks.input_gates --epochs 15 --shares 0.5 0.3

A trained network is fine-tuned to each share of its MACs: by static gates (``cut``), and by gates
that follow the input, to a target in expected MACs, with batch-shaping and without, with the hard
concrete gate and with the binary one. Expected MACs and errors are those of the test examples.
``ms`` is the mean over test images of a call of ONNX Runtime on one thread, one image at a time: of
the plain file, which multiplies by zero, and of the one that leaves out blocks.
"""

from __future__ import annotations

import copy
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import l0prune
from benchmarks.exits import SETTINGS, cut, network
from benchmarks.runner import options, table
from l0prune.data import Data
from l0prune.exporting.onnx import collect

IMAGES, TURNS = 100, 20


def ms_of(paths: list[Path], inputs: Tensor) -> list[float]:
    """Return the mean milliseconds of one image, the files in turns; the least of the turns."""
    sessions = [collect.Network(path, 1, collect.CPU).session for path in paths]
    names = [session.get_inputs()[0].name for session in sessions]
    images = [image[None].numpy() for image in inputs[:IMAGES]]
    found: list[list[float]] = [[] for _ in paths]
    for _ in range(TURNS):
        for session, name, of in zip(sessions, names, found, strict=True):
            began = time.perf_counter()
            for image in images:
                session.run(None, {name: image})
            of.append((time.perf_counter() - began) / len(images) * 1e3)
    return [min(of) for of in found]


def row(name: str, model: nn.Module, data: Data) -> tuple[str, ...]:
    """Return a row of the table about a network with input gates; it is gated, all open."""
    found = l0prune.input_macs(model, data)
    wrong = l0prune.evaluate(model, data)["error"]
    left_out = sum(block.left_out for block in found.blocks)
    varying = 1 - sum(b.always + b.never for b in found.blocks) / len(found.blocks)
    small = l0prune.export(l0prune.gate(model, (data.train.example(2),)))
    with tempfile.TemporaryDirectory() as folder:
        (plain,) = small.save_onnx(Path(folder) / "plain.onnx", time=False)
        skipping = l0prune.save_skipping(small, Path(folder) / "skip.onnx")
        times = ms_of([plain, skipping], data.test.inputs)  # type: ignore[attr-defined]
    shown = " / ".join(f"{each:.4f}" for each in times)
    macs = f"{found.expected:,.0f}", f"{found.skipped:,.0f}"
    return name, *macs, f"{varying:.1%}", f"{left_out:.2f}", shown, f"{wrong:.2%}"


def rows(options: Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    data = l0prune.load_data(options.data)
    settings = {"epochs": options.epochs, "batch_size": 32, **SETTINGS}
    model, example = network(options.network, data, 0, settings), (data.train.example(2),)
    for share in options.shares:
        dense = cut(model, data, share, settings)
        with tempfile.TemporaryDirectory() as folder:
            (file,) = dense.save_onnx(Path(folder) / "cut.onnx", time=False)
            (ms,) = ms_of([file], data.test.inputs)  # type: ignore[attr-defined]
        wrong = l0prune.evaluate(dense.module, data)["error"]
        macs = f"{dense.macs:,}"
        yield f"cut, {share:g}", macs, macs, "", "", f"{ms:.4f}", f"{wrong:.2%}"
        ways: dict[str, dict[str, Any]] = {
            "hard concrete": {},
            "hard concrete, shape 1": {"shape": 1.0},
            "binary, shape 1": {"shape": 1.0, "gate": l0prune.BinaryConcrete()},
        }
        for name, way in ways.items():
            gated = l0prune.add_input_gates(copy.deepcopy(model), example, target=share, **way)
            l0prune.train_dense(gated, data, lr=1e-3, **settings)
            yield row(f"{name}, {share:g}", gated, data)


def main() -> None:
    network = ("digits_resnet", "a function of vision.py")
    given = options(__doc__, network=network, data="digits", epochs=8, shares=[0.5, 0.3])
    head = "expected MACs | where only blocks are left out | channels that follow the input"
    table(f"way | {head} | blocks left out | ms | error", rows(given))


if __name__ == "__main__":
    main()
