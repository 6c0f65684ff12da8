"""Division of a budget over axes where weights are compensated: which slots go, of which layers.

Within an axis slots go in the order of the error that remains after compensation: for a reader with
weights W and inputs of covariance C, slots c leave

    tr(W_c [(C⁻¹)_cc]⁻¹ W_cᵀ),

in rounds, after each of which W and C⁻¹ are updated to the remaining slots. Axes are compared by a
measurement: the error of the dense network's outputs with this axis alone cut, and its readers
compensated, at a few widths. Between these it is interpolated by the error of the readers. The sum
over axes approximates the total error, and the score of a slot is its increase of that sum over its
cost.

The inputs that outputs are compared on are held out from C: of a layer with more features than
samples any cut looks free on those that it was fitted to. They choose the damping of C, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.errors import DataError, UsageError
from l0prune.features.unlabelled.lockstep import (
    OTHER_WAYS,
    Read,
    View,
    Weights,
    along_reads,
    forwards,
    places_of,
)
from l0prune.features.unlabelled.uses import uses_of
from l0prune.gating.multiplying import along
from l0prune.plan.globs import listed
from l0prune.plan.layout import axes_of
from l0prune.plan.limits import Bound
from l0prune.plan.plan import Plan
from l0prune.progress.stages import counting, steps
from l0prune.selection.fitting import Fitting
from l0prune.selection.least_squares import DAMPING, FEWER, LARGE, Moments, damping
from l0prune.selection.matrices import by_channel

_ROUND = 1 / 16  # share of the remaining slots that is removed per round
_LARGEST = 2304  # most features for a full covariance
_ROWS = 1 << 18  # of one layer, at most
_TURNS = 3  # each computes costs at the choice of the turn before
PROBES = 256  # outputs, about, that are compared: examples, or places of them with classes
_MANY, _FEWER = 24, (0.35, 0.7)  # number of axes from which fewer widths are measured, and these
_WIDTHS = (0.15, 0.35, 0.6, 0.85)  # removed shares of an axis at which outputs are measured
_KEPT = 1 << 29  # bytes of the dense network's products that need not be computed again


class _State:
    """A reader while slots of one axis are removed: its compensated weights and reduced C⁻¹.

    Args:
        reader: as it is in the dense network.
        slots: the slot of each of its features, −1 for none.
    """

    def __init__(self, reader: _Input, slots: Tensor) -> None:
        self.inverse, self.weight, self.scale = reader.inverse, reader.weight, reader.scale
        self.slots = slots
        self.left = torch.arange(len(slots))

    def errors(self, count: int) -> Tensor:
        """Return the error that the removal of each slot leaves, shape (count,)."""
        result = torch.zeros(count, dtype=torch.float64)
        mine = self.slots[self.left]
        order = mine.argsort(stable=True)
        order = order[mine[order] >= 0]
        slots, sizes = mine[order].unique_consecutive(return_counts=True)
        for size in sizes.unique().tolist():
            of_size = torch.repeat_interleave(sizes == size, sizes)
            at = order[of_size].reshape(-1, size)
            blocks = self.inverse[:, at[:, :, None], at[:, None, :]]
            weights = self.weight[:, at]
            solved = torch.linalg.solve(blocks, weights)
            result[slots[sizes == size]] = (weights * solved).sum((0, 2, 3))
        return result.clamp(min=0) / self.scale

    def remove(self, gone: Tensor) -> float:
        """Remove these slots, and return the error that this adds."""
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
        """Return the weights, with zeros for removed features."""
        groups, _, outputs = self.weight.shape
        whole = self.weight.new_zeros(groups, len(self.slots), outputs)
        whole[:, self.left] = self.weight
        return whole


@dataclass
class Curve:
    """Growth of the error while slots of an axis are removed.

    Attributes:
        axis: number of the axis.
        order: its slots in the order of removal, without the one that stays.
        gone: numbers of removed slots, ascending from 0.
        local: the error of the readers at each of these numbers.
        outputs: the error of the network's outputs at some of these numbers.
    """

    axis: int
    order: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=lambda: [0])
    local: list[float] = field(default_factory=lambda: [0.0])
    outputs: dict[int, float] = field(default_factory=dict)

    def increments(self) -> Tensor:
        """Return the increase of the outputs' error by each slot, in the order of removal.

        Increases never fall: a slot that adds less than those before it is pooled with them, at
        their mean.
        """
        at, slots = sorted(self.outputs), range(1, len(self.order) + 1)
        errors = dict(zip(self.gone, self.local, strict=True))
        ratio = [self.outputs[n] / max(errors[n], 1e-30) for n in at]
        shape, level = np.interp(slots, self.gone, self.local), np.interp(slots, at, ratio)
        total = torch.from_numpy(shape * level).cummax(0).values
        return _pooled(torch.diff(total, prepend=total.new_zeros(1)))


def _pooled(values: Tensor) -> Tensor:
    """Return the isotonic regression of the values, by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        total, count = value, 1
        while blocks and blocks[-1][0] * count >= total * blocks[-1][1]:
            before, number = blocks.pop()
            total, count = total + before, count + number
        blocks.append((total, count))
    return torch.cat([values.new_full((count,), total / count) for total, count in blocks])


@dataclass(frozen=True, slots=True)
class _Input:
    """A reader of the dense network, and the moments of its inputs.

    If it has many features, each place of a kernel or a flatten is a sample of the channels, and
    each place has separate outputs.

    Attributes:
        read: one call of the reader.
        places: number of features per channel; 1 if each is treated alone.
        inverse: C⁻¹, shape (groups, features, features), float64 on the CPU.
        mean: of the features, shape (groups, features); zeros where there is no bias to correct.
        weight: W, shape (groups, features, outputs).
        scale: the variance of the outputs.
    """

    read: Read
    places: int
    inverse: Tensor
    mean: Tensor
    weight: Tensor
    scale: float

    @classmethod
    def of(cls, read: Read, seen: Moments, held: Moments, places: int, *, has_bias: bool) -> _Input:
        """Return the reader from a call of it and the moments of the inputs of all calls.

        The damping of C is the one by which each feature is best predicted from all others on
        inputs that are held out, each weighted by what reads it.
        """
        covariance, of_held = (each.about(mean=has_bias)[0].cpu() for each in (seen, held))
        weight = read.product.matrix(read.weight).double().cpu()
        weight = weight.unflatten(1, (-1, places)).flatten(2)
        scale = float((covariance @ weight * weight).sum().clamp(min=1e-30))
        matter = weight.square().sum(2)

        def inverse(strength: float) -> Tensor:
            damped = covariance + damping(covariance, strength).diag_embed()
            found: Tensor = torch.linalg.inv(damped)
            return found

        def unexplained(inverse: Tensor) -> float:
            squares = (inverse @ of_held * inverse).sum(2)
            return float((matter * squares / inverse.diagonal(dim1=1, dim2=2).square()).sum())

        tried = map(inverse, DAMPING if weight.shape[1] < LARGE else FEWER)
        mean = (seen.x / seen.count).cpu() * has_bias
        return cls(read, places, min(tried, key=unexplained), mean, weight, scale)

    def instead(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the matrix and the constant for ``Read.run_with`` from a changed weight."""
        moved = (self.mean[:, :, None] * (self.weight - weight)).sum(1)
        moved = moved.unflatten(1, (self.places, -1)).sum(1)
        matrix, bias = weight.unflatten(2, (self.places, -1)).flatten(1, 2), self.read.bias
        if bias is None:
            return matrix, moved if bool(self.mean.any()) else None
        if bias.numel() != moved.numel():  # a tensor that is added to all rows at once
            return matrix, None
        return matrix, moved + bias.double().cpu().reshape(moved.shape)


Judge = Callable[[Any, Any], Callable[[Any], float]]


class _Probe:
    """A batch on which outputs of the dense network with some weights changed are compared.

    Attributes:
        batch: its inputs.
        products: results of the first products, reused until the first changed weight.

    Args:
        division: of the network.
        batch: of inputs.
        most: bytes of products that are kept.
    """

    def __init__(self, division: Division, batch: Any, most: int) -> None:
        self._division, self.batch = division, batch
        self.products: list[Tensor] = []
        with forwards(division.model, [batch], division.weights) as (forward,):
            while (read := forward.advance()) is not None:
                most -= read.run().nbytes
                if most >= 0:
                    self.products.append(read.run().clone())
            self._judge = division.judge(forward.output, batch)

    def error(self, changed: Mapping[View, tuple[Tensor, Tensor | None]]) -> float:
        """Return the error of the outputs with other weights; see ``Read.run_with``."""
        known = iter(self.products)
        with forwards(self._division.model, [self.batch], self._division.weights) as (forward,):
            while (read := forward.advance()) is not None:
                if read.view in changed:
                    read.run_with(*changed[read.view])
                    known = iter(())
                elif (product := next(known, None)) is not None:
                    read.out = product.clone()  # later operators may write into it
            return self._judge(forward.output)


class Division:
    """Curves of all axes that weights read.

    Args:
        model: the dense network, in eval mode.
        plan: whose axes may be cut.
        batches: inputs that weights are fitted to.
        probes: other inputs, whose outputs are compared.
        judge: function from outputs and their batch to a function: the error of other outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batches: Sequence[Any],
        probes: Sequence[Any],
        judge: Judge,
    ) -> None:
        self.model, self.plan, self.batches = model, plan, batches
        self.weights = Weights(model)
        self.judge = judge
        self.readers = uses_of(model, batches[0]).readers
        self.widths = _WIDTHS if len(plan.axes) < _MANY else _FEWER
        self.probes = [_Probe(self, batch, _KEPT // len(probes)) for batch in probes]
        self.curves = self._curves()

    def _curves(self) -> list[Curve]:
        """Compute all curves in one pass of the dense network, each at its last reader."""
        read_by: dict[int, list[View]] = {}
        for view in self.readers:
            for axis in self._axes(view):
                read_by.setdefault(axis, []).append(view)
        curves, held = [], dict[View, _Input]()
        moments = {view: (Moments(), Moments()) for view in self.readers}
        unseen = {view: reader.calls for view, reader in self.readers.items()}
        inputs = [*self.batches, *(probe.batch for probe in self.probes)]
        with (
            counting(len(read_by)) as counter,
            forwards(self.model, inputs, self.weights) as running,
        ):
            while read_by and (reads := [r for f in running if (r := f.advance()) is not None]):
                for read in reads:
                    read.run()
                view = reads[0].view
                of_view = [axis for axis, views in read_by.items() if view in views]
                if not of_view:
                    continue
                if any(read.view != view for read in reads):
                    raise UsageError(OTHER_WAYS.format(view.name))
                places = self._count(*moments[view], reads)
                unseen[view] -= 1
                if unseen[view]:
                    continue
                has_bias = self.readers[view].has_bias
                held[view] = _Input.of(reads[0], *moments.pop(view), places, has_bias=has_bias)
                for axis in of_view:
                    if all(each in held for each in read_by[axis]):
                        needed = {each: held[each] for each in read_by.pop(axis)}
                        curves.append(self._curve(axis, needed))
                        counter.step()
                left = {each for views in read_by.values() for each in views}
                held = {each: found for each, found in held.items() if each in left}
        return curves

    def _axes(self, view: View) -> list[int]:
        """Return the axes that the features of a product are slots of."""
        name = self.plan.aliases.get(view.name, view.name)
        pairs = zip(self.plan.tensors.get(name, ()), self.plan.roles.get(name, ()), strict=False)
        axes = {axis for layout, role in pairs if role == "read" for axis in axes_of(layout)}
        return [axis for axis in sorted(axes) if not self._is_of_outputs(axis, view)]

    def _is_of_outputs(self, axis: int, view: View) -> bool:
        """Return whether the outputs of a product, and not its features, are slots of an axis."""
        slots = self._slots_in(axis, view)[0]
        return len(slots[:, 0].unique()) == 1 < len(slots[0].unique())

    def _count(self, seen: Moments, held: Moments, reads: Sequence[Read]) -> int:
        """Add the inputs of one call, in all batches; return the places of ``_Input``."""
        view, features = reads[0].view, reads[0].product.matrix(reads[0].weight).shape[1]
        reader, places, batches = self.readers[view], 1, len(self.batches)
        if features > _LARGEST or batches * reader.rows < 2 * features:
            slots = torch.stack([self._slots(axis, view, 1) for axis in self._axes(view)])
            places = places_of(reads[0], slots)
        for number, read in enumerate(reads):
            moments = seen if number < batches else held
            for wanted in read.row_blocks(_ROWS // len(reads) // reader.calls, number, places):
                x = by_channel(read.product.inputs(read.args, wanted), places)
                moments.add(x, x[..., :0])
        return places

    def _curve(self, number: int, readers: dict[View, _Input]) -> Curve:
        axis = self.plan.axes[number]
        states = {
            view: _State(found, self._slots(number, view, found.places))
            for view, found in readers.items()
        }
        curve, left = Curve(number), torch.ones(axis.size, dtype=torch.bool)
        error = 0.0
        levels = sorted({max(1, round(part * axis.size)) for part in self.widths if axis.size > 1})
        levels = [level for level in levels if level < axis.size]
        while int(left.sum()) > 1:
            errors = torch.stack([state.errors(axis.size) for state in states.values()]).sum(0)
            if errors[left].isnan().any():
                names = listed(list(dict.fromkeys(view.name for view in readers)), most=3)
                raise DataError(
                    f"what the slots of {axis.name} are worth cannot be computed: the weights of "
                    f"{names}, or what they read, hold NaN or infinite numbers"
                )
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
                with counting(len(levels)) as counter:
                    counter.at(len(curve.outputs), len(levels))
                    curve.outputs[len(curve.order)] = self._error(states, readers)
        return curve

    def _slots(self, number: int, view: View, places: int) -> Tensor:
        """Return for each feature of a product its slot of an axis, or −1."""
        return self._slots_in(number, view)[0, ::places, 0].cpu()

    def _slots_in(self, number: int, view: View) -> Tensor:
        """Return the slots of an axis for each element of a product's matrix; −1 for none."""
        axis = self.plan.axes[number]
        name = self.plan.aliases.get(view.name, view.name)
        roles, dims = self.plan.roles[name], self.plan.tensors[name]
        tensor = self.weights.tensors[view.name]
        slots = torch.full((), -1)
        for dim, (layout, role) in enumerate(zip(dims, roles, strict=True)):
            if role != "read" or number not in axes_of(layout):
                continue
            table = self.plan.gate_table(layout)
            mine = (table >= axis.start) & (table < axis.start + axis.size)
            found = torch.where(mine, table - axis.start, -1).max(0).values
            slots = along(tensor, found, dim)
        return along_reads(slots, view, self.readers[view].matrix, tensor)

    def _error(self, states: dict[View, _State], readers: dict[View, _Input]) -> float:
        """Return the error of the outputs with the present weights of these readers."""
        changed = {view: readers[view].instead(state.whole()) for view, state in states.items()}
        return sum(probe.error(changed) for probe in steps(self.probes)) / len(self.probes)

    def scores_for(self, wanted: Sequence[Bound], blocks: Sequence[int]) -> Tensor:
        """Return the scores with which a choice of slots meets some limits at the least error.

        Costs of slots depend on the other open slots: they are recomputed for each choice.
        """
        open_ = torch.ones(self.plan.size, dtype=torch.bool)
        for _ in range(_TURNS):
            scores = self.scores(wanted, open_)
            whole = torch.ones_like(open_)
            open_ = Fitting(self.plan, scores, wanted, blocks).choose(whole).open_
        return self.scores(wanted, open_)

    def scores(self, wanted: Sequence[Bound], open_: Tensor) -> Tensor:
        """Return for each slot the increase of the outputs' error by its removal, over its cost.

        The cost is a sum over the limits, each as a share of the dense network's, computed where
        these slots are open (bool, flat).

        Shape: ``(plan.size,)``, float64 on the CPU. Slots of axes that no weight reads have the
        largest.
        """
        cost = torch.zeros(self.plan.size, dtype=torch.float64)
        for bound in wanted:
            p = open_.to(torch.float64).requires_grad_()
            with torch.enable_grad():
                cost += torch.autograd.grad(bound.expected_share(p), p)[0]
        found = torch.full((self.plan.size,), torch.inf, dtype=torch.float64)
        for curve in self.curves:
            axis = self.plan.axes[curve.axis]
            each = cost[axis.slice].mean()
            if each > 0:
                order = torch.tensor(curve.order)
                # Ties keep their order.
                ranks = 1 + 1e-9 * torch.arange(len(order), dtype=torch.float64)
                found[axis.start + order] = curve.increments().clamp(min=1e-12) * ranks / each
        finite = found[found.isfinite()]
        return found.nan_to_num(posinf=1e3 * float(finite.max()) if len(finite) else 1.0)
