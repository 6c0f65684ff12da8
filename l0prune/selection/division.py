"""What goes, and of which layers, where weights are compensated: a division of a budget over axes.

Within an axis slots go in the order of the error that is left after compensation: of a reader with
weights W and inputs of covariance C, slots c leave

    tr(W_c [(C⁻¹)_cc]⁻¹ W_cᵀ),

and in rounds, after each of which W and C⁻¹ are those of what stays. What an axis is worth against
others is measured: the outputs of the dense network with this axis alone cut, and its readers
compensated, at a few widths. Between these the error of the readers says how the outputs' grows. A
sum over axes then stands for the whole, and each slot has the increase of that sum for its score, by
what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.plan.layout import axes_of
from l0prune.plan.measures import Measure
from l0prune.plan.plan import Plan
from l0prune.running.batches import call
from l0prune.selection.lockstep import Read, Reader, Weights, forwards, readers_of

_ROUND = 1 / 16  # of the slots that are left go at once
_WIDTHS = (0.15, 0.35, 0.6, 0.85)  # of an axis gone when the outputs are looked at
_DAMPING = 1e-4


class _State:
    """A reader while slots of one axis go: its weights, compensated, and C⁻¹ of what stays.

    Args:
        second: C, shape (groups, features, features).
        weight: W, shape (groups, features, outputs).
        slots: for each feature the slot that it is of, −1 for none.
    """

    def __init__(self, inverse: Tensor, weight: Tensor, slots: Tensor, scale: float) -> None:
        self.inverse, self.weight, self.slots, self.scale = inverse, weight, slots, scale
        self.left = torch.arange(len(slots))

    def errors(self, count: int) -> Tensor:
        """Return the error that each slot leaves when it goes, shape (count,)."""
        result = torch.zeros(count, dtype=torch.float64)
        mine = self.slots[self.left]
        order = mine.argsort(stable=True)
        order = order[mine[order] >= 0]
        slots, sizes = mine[order].unique_consecutive(return_counts=True)
        begin = 0
        for size in sizes.unique().tolist():
            of_size = torch.repeat_interleave(sizes == size, sizes)
            at = order[of_size].reshape(-1, size)
            blocks = self.inverse[:, at[:, :, None], at[:, None, :]]
            weights = self.weight[:, at]
            solved = torch.linalg.solve(blocks, weights)
            result[slots[sizes == size]] = (weights * solved).sum((0, 2, 3))
        return result.clamp(min=0) / self.scale

    def remove(self, gone: Tensor) -> float:
        """Let these slots go; the error that this adds."""
        out = torch.isin(self.slots[self.left], gone)
        if not bool(out.any()):
            return 0.0
        at, stays = out.nonzero().flatten(), (~out).nonzero().flatten()
        block = self.inverse[:, at[:, None], at]
        of_gone = self.weight[:, at]
        solved = torch.linalg.solve(block, of_gone)
        error = float((of_gone * solved).sum().clamp(min=0)) / self.scale
        across = self.inverse[:, stays[:, None], at]
        self.weight = self.weight[:, stays] - across @ solved
        self.inverse = self.inverse[:, stays[:, None], stays] - across @ torch.linalg.solve(
            block, across.mT
        )
        self.left = self.left[stays]
        return error

    def whole(self) -> Tensor:
        """The weights, with zeros for what is gone."""
        groups, _, outputs = self.weight.shape
        whole = self.weight.new_zeros(groups, len(self.slots), outputs)
        whole[:, self.left] = self.weight
        return whole


@dataclass
class Curve:
    """How the error grows while slots of an axis go.

    Attributes:
        axis: number of the axis.
        order: its slots, those that go first in front; the last of all stays.
        gone: numbers of slots that are gone, ascending from 0.
        local: the error of the readers then.
        outputs: the error of the network's outputs at some of these numbers.
    """

    axis: int
    order: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=lambda: [0])
    local: list[float] = field(default_factory=lambda: [0.0])
    outputs: dict[int, float] = field(default_factory=dict)

    def increments(self) -> Tensor:
        """Return what each slot adds to the outputs' error, in the order in which they go.

        Never less than one that went before: of a slot that adds less than those before it, they
        go together, at their mean.
        """
        gone, local = torch.tensor(self.gone), torch.tensor(self.local, dtype=torch.float64)
        at = sorted(self.outputs)
        errors = dict(zip(self.gone, self.local, strict=True))
        ratio = torch.tensor([self.outputs[n] / max(errors[n], 1e-30) for n in at]).double()
        slots = torch.arange(1, len(self.order) + 1, dtype=torch.float64)
        total = _interpolated(slots, gone.double(), local) * _interpolated(
            slots, torch.tensor(at).double(), ratio
        )
        total = total.cummax(0).values
        return _pooled(torch.diff(total, prepend=total.new_zeros(1)))


def _interpolated(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear between the points, constant beyond."""
    right = torch.searchsorted(x, at).clamp(1, max(1, len(x) - 1))
    if len(x) == 1:
        return y.expand(len(at))
    left = right - 1
    part = ((at - x[left]) / (x[right] - x[left])).clamp(0, 1)
    return y[left] + part * (y[right] - y[left])


def _pooled(values: Tensor) -> Tensor:
    """Isotonic regression: the nearest values that never fall (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        total, count = value, 1
        while blocks and blocks[-1][0] * count >= total * blocks[-1][1]:
            before, number = blocks.pop()
            total, count = total + before, count + number
        blocks.append((total, count))
    return torch.cat([values.new_full((count,), total / count) for total, count in blocks])


class Division:
    """Curves of all axes that weights read.

    Args:
        model: the dense network, in eval mode.
        plan: whose axes may be cut.
        batches: inputs.
        judge: the error of outputs, against those of the dense network on the same batch.
        probes: how many of the batches the outputs are looked at with.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batches: Sequence[Any],
        judge: Callable[[Any, Any], float],
        probes: int = 1,
    ) -> None:
        self.model, self.plan, self.batches = model, plan, batches
        self.weights = Weights(model)
        self.judge = judge
        self.readers = {
            name: reader
            for name, reader in readers_of(model, partial(call, model, batches[0])).items()
            if reader.calls == 1
        }
        self.probes = batches[:probes]
        self.dense = [self._outputs(batch, {}) for batch in self.probes]
        self.curves = self._curves()

    def _curves(self) -> list[Curve]:
        """One pass of the dense network; an axis is done when its last reader was seen."""
        order = list(self.readers)
        read_by: dict[int, list[str]] = {}
        for name in order:
            for axis in self._axes(name):
                read_by.setdefault(axis, []).append(name)
        curves, held = [], dict[str, tuple[Tensor, Tensor, Tensor, float, Read]]()
        pending = {axis: set(names) for axis, names in read_by.items()}
        computes = [partial(call, self.model, batch) for batch in self.batches]
        with forwards(computes, self.weights) as running:
            while reads := [read for f in running if (read := f.advance()) is not None]:
                for read in reads:
                    read.run()
                name = reads[0].name
                if not any(name in names for names in pending.values()):
                    continue
                held[name] = self._moments(self.readers[name], reads)
                for axis in [a for a, names in pending.items() if name in names]:
                    pending[axis].discard(name)
                    if not pending[axis]:
                        del pending[axis]
                        curves.append(self._curve(axis, {n: held[n] for n in read_by[axis]}))
                needed = {n for a in pending for n in read_by[a]}
                held = {n: found for n, found in held.items() if n in needed}
        return curves

    def _axes(self, name: str) -> set[int]:
        roles = self.plan.roles.get(self.plan.aliases.get(name, name), ())
        dims = self.plan.tensors.get(self.plan.aliases.get(name, name), ())
        return {
            axis
            for layout, role in zip(dims, roles, strict=False)
            if role == "read"
            for axis in axes_of(layout)
        }

    def _moments(
        self, reader: Reader, reads: Sequence[Read]
    ) -> tuple[Tensor, Tensor, Tensor, float, Read]:
        count, first, second = 0, torch.zeros(()), torch.zeros(())
        y_first, y_second = torch.zeros(()), torch.zeros(())
        for read in reads:
            assert read.out is not None
            rows = read.product.outputs(read.out, None)
            wanted = None
            most = (1 << 18) // len(reads)
            if rows.shape[1] > most:
                wanted = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))[
                    :most
                ].to(rows.device)
            x = read.product.inputs(read.args, wanted).double()
            y = read.product.outputs(read.out, wanted).double()
            count += x.shape[1]
            first, second = first + x.sum(1), second + x.mT @ x
            y_first, y_second = y_first + y.sum(1), y_second + y.square().sum(1)
        has_bias = bool(reader.bias) or reader.norm is not None
        mean = first / count
        covariance = second / count
        if has_bias:
            covariance = covariance - mean[:, :, None] * mean[:, None]
        diagonal = covariance.diagonal(dim1=1, dim2=2)
        damp = _DAMPING * diagonal.mean(1)
        diagonal.add_(torch.where(damp > 0, damp, 1.0)[:, None])
        variance = (y_second / count - (y_first / count).square()).sum().clamp(min=1e-30)
        mean_y = y_first / count
        return (
            torch.linalg.inv(covariance).cpu(),
            mean.cpu(),
            mean_y.cpu(),
            float(variance),
            reads[0],
        )

    def _curve(
        self, number: int, readers: dict[str, tuple[Tensor, Tensor, Tensor, float, Read]]
    ) -> Curve:
        axis = self.plan.axes[number]
        states = {
            name: _State(
                inverse,
                read.product.matrix(read.weight).double().cpu(),
                self._slots(number, name, read),
                scale,
            )
            for name, (inverse, _, _, scale, read) in readers.items()
        }
        curve, left = Curve(number), torch.ones(axis.size, dtype=torch.bool)
        error = 0.0
        levels = sorted({max(1, round(part * axis.size)) for part in _WIDTHS if axis.size > 1})
        levels = [level for level in levels if level < axis.size]
        while int(left.sum()) > 1:
            errors = torch.stack([state.errors(axis.size) for state in states.values()]).sum(0)
            errors[~left] = torch.inf
            most = max(1, int(int(left.sum()) * _ROUND))
            upcoming = next((n for n in levels if n > len(curve.order)), axis.size - 1)
            count = min(most, upcoming - len(curve.order), int(left.sum()) - 1)
            gone = errors.topk(max(1, count), largest=False, sorted=True).indices
            left[gone] = False
            curve.order += gone.tolist()
            error += sum(state.remove(gone) for state in states.values())
            curve.gone.append(len(curve.order))
            curve.local.append(error)
            if len(curve.order) in levels:
                curve.outputs[len(curve.order)] = self._error(states, readers)
        return curve

    def _slots(self, number: int, name: str, read: Read) -> Tensor:
        """Return for each feature of a reader the slot of an axis that it is of, or −1."""
        axis = self.plan.axes[number]
        name = self.plan.aliases.get(name, name)
        roles, dims = self.plan.roles[name], self.plan.tensors[name]
        tensor = self.weights.tensors[read.name]
        slots = torch.full_like(tensor, -1, dtype=torch.long)
        for dim, (layout, role) in enumerate(zip(dims, roles, strict=True)):
            if role != "read" or number not in axes_of(layout):
                continue
            table = self.plan.gate_table(layout)
            mine = (table >= axis.start) & (table < axis.start + axis.size)
            found = torch.where(mine, table - axis.start, -1).max(0).values
            shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
            slots.copy_(found.to(tensor.device).reshape(shape).expand(tensor.shape))
        weight = read.weight
        lies = slots.as_strided(
            weight.shape, weight.stride(), weight.storage_offset() - tensor.storage_offset()
        )
        return read.product.matrix(lies)[0, :, 0].cpu()

    def _error(self, states: dict[str, _State], readers: dict[str, Any]) -> float:
        changed = {}
        for name, state in states.items():
            _, mean, mean_y, _, _ = readers[name]
            weight, reader = state.whole(), self.readers[name]
            has_bias = bool(reader.bias) or reader.norm is not None
            shift = mean_y - (mean[:, None] @ weight)[:, 0] if has_bias else None
            changed[name] = weight, shift
        found = [
            self.judge(self._outputs(batch, changed), dense)
            for batch, dense in zip(self.probes, self.dense, strict=True)
        ]
        return sum(found) / len(found)

    def _outputs(self, batch: Any, changed: dict[str, tuple[Tensor, Tensor | None]]) -> Any:
        with forwards([partial(call, self.model, batch)], self.weights) as (forward,):
            while (read := forward.advance()) is not None:
                if read.name in changed:
                    read.run_with(*changed[read.name])
            return forward.output

    def scores(self, measure: Measure, open_: Tensor) -> Tensor:
        """Return for each slot what its loss adds to the outputs' error, by what it costs.

        Args:
            measure: of the cost.
            open_: where the cost of one more slot is looked at; bool, flat.
        """
        p = open_.to(torch.float64).clamp(min=1e-3).requires_grad_()
        (cost,) = torch.autograd.grad(measure.expected(p), p)
        result = torch.full((self.plan.size,), torch.inf, dtype=torch.float64)
        for curve in self.curves:
            axis = self.plan.axes[curve.axis]
            mean = cost[axis.slice].mean().clamp(min=1e-12)
            order = torch.tensor(curve.order)
            # Ties within a pool keep their order.
            ranks = 1 + 1e-9 * torch.arange(len(order), dtype=torch.float64)
            result[axis.start + order] = curve.increments().clamp(min=1e-12) * ranks / mean
        finite = result[result.isfinite()]
        return result.nan_to_num(posinf=float(finite.max()) * 1e3 if len(finite) else 1.0)
