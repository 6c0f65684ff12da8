"""What a run of ``finetune`` does beside its steps, in CPU seconds, and how often a step waits.

    python -m benchmarks.host [--network resnet18] [--size 32] [--budget macs=0.25] [--epochs 8]

A network of torchvision with random weights learns noise under a budget, and is exported; beside
it one without gates does the same epochs. Batches are small, so that what the host does weighs as
much as on a GPU. Printed are the seconds of each part of the run, without those of parts within
it, and by step how often it asks for a number that the device has computed (``Waits``): on a GPU
the host then waits until all that was asked before is done.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode

import l0prune
from benchmarks.runner import machine, options
from l0prune.capture.compat import TorchDispatchMode
from l0prune.data import Data, Tensors
from l0prune.training import loop, run, start
from l0prune.training.averages import Average
from l0prune.training.compaction import Compaction
from l0prune.training.doctor import Doctor
from l0prune.training.gate_run import GateRun
from l0prune.training.history import Display
from l0prune.training.stepper import Losses, Stepper

BATCH, STEPS, CLASSES = 8, 16, 10

# By part of a run: who owns a function, and its name.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "scores that gates start from": [(start, "init_gates")],
    "first checks of the data": [(run, "check_first_batch"), (run, "check_first_test")],
    "cuts": [(Compaction, "begin"), (Compaction, "end")],
    "looks for what may be cut": [(Compaction, "look")],
    "forward and backward": [(Losses, "backward")],
    "penalty, budgets": [(GateRun, "before_step")],
    "phases, fit": [(GateRun, "begin_step"), (GateRun, "advance")],
    "optimizers": [(Stepper, "_apply_gradients")],
    "averages": [(Average, name) for name in ("update", "show", "hide", "install")],
    "statistics of batch norms": [(loop.Loop, "_recalibrate")],
    "test data": [(loop.Loop, "_tested")],
    "records, doctor": [(GateRun, "record"), (Doctor, "after"), (loop.Loop, "_check_weights")],
    "digests, checkpoints": [(loop.Loop, "_save"), (run.checkpoint, "snapshot")],
    "display": [(Display, name) for name in ("step", "epoch", "note")],
}


class Clock:
    """Seconds by part, those of inner parts not counted in the outer ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._within: list[float] = []  # seconds of inner parts, by depth

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the context as a part of this name."""
        began = time.process_time()
        self._within.append(0.0)
        try:
            yield
        finally:
            took = time.process_time() - began
            self.seconds[name] += took - self._within.pop()
            self.calls[name] += 1
            if self._within:
                self._within[-1] += took

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted as a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context all ``PARTS`` are counted."""
        with ExitStack() as stack:
            for part, places in PARTS.items():
                for owner, name in places:
                    counted = self.counted(part, getattr(owner, name))
                    stack.enter_context(patch.object(owner, name, counted))
            yield


class Waits(TorchDispatchMode):
    """Counts what asks for a tensor's numbers, by step, and where in the package.

    Attributes:
        by_step: how many waits each step had.
        places: by operator and line, how many there were in all steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_step: list[int] = []
        self.places: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[Waits]:
        """Within the context the steps of ``finetune`` are counted."""
        step = Stepper.__call__

        def counted(stepper: Stepper, *args: Any) -> Any:
            with self.one_step():
                return step(stepper, *args)

        with patch.object(Stepper, "__call__", counted):
            yield self

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Count the context as a step."""
        self.by_step.append(0)
        with self, _Reads(self):
            yield

    def note(self, what: str) -> None:
        """Count one."""
        self.by_step[-1] += 1
        own = [f for f in traceback.extract_stack() if "/l0prune/" in f.filename]
        where = f"{own[-1].filename.rpartition('/l0prune/')[2]}:{own[-1].lineno}" if own else ""
        self.places[what, where] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _asks(func, args):
            self.note(str(func))
        return func(*args, **(kwargs or {}))


def _asks(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the host has to know what the operator computes: a number, or a size."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)  # type: ignore[attr-defined]
    return any(tag in func.tags for tag in tags)


class _Reads(TorchFunctionMode):
    """Sees what brings numbers to the host by no operator where they are there already."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "cpu", "numpy"):
            self._waits.note(name)
        return func(*args, **(kwargs or {}))


def noise(size: int) -> Data:
    """Pictures with labels, in memory."""
    inputs = torch.randn(BATCH * STEPS, 3, size, size)
    targets = torch.randint(0, CLASSES, (len(inputs),))
    tested = Tensors(inputs[: 2 * BATCH], targets[: 2 * BATCH])
    return Data("noise", Tensors(inputs, targets), tested, CLASSES)


def measure(network: str, size: int, budget: str, epochs: int) -> tuple[float, Clock, Waits]:
    """Seconds without gates; the parts of a run with gates and of its export; and its waits."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(torchvision.models, network)(num_classes=CLASSES)
        return model

    def gated() -> nn.Module:
        return l0prune.gate(made(), torch.randn(2, 3, size, size))

    common: dict[str, Any] = {"epochs": epochs, "batch_size": BATCH, "device": "cpu"}
    data, clock = noise(size), Clock()
    began = time.process_time()
    l0prune.train_dense(made(), data, **common)
    dense = time.process_time() - began
    with clock.part("gate"):
        model = gated()
    with clock.watching(), clock.part("all else"):
        l0prune.finetune(model, data, budget=budget, **common)
    with clock.part("export"):
        l0prune.export(model)
    with Waits().watching() as waits:
        l0prune.finetune(gated(), data, budget=budget, **common)
    return dense, clock, waits


def main() -> None:
    given = options(
        __doc__, threads=(1, None), network=("resnet18", "of torchvision"), budget="macs=0.25",
        size=(32, "of the pictures"), epochs=(8, f"of {STEPS} steps"),
    )  # fmt: skip
    dense, clock, waits = measure(given.network, given.size, given.budget, given.epochs)
    print(f"{machine()}, batch {BATCH}, {given}")
    print(f"{dense:8.2f} s  the same epochs without gates")
    print(f"{sum(clock.seconds.values()):8.2f} s  gate, finetune and export; of these:")
    for name, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        print(f"{seconds:8.2f} s  {name} ({clock.calls[name]} calls)")
    often = median(waits.by_step)
    print(f"waits in a step: {often:g} (median), {max(waits.by_step)} (most)")
    for (what, where), count in waits.places.most_common(12):
        print(f"{count:8}    {what} in {where}")


if __name__ == "__main__":
    main()
