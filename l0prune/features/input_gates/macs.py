"""MACs of a network with input gates in eval mode, averaged over data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor, nn

from l0prune.capture.model_checks import evaluating
from l0prune.capture.provenance import within
from l0prune.data.dataset import WHOLE
from l0prune.errors import DataError, UsageError
from l0prune.features.input_gates.cost import share_of
from l0prune.features.input_gates.gate import GatedBlock, InputGate
from l0prune.features.input_gates.network import InputGatedNetwork, input_gated
from l0prune.gating.attaching import gates_or_none
from l0prune.running.batches import call, test_batches
from l0prune.running.task import Task, is_split


@dataclass(frozen=True)
class Opened:
    """Share of a block that its gates open.

    Attributes:
        path: of the block.
        open: share of its channels, on average.
        always: share of its channels that are open for every example seen.
        never: share of its channels that are open for none.
        left_out: share of the examples for which the whole block is closed.
    """

    path: str
    open: float
    always: float
    never: float
    left_out: float


@dataclass(frozen=True)
class InputMacs:
    """Work of a network with input gates on some data. It prints as a table.

    Attributes:
        expected: MACs of one example on average, of what its open gates leave; gating modules
            included. Closed channels are counted as not computed: a runtime multiplies them by
            zero, but for blocks that are left out whole (``save_skipping``).
        whole: MACs with all gates open.
        skipped: MACs of one example on average where only whole blocks are left out.
        blocks: what is open of each.
        examples: that were seen.
    """

    expected: float
    whole: float
    skipped: float
    blocks: tuple[Opened, ...]
    examples: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render one row for each block."""
        table = Table("block", "open", "always", "never", "left out")
        for each in self.blocks:
            table.add_row(
                each.path,
                *(f"{v:.1%}" for v in (each.open, each.always, each.never, each.left_out)),
            )
        yield table
        yield (
            f"{self.expected:,.0f} of {self.whole:,.0f} MACs expected ({self.skipped:,.0f} where "
            f"only whole blocks are left out), on {self.examples} examples."
        )


def input_macs(model: nn.Module, data: Any, *, batch_size: int = 100) -> InputMacs:
    """Count the average MACs of a network with input gates on data.

    Args:
        model: with input gates; where it is gated, too, what its export has is counted.
        data: batches, a dataset or a split; of a data source, a pair or a ``Task`` the test part.
        batch_size: examples at a time, where the source lets us choose.

    Raises:
        DataError: there are no examples.
        UsageError: the model has no input gates.
    """
    network = input_gated(model)
    if network is None:
        raise UsageError(
            "this model has no input gates: l0prune.add_input_gates(model, args) puts them on"
        )
    work = _work(model, network)
    alone = is_split(data) or (not isinstance(data, Task) and Task.of(data).test is None)
    task = Task.of(([], data) if alone else data)
    seen = [_Seen(*each) for each in zip(network.blocks, _gates(network), work.kept, strict=True)]
    device = next(network.parameters()).device
    shares, examples = torch.zeros(2, len(network.work), dtype=torch.float64), 0
    with _recording(network), evaluating(model):
        for batch in test_batches(task, batch_size, device, WHOLE):
            call(model, batch.inputs)
            examples += batch.examples
            for each in seen:
                each.add()
            found = [seen[block].shares(axes) for _, block, axes, _ in network.work]
            shares += batch.examples * torch.tensor(found, dtype=torch.float64).T
    if not examples:
        raise DataError("there are no examples to count on")
    expected, skipped = (work.whole - (work.layers * (1 - of / examples)).sum() for of in shares)
    blocks = tuple(each.opened(examples) for each in seen)
    return InputMacs(float(expected), work.whole, float(skipped), blocks, examples)


class _Work(NamedTuple):
    """MACs of an export of the model.

    Attributes:
        whole: of all.
        layers: of each entry of the network's ``work``, float64.
        kept: for each block, a mask of the slots that are left of each of its axes.
    """

    whole: float
    layers: Tensor
    kept: list[list[Tensor]]


def _work(model: nn.Module, network: InputGatedNetwork) -> _Work:
    """Return the work that the model's gates leave; all of it without gates."""
    bank = gates_or_none(model)
    if bank is None:
        layers = torch.tensor([macs for *_, macs in network.work], dtype=torch.float64)
        kept = [[torch.ones(n, dtype=torch.bool) for n in b.widths] for b in network.blocks]
        return _Work(network.macs, layers, kept)
    plan, slots = bank.plan, bank.plan.kept(bank.open())
    owners: dict[str, float] = defaultdict(float)
    for cost in plan.costs:
        if cost.unit == "macs":
            sizes = (int(plan.mask(dim, slots).sum()) for dim in cost.dims)
            owners[cost.owner] += cost.scale * prod(sizes)
    path = next(path for path, module in model.named_modules() if module is network)
    own = within(path, "network")
    macs = [owners[within(own, layer)] for layer, *_ in network.work]
    kept = [[torch.empty(0)] * len(block.widths) for block in network.blocks]
    for of, block in zip(kept, network.blocks, strict=True):
        for reader in block.readers:
            layout = plan.tensors[within(own, f"{reader.path}.weight")][1]
            of[reader.axis] = plan.mask(layout, slots)
    return _Work(sum(owners.values()), torch.tensor(macs, dtype=torch.float64), kept)


def _gates(network: InputGatedNetwork) -> list[InputGate]:
    return [gate for gate in network.gates if isinstance(gate, InputGate)]


@contextmanager
def _recording(network: InputGatedNetwork) -> Iterator[None]:
    """Record the open channels of each forward in the gates within the context."""
    for gate in _gates(network):
        gate.is_recording = True
    try:
        yield
    finally:
        for gate in _gates(network):
            gate.is_recording, gate.chances = False, []


class _Seen:
    """Counts of the open channels of one block, over batches."""

    def __init__(self, block: GatedBlock, gate: InputGate, kept: Sequence[Tensor]) -> None:
        self._block, self._gate, self._kept = block, gate, kept
        self._opened, self._closed, self._sum, self._left_out = (torch.zeros(()) for _ in range(4))

    def _axes(self) -> tuple[list[Tensor], Tensor | None]:
        """Return the last forward's openness of kept slots by axis, and of the whole block."""
        axes = [each.double().cpu() for each in self._gate.chances]
        whole = axes.pop() if self._block.skips else None
        return [a[..., kept] for a, kept in zip(axes, self._kept, strict=True)], whole

    def shares(self, axes: Sequence[int]) -> tuple[float, float]:
        """Return the last batch's share of a layer's MACs, by open channels and by open blocks."""
        found, whole = self._axes()
        means = [each.mean(-1) for each in found]
        of_block = torch.ones((), dtype=torch.float64) if whole is None else whole.squeeze(-1)
        own = share_of(axes, [*means, of_block], skips=True)
        return float(own.mean()), float(of_block.mean())

    def add(self) -> None:
        """Add the last forward's open channels to the counts."""
        axes, whole = self._axes()
        if whole is not None:
            axes = [each * whole for each in axes]
            self._left_out = self._left_out + (1 - whole.flatten(1).mean(1)).sum()
        opened = torch.cat([a.flatten(1, -2).mean(1) if a.dim() > 2 else a for a in axes], 1)
        self._opened = torch.maximum(self._opened, opened.amax(0))
        self._closed = torch.maximum(self._closed, (1 - opened).amax(0))
        self._sum = self._sum + opened.sum(0)

    def opened(self, examples: int) -> Opened:
        """Return the block's open shares over all ``examples``."""
        return Opened(
            self._block.path,
            float(self._sum.mean()) / examples,
            float((self._closed == 0).float().mean()),
            float((self._opened == 0).float().mean()),
            float(self._left_out) / examples,
        )
