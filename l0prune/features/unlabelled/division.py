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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    fed_with,
    forwards,
    places_of,
)
from l0prune.features.unlabelled.probes import Change, Judge, Probe
from l0prune.features.unlabelled.uses import uses_of
from l0prune.gating.multiplying import along
from l0prune.plan.globs import listed
from l0prune.plan.layout import axes_of
from l0prune.plan.limits import Bound
from l0prune.plan.plan import Plan
from l0prune.progress.stages import counting, steps
from l0prune.selection.fitting import Fitting
from l0prune.selection.least_squares import Moments, damping, noise_of, strengths
from l0prune.selection.matrices import by_channel

_ROUND = 1 / 16  # share of the remaining slots that is removed per round
_LARGEST = 2304  # most features for a full covariance
_ROWS, _FEW_ROWS = 1 << 18, 1 << 15  # of one layer, at most, and so many where features are few
_FOR_EACH = 16  # rows for each feature that are enough
_FEWEST = 4  # batches
_TURNS = 3  # each computes costs at the choice of the turn before
PROBES = 256  # outputs, about, that are compared: examples, or places of them with classes
_MANY, _FEWER = 24, (0.35, 0.7)  # number of axes from which fewer widths are measured, and these
_WORST = 1e6  # error of outputs that counts for larger ones, and for those that are no numbers
_WIDTHS = (0.15, 0.35, 0.6, 0.85)  # removed shares of an axis at which outputs are measured


class _State:
    """Readers of one input while slots of one axis are removed.

    Weights W of the readers count by W Wᵀ alone. So of many outputs a triangular factor is held,
    which has the same product.

    Args:
        readers: as they are in the dense network.
        slots: the slot of each of their features, −1 for none.
    """

    def __init__(self, readers: Sequence[_Input], slots: Tensor) -> None:
        self.inverse = readers[0].inverse
        self.weight = _factor([reader.weight / reader.scale**0.5 for reader in readers])
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
        return result.clamp(min=0)

    def remove(self, gone: Tensor) -> float:
        """Remove these slots, and return the error that this adds."""
        out = torch.isin(self.slots[self.left], gone)
        if not bool(out.any()):
            return 0.0
        at, stays = out.nonzero().flatten(), (~out).nonzero().flatten()
        block = self.inverse[:, at[:, None], at]
        of_gone = self.weight[:, at]
        solved = torch.linalg.solve(block, of_gone)
        error = float((of_gone * solved).sum().clamp(min=0))
        across = self.inverse[:, stays[:, None], at]
        self.weight = self.weight[:, stays] - across @ solved
        self.inverse = self.inverse[:, stays[:, None], stays] - across @ torch.linalg.solve(
            block, across.mT
        )
        self.left = self.left[stays]
        return error


def _factor(weights: Sequence[Tensor]) -> Tensor:
    """Return a matrix F of few columns with F Fᵀ = Σ W Wᵀ, shape (groups, features, columns)."""
    found = weights[0][..., :0]
    for weight in weights:
        found = torch.cat([found, weight], 2)
        if found.shape[2] > found.shape[1]:
            found = torch.linalg.qr(found.mT, mode="r").R.mT
    return found


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
        matrix, bias: of the reader, as it reads them.
        places: number of features per channel; 1 if each is treated alone.
        inverse: C⁻¹, shape (groups, features, features), float64 on the CPU.
        mean: of the features, shape (groups, features); zeros where there is no bias to correct.
        scale: the variance of the outputs.
    """

    matrix: Tensor
    bias: Tensor | None
    places: int
    inverse: Tensor
    mean: Tensor
    scale: float

    @property
    def weight(self) -> Tensor:
        """W, shape (groups, features, outputs), float64 on the CPU."""
        split: Tensor = self.matrix.double().cpu().unflatten(1, (-1, self.places))
        return split.flatten(2)

    def without(self, gone: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the arguments of ``Read.run_with`` where features are removed (bool)."""
        out, stays = gone.nonzero().flatten(), (~gone).nonzero().flatten()
        weight, old = torch.zeros_like(whole := self.weight), whole
        solved = torch.linalg.solve(self.inverse[:, out[:, None], out], old[:, out])
        weight[:, stays] = old[:, stays] - self.inverse[:, stays[:, None], out] @ solved
        moved = (self.mean[:, :, None] * (old - weight)).sum(1)
        moved = moved.unflatten(1, (self.places, -1)).sum(1)
        matrix, bias = weight.unflatten(2, (self.places, -1)).flatten(1, 2), self.bias
        if bias is None:
            return matrix, moved if bool(self.mean.any()) else None
        if bias.numel() != moved.numel():  # a tensor that is added to all rows at once
            return matrix, None
        return matrix, moved + bias.double().cpu().reshape(moved.shape)


class _Inputs:
    """Moments of the readers' inputs, which grow call by call.

    Readers of one input, as of the queries, keys and values, share them.
    """

    def __init__(self, division: Division) -> None:
        self._division = division
        self._moments = dict[View, tuple[Moments, Moments]]()
        self._unseen = {view: reader.calls for view, reader in division.readers.items()}
        self._fed = list[Any]()
        self._given = list[Tensor]()  # held, so that no other tensor gets its memory
        self._covariance = torch.zeros(())
        self._last: _Input | None = None

    def add(self, reads: Sequence[Read]) -> _Input | None:
        """Count one call in all batches, and return the reader after its last call."""
        view = reads[0].view
        reader, places = self._division.readers[view], self._division.places(reads)
        fed = [reader.has_bias, places, *map(fed_with, reads)]
        if self._last is not None and reader.calls == 1 and fed == self._fed:
            return self._of(reads[0], self._last.inverse, self._last.mean, places)
        seen, held = self._moments.setdefault(view, (Moments(), Moments()))
        first = len(reads) - len(self._division.probes)
        self._division.count(seen, reads[:first], places)
        self._division.count(held, reads[first:], places)
        self._unseen[view] -= 1
        if self._unseen[view]:
            return None
        del self._moments[view]
        self._covariance, of_held = (
            each.about(mean=reader.has_bias)[0].cpu().double() for each in (seen, held)
        )
        mean = seen.x.cpu() * reader.has_bias
        bare = self._of(reads[0], self._covariance, mean, places)
        self._last = replace(bare, inverse=self._inverse(bare.weight, of_held))
        self._fed = fed if reader.calls == 1 else []
        self._given = [read.given for read in reads]
        return self._last

    def _inverse(self, weight: Tensor, of_held: Tensor) -> Tensor:
        """Return the inverse of the damped C.

        Its damping is the one by which each feature is best predicted from all others on inputs
        that are held out, each weighted by what the first reader makes of it. Dampings are compared
        in single precision.
        """
        covariance = _without_noise(self._covariance)
        sizes = covariance.diagonal(dim1=1, dim2=2).sqrt()
        sizes = torch.where(sizes > 0, sizes, 1.0)
        matter = weight.square().sum(2) * sizes.square()
        matter = (matter / matter.amax().clamp(min=torch.finfo(matter.dtype).tiny)).float()
        both = sizes[:, :, None] * sizes[:, None]  # apart from which single precision has the range
        seen, held = ((each / both).float() for each in (covariance, of_held))

        def unexplained(strength: float) -> float:
            found = _damped_inverse(seen, strength)
            squares = (found @ held * found).sum(2)
            error = (matter * squares / found.diagonal(dim1=1, dim2=2).square()).sum()
            return float(error.nan_to_num(nan=torch.inf))

        tried = sorted(strengths(weight.shape[1]), reverse=True)
        return _damped_inverse(covariance, min(tried, key=unexplained))

    def _of(self, read: Read, inverse: Tensor, mean: Tensor, places: int) -> _Input:
        matrix = read.product.matrix(read.weight)
        found = _Input(matrix, read.bias, places, inverse, mean, 1.0)
        weight = found.weight
        scale = float((self._covariance @ weight * weight).sum().clamp(min=1e-30))
        return replace(found, scale=scale)


def _without_noise(covariance: Tensor) -> Tensor:
    """Return C with variances no smaller than what the largest ones are rounded to."""
    variances = covariance.diagonal(dim1=1, dim2=2)
    return covariance + (noise_of(variances) - variances).clamp(min=0).diag_embed()


def _damped_inverse(covariance: Tensor, strength: float) -> Tensor:
    """Return (C + λ·D)⁻¹, shape (groups, features, features); NaN where it is not positive."""
    damped = covariance + damping(covariance, strength).diag_embed()
    factor, failed = torch.linalg.cholesky_ex(damped)
    found = torch.cholesky_inverse(factor)
    return torch.where((failed != 0)[:, None, None], torch.nan, found)


def _itself(found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return found


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
        self.readers = uses_of(model, batches[0]).readers
        self.widths = _WIDTHS if len(plan.axes) < _MANY else _FEWER
        self.probes = [Probe(model, self.weights, batch, judge) for batch in probes]
        self.curves = self._curves()

    def _curves(self) -> list[Curve]:
        """Compute all curves in one pass of the dense network, each at its last reader."""
        read_by: dict[int, list[View]] = {}
        for view in self.readers:
            for axis in self._axes(view):
                read_by.setdefault(axis, []).append(view)
        curves, held, inputs = [], dict[View, _Input](), _Inputs(self)
        probed = [probe.batch for probe in self.probes]
        batches = [*self.batches[: self._enough(read_by)], *probed]
        with (
            counting(len(read_by)) as counter,
            forwards(self.model, batches, self.weights) as running,
        ):
            while read_by and (reads := [r for f in running if (r := f.advance()) is not None]):
                view = reads[0].view
                of_view = [axis for axis, views in read_by.items() if view in views]
                if not of_view:
                    continue
                if any(read.view != view for read in reads):
                    raise UsageError(OTHER_WAYS.format(view.name))
                found = inputs.add(reads)
                if found is None:
                    continue
                held[view] = found
                for axis in of_view:
                    if all(each in held for each in read_by[axis]):
                        needed = {each: held[each] for each in read_by.pop(axis)}
                        curves.append(self._curve(axis, needed))
                        counter.step()
                left = {each for views in read_by.values() for each in views}
                held = {each: found for each, found in held.items() if each in left}
        return curves

    def _enough(self, read_by: Mapping[int, Sequence[View]]) -> int:
        """Return the number of batches with enough rows for all readers."""
        found = _FEWEST
        for view in {view for views in read_by.values() for view in views}:
            tensor, reader = self.weights.tensors[view.name], self.readers[view]
            matrix = along_reads(torch.zeros(()), view, reader.matrix, tensor)
            features = min(_LARGEST, matrix.shape[1])
            found = max(found, math.ceil(_FOR_EACH * features / max(1, reader.rows)))
        return found

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

    def places(self, reads: Sequence[Read]) -> int:
        """Return the places of ``_Input``."""
        view, features = reads[0].view, reads[0].product.matrix(reads[0].weight).shape[1]
        fitted = len(reads) - len(self.probes)
        if features <= _LARGEST and fitted * self.readers[view].rows >= 2 * features:
            return 1
        slots = torch.stack([self._slots(axis, view, 1) for axis in self._axes(view)])
        return places_of(reads[0], slots)

    def count(self, moments: Moments, reads: Sequence[Read], places: int) -> None:
        """Add the inputs of one call, in some batches."""
        features = reads[0].product.matrix(reads[0].weight).shape[1] // places
        most = min(_ROWS, max(_FEW_ROWS, _FOR_EACH * features)) // self.readers[reads[0].view].calls
        for number, read in enumerate(reads):
            for wanted in read.row_blocks(most // len(reads), number, places):
                x = by_channel(read.product.inputs(read.args, wanted), places)
                moments.add(x, x[..., :0])

    def _curve(self, number: int, readers: dict[View, _Input]) -> Curve:
        axis = self.plan.axes[number]
        groups = dict[tuple[int, ...], list[View]]()
        slots = {view: self._slots(number, view, found.places) for view, found in readers.items()}
        for view, found in readers.items():
            groups.setdefault((id(found.inverse), *slots[view].tolist()), []).append(view)
        states = [
            _State([readers[view] for view in views], slots[views[0]]) for views in groups.values()
        ]
        curve, left = Curve(number), torch.ones(axis.size, dtype=torch.bool)
        error = 0.0
        levels = sorted({max(1, round(part * axis.size)) for part in self.widths if axis.size > 1})
        levels = [level for level in levels if level < axis.size]
        while int(left.sum()) > 1:
            errors = torch.stack([state.errors(axis.size) for state in states]).sum(0)
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
            error += sum(state.remove(gone) for state in states)
            curve.gone.append(len(curve.order))
            curve.local.append(error)
            if len(curve.order) in levels:
                order = torch.tensor(curve.order)
                with counting(len(levels)) as counter:
                    counter.at(len(curve.outputs), len(levels))
                    removed = {view: torch.isin(of, order) for view, of in slots.items()}
                    curve.outputs[len(curve.order)] = self._error(removed, readers)
        return curve

    def _slots(self, number: int, view: View, places: int) -> Tensor:
        """Return for each feature of a product its slot of an axis, or −1."""
        return self._slots_in(number, view)[0, ::places, 0].cpu().clone()

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

    def _error(self, gone: Mapping[View, Tensor], readers: Mapping[View, _Input]) -> float:
        """Return the error of the outputs where these features of readers are removed."""
        changed: dict[View, Change] = {
            view: partial(readers[view].without, of) for view, of in gone.items()
        }
        if len(changed) == 1:  # else they would be large, all together
            changed = {view: partial(_itself, change()) for view, change in changed.items()}
        errors = [probe.error(changed) for probe in steps(self.probes)]
        return sum(each if each < _WORST else _WORST for each in errors) / len(errors)  # also NaN

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
