"""What an epoch of ``finetune`` costs beside one of a bare PyTorch loop, taking turns.

    python -m benchmarks.epoch [--networks lenet5 resnet20] [--sources loader memory] [--epochs 7]

Both do the same work: the same source of random pictures and labels, batches of 100, fused Adam,
cross-entropy, the mean loss of the epoch, and loss and error on test data. ``finetune`` has gates
that learn, all through; ``dense`` is l0prune's loop without gates, ``train_dense``, which tells
what feeding, metrics and records cost from what the gates cost. Before each of their epochs, the
bare loop does one. Times are those of the process on the CPU; a ratio is the median over the
epochs, of which the first is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product, starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import l0prune
from benchmarks.runner import Some, machine, options, table
from l0prune.data import Data, Tensors
from l0prune.training.phases import watched
from l0prune.training.run import train_dense
from recipes.vision import lenet5, resnet20

BATCH, CLASSES, LR = 100, 10, 1e-3
PLAIN: dict[str, Any] = {
    "batch_size": BATCH, "lr": LR, "optimizer": "adam", "schedule": "constant", "ema": 0.0,
    "recalibrate": 0, "device": "cpu", "progress": False,
}  # fmt: skip
GATES: dict[str, Any] = {"lam": "0.1/N", "warmup": 0, "settle": 0, "compact": "never"}

# By name: the model, the shape of a picture, pictures to train on and to test on.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "lenet5": (lenet5, (1, 28, 28), 3000, 500),
    "resnet20": (resnet20, (3, 32, 32), 1000, 200),
}
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


class Bare:
    """A loop of PyTorch's own, an epoch a call."""

    def __init__(self, model: nn.Module, train: Batches, test: Batches) -> None:
        self._model, self._train, self._test = model, train, test
        self._optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)

    def __call__(self) -> tuple[float, float, float]:
        """Mean training loss, test loss and error."""
        model, optimizer = self._model.train(), self._optimizer
        losses = []
        for inputs, labels in self._train():
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        model.eval()
        found, wrong, count = 0.0, 0, 0
        with torch.no_grad():
            for inputs, labels in self._test():
                outputs = model(inputs)
                found += float(cross_entropy(outputs, labels)) * len(labels)
                wrong += int((outputs.argmax(1) != labels).sum())
                count += len(labels)
        return float(torch.stack(losses).mean()), found / count, wrong / count


class Turns:
    """Lets the bare loop do an epoch before each of another loop, and times both."""

    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._began: float | None = None
        self._seconds: list[tuple[float, float]] = []
        self._of_bare = 0.0

    def begin(self) -> None:
        """The other loop asks for the first batch of an epoch, or for an example of them."""
        start = time.process_time()
        with torch.random.fork_rng(devices=[]):
            self._bare()
        self._began = time.process_time()
        self._of_bare = self._began - start

    def end(self, _: object) -> None:
        """The other loop's epoch is done."""
        assert self._began is not None
        self._seconds.append((self._of_bare, time.process_time() - self._began))

    def medians(self) -> tuple[float, float]:
        """Seconds of a bare epoch, and the ratio."""
        later = self._seconds[1:]
        return median(bare for bare, _ in later), median(its / bare for bare, its in later)


class TakingTurns(Tensors):
    """Pictures in memory whose reader is made to wait while the bare loop does an epoch."""

    turns: Turns | None = None

    def batches(self, *args: Any, **settings: Any) -> Iterator[Any]:
        """See ``Split.batches``."""
        if self.turns is not None:
            self.turns.begin()
        return super().batches(*args, **settings)


class LoaderTakingTurns(DataLoader[Any]):
    """The same of a DataLoader."""

    turns: Turns | None = None

    def __iter__(self) -> Any:
        if self.turns is not None:
            self.turns.begin()
        return super().__iter__()


def pictures(shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Noise with labels that follow from it."""
    inputs = torch.randn(count, *shape)
    return inputs, (inputs.flatten(1)[:, :CLASSES]).argmax(1)


def from_memory(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> tuple[TakingTurns, Any, Batches, Batches]:
    """The source, all data, and the batches of the bare loop: the tensors, indexed."""
    source, tested = TakingTurns(*train), Tensors(*test)

    def shuffled() -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(train[0])).split(BATCH):
            yield train[0][index], train[1][index]

    def in_order() -> Iterator[tuple[Tensor, Tensor]]:
        return zip(test[0].split(BATCH), test[1].split(BATCH), strict=True)

    return source, Data("noise", source, tested, CLASSES), shuffled, in_order


def from_loader(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> tuple[LoaderTakingTurns, Any, Batches, Batches]:
    """The same from DataLoaders: the bare loop has loaders of the same data sets."""
    sets = TensorDataset(*train), TensorDataset(*test)
    source = LoaderTakingTurns(sets[0], BATCH, shuffle=True, drop_last=True)
    tested = DataLoader(sets[1], BATCH)
    own: DataLoader[Any] = DataLoader(sets[0], BATCH, shuffle=True, drop_last=True)
    return source, (source, tested), lambda: iter(own), lambda: iter(tested)


SOURCES = {"loader": from_loader, "memory": from_memory}


def measured(network: str, source: str, gated: bool, epochs: int) -> tuple[float, float]:
    """Seconds of a bare epoch, and how many times as long one of l0prune's loops takes."""
    make, shape, count, tests = NETWORKS[network]
    torch.manual_seed(0)
    reader, data, train, test = SOURCES[source](pictures(shape, count), pictures(shape, tests))
    turns = Turns(Bare(make(), train, test))
    model = make()
    settings = PLAIN | {"epochs": epochs + 1}
    if gated:
        l0prune.gate(model, (torch.randn(2, *shape),))
        settings |= GATES
    reader.turns = turns
    with watched(turns.end):
        (l0prune.finetune if gated else train_dense)(model, data, **settings)
    return turns.medians()


def main() -> None:
    given = options(
        __doc__, threads=(1, None), networks=Some(NETWORKS), sources=Some(SOURCES), epochs=7
    )
    print(f"{machine()}, batch {BATCH}, fused Adam")

    def row(network: str, source: str) -> tuple[str, ...]:
        bare, dense = measured(network, source, False, given.epochs)
        _, gated = measured(network, source, True, given.epochs)
        return network, source, f"{bare:.2f}", f"{dense:.3f}", f"{gated:.3f}"

    rows = starmap(row, product(given.networks, given.sources))
    table("network | source | bare, s | dense | finetune", rows)


if __name__ == "__main__":
    main()
