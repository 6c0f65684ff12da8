"""Fit of a latency model to timed networks.

A network's time is the sum of the times of its *groups*, nodes that are timed as one (``facts``).
Groups of one *kind* take the same time at the same sizes: they differ in their widths only. Kinds
with the same operator and pattern of monomials are a *family*. A *form* is a candidate for a
group's time: a sum of *terms*, coefficient times a product of *steps*, which are sizes rounded up
to whole blocks. It may have separate coefficients in several *cells*, parts of all widths that
differ in which sizes are whole blocks. For a Linear that reads i and writes o slots, on
a runtime with a fast path for multiples of 8: ``a·↑o·↑i + b·↑o + c`` in the cell where both are
multiples, and ``a'·↑o·↑i + b'·↑o + c'`` in the cell of all other widths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from l0prune.features.latency.facts import Group, Monomial
from l0prune.features.latency.latency_model import LatencyModel, Numbers, Step, Term
from l0prune.plan.layout import Layout

_ROUNDING = (1, 4, 8, 16, 32, 64)  # blocks to which sizes may be rounded up
_ALIGNMENT = (4, 8, 16, 32, 64)  # blocks that a fast path may require
_TOLD_APART = 4  # layouts of a group that are tried in pairs, with a block each
_LEAST = ((1, 1), (1, 16), (16, 1))  # minimum sizes that it may require, of a pair
_TINY = 1e-10  # added to the Gram matrix's diagonal, for equal features
_NEGLIGIBLE = 1e-10  # added to relative squared errors, below which forms are equally good
_RANK = 1e-6  # share of the largest singular value below which others count as 0
_PRICE = 0.01  # penalty of each coefficient, as a share of the squared error
_MOST = 0.6  # coefficients per sample, at most, of a form with several cells

Cell = tuple[tuple[Step, ...], tuple[tuple[Step, ...], ...]]
"""Widths that meet the conditions ``aligned`` and ``unless``; see ``Term``."""

Masks = NDArray[np.bool_]


@dataclass(frozen=True)
class Samples:
    """Sizes and times of timed networks.

    Shape: sizes of the layouts ``(networks, layouts)``, milliseconds of the groups ``(networks,
    groups)`` and of whole networks ``(networks,)``.
    """

    layouts: tuple[Layout, ...]
    sizes: Numbers
    times: Numbers
    whole: Numbers

    @property
    def are_alike(self) -> bool:
        """Return whether all networks have the same widths."""
        return bool((self.sizes == self.sizes[:1]).all())

    def subset(self, which: Numbers) -> Samples:
        """Return the samples at these indices."""
        return Samples(self.layouts, self.sizes[which], self.times[which], self.whole[which])


def fit_model(groups: Sequence[Group], samples: Samples) -> LatencyModel:
    """Fit the model that predicts the samples best, each weighted by one over its whole time.

    All groups of one kind have the same coefficients. For each kind several forms are tried, with
    sizes rounded up to blocks or not, and with one or several cells; the form with the least
    leave-one-out error is chosen. A fast path belongs to the runtime, not to a layer: the error on
    all kinds of the family counts half as much as that on the kind. A network's time beyond its
    nodes' is modelled by a constant, a factor on terms with ``unless`` and one on all others: nodes
    run faster while they are profiled, one run after the other, and the more so the more memory
    they use.
    """
    families: dict[Any, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, group in enumerate(groups):
        families[_family(group)][group.kind or number].append(number)
    terms = [
        term
        for kinds in families.values()
        for term in _best_of_each(
            [_Kind.of(numbers, groups, samples) for numbers in kinds.values()]
        )
    ]
    terms.sort(key=lambda term: term.group)
    values = LatencyModel(samples.layouts, tuple(terms)).values(samples.sizes)
    is_slow = [bool(term.unless) for term in terms]
    sums = [values[:, np.equal(is_slow, which)].sum(-1) for which in (False, True)]
    if samples.are_alike and terms:  # only branches can be cut: no constant is identifiable
        factors = [float(np.mean(samples.whole) / np.mean(sum(sums)))] * len(sums)
        overhead = 0.0
    else:
        overhead, *factors = _beyond_nodes(sums, samples.whole)
    scaled = [replace(t, ms=t.ms * factors[slow]) for t, slow in zip(terms, is_slow, strict=True)]
    return LatencyModel(samples.layouts, (*scaled, Term(len(groups), overhead, ())))


def _family(group: Group) -> Any:
    """Return the operator of a group and the pattern of its monomials, by places of layouts."""
    place = {layout: number for number, layout in enumerate(group.layouts)}
    return group.operator, tuple(tuple(place[layout] for layout in of) for of in group.monomials)


@dataclass(frozen=True)
class _Kind:
    """Sizes and times of the groups of one kind, with a row for each group in each network.

    Attributes:
        groups: numbers of the groups.
        layouts: indices of each group's layouts, shape ``(groups, places)``.
        monomials: places of the layouts whose sizes are multiplied.
        sizes: shape ``(rows, places)``.
        times, weights: shape ``(rows,)``.
    """

    groups: Sequence[int]
    layouts: NDArray[np.int64]
    monomials: tuple[tuple[int, ...], ...]
    sizes: Numbers
    times: Numbers
    weights: Numbers

    @classmethod
    def of(cls, numbers: Sequence[int], groups: Sequence[Group], samples: Samples) -> _Kind:
        """Return the kind of the groups with these numbers."""
        index = {layout: number for number, layout in enumerate(samples.layouts)}
        rows = [[index[layout] for layout in groups[number].layouts] for number in numbers]
        layouts = np.array(rows, dtype=np.int64)
        return cls(
            groups=numbers,
            layouts=layouts,
            monomials=_family(groups[numbers[0]])[1],
            sizes=np.concatenate([samples.sizes[:, of] for of in layouts]),
            times=samples.times[:, numbers].T.ravel(),
            weights=np.tile(1 / samples.whole, len(numbers)),
        )

    def features(self, block: int) -> Numbers:
        """Return the monomials of sizes that are rounded up, shape ``(rows, monomials)``."""
        rounded = np.ceil(self.sizes / block) * block
        return np.stack([rounded[:, each].prod(1) for each in self.monomials], 1)

    def terms(self, block: int, cells: Sequence[Cell], found: Sequence[Numbers]) -> Iterator[Term]:
        """Yield the terms of all groups, given milliseconds by cell; without those of 0."""
        factors = [tuple(Step(each, block) for each in of) for of in self.monomials]
        for number, own in zip(self.groups, self.layouts, strict=True):

            def placed(steps: Sequence[Step], own: Any = own) -> tuple[Step, ...]:
                return tuple(replace(step, layout=int(own[step.layout])) for step in steps)

            for (aligned, unless), coefficients in zip(cells, found, strict=True):
                conditions = placed(aligned), tuple(map(placed, unless))
                for factor, ms in zip(factors, coefficients, strict=True):
                    if ms:
                        yield Term(number, float(ms), placed(factor), *conditions)


def _best_of_each(kinds: Sequence[_Kind]) -> Iterator[Term]:
    """Yield the terms of the best form of each kind of one family; the first of equal ones."""
    partitions = list(_cells(range(kinds[0].sizes.shape[1])))
    fits = [_Fits(kind, partitions) for kind in kinds]
    errors = np.stack([fit.errors for fit in fits]) + _NEGLIGIBLE
    scores = (np.log(errors) + np.log(errors.sum(0)) / 2).round(9)
    for fit, score in zip(fits, scores, strict=True):
        yield from fit.terms(int(score.argmin()))


class _Fits:
    """All forms, fitted to the times of one kind.

    Cells do not overlap, so that each is fitted by itself, once for all partitions that have it.

    Attributes:
        errors: leave-one-out squared error of each form with its penalty, by block and partition.
            A partition into more cells than the rows allow has the error of no partition.
    """

    def __init__(self, kind: _Kind, partitions: Sequence[tuple[Cell, ...]]) -> None:
        self._kind, self._partitions = kind, partitions
        cells = {cell: number for number, cell in enumerate(dict.fromkeys(chain(*partitions)))}
        masks, place = np.unique(_masks(list(cells), kind.sizes), axis=0, return_inverse=True)
        none = len(masks)  # a cell of no row
        masks = np.append(masks, np.zeros((1, masks.shape[1]), bool), axis=0)
        width = max(map(len, partitions))
        self._cells = np.full((len(partitions), width), none)
        for row, partition in zip(self._cells, partitions, strict=True):
            row[: len(partition)] = place.ravel()[[cells[cell] for cell in partition]]
        self.errors = np.empty(0)
        self._found = []
        most = _MOST * len(kind.times) / len(kind.monomials)
        is_too_fine = np.array([1 < len(partition) > most for partition in partitions])
        for block in _ROUNDING:
            target = kind.times * kind.weights
            sums, counts, found = _left_out(
                kind.features(block) * kind.weights[:, None], target, masks
            )
            error = sums[self._cells].sum(1) / len(target)
            error *= 1 + _PRICE * counts[self._cells].sum(1)
            error[is_too_fine] = error[0]
            self.errors = np.append(self.errors, error)
            self._found.append(found)

    def terms(self, form: int) -> Iterator[Term]:
        """Return the terms of all groups of the kind in a form, by its number in ``errors``."""
        block, number = divmod(form, len(self._partitions))
        cells = self._partitions[number]
        found = self._found[block][self._cells[number][: len(cells)]]
        return self._kind.terms(_ROUNDING[block], cells, found)


def _masks(cells: Sequence[Cell], sizes: Numbers) -> Masks:
    """Return which rows are in each cell, shape ``(cells, rows)``, by their sizes."""
    steps = {step for aligned, unless in cells for step in chain(aligned, *unless)}
    held = {
        step: (sizes[:, step.layout] % step.block == 0) & (sizes[:, step.layout] >= step.least)
        for step in steps
    }
    result = np.ones((len(cells), len(sizes)), bool)
    for mask, (aligned, unless) in zip(result, cells, strict=True):
        for step in aligned:
            mask &= held[step]
        for each in unless:
            mask &= ~np.logical_and.reduce([held[step] for step in each])
    return result


def _cells(layouts: Sequence[int]) -> Iterator[tuple[Cell, ...]]:
    """Yield partitions of all widths into cells, by which sizes are whole blocks.

    A fast path may require different blocks of the sizes read and written, and a minimum size of
    one of them.
    """
    yield (((), ()),)
    pairs = list(combinations(layouts[:_TOLD_APART], 2))
    sets = [tuple(Step(x, block) for x in layouts) for block in _ALIGNMENT if len(layouts) > 2]
    sets += [(Step(layout, block),) for layout, block in product(layouts, _ALIGNMENT)]
    for pair, blocks, least in product(pairs, product(_ALIGNMENT, repeat=2), _LEAST):
        sets.append(tuple(map(Step, pair, blocks, least)))
    for each in sets:
        yield (each, ()), ((), (each,))
    for pair, block in product(pairs, _ALIGNMENT):
        one, other = ((Step(layout, block),) for layout in pair)
        yield (
            ((*one, *other), ()),
            (one, (other,)),
            (other, (one,)),
            ((), (one, other)),
        )


def _left_out(features: Numbers, target: Numbers, masks: Masks) -> tuple[Numbers, Numbers, Numbers]:
    """Fit the rows of each mask by nonnegative coefficients, and leave each row out in turn.

    With a hat matrix H, the error on a row that was left out is that of the fit over 1 − Hᵢᵢ. The
    trace of H counts the independent coefficients: sizes that are the same in all rows make
    features multiples of each other.

    Returns:
        The sum of squared errors and the trace of H, shape ``(masks,)``, and the coefficients,
        ``(masks, features)``.
    """
    inside = masks.astype(np.float64)
    count = features.shape[1]
    pairs = (features[:, :, None] * features[:, None, :]).reshape(-1, count**2)
    gram = (inside @ pairs).reshape(-1, count, count)
    found = _nonnegative(gram, inside @ (features * target[:, None]))
    scaled = found[:, :, None] * gram * found[:, None, :]
    inverse = np.linalg.pinv(scaled, rcond=_RANK**2, hermitian=True)
    inverse = found[:, :, None] * inverse * found[:, None, :]
    leverage = (inverse.reshape(-1, count**2) @ pairs.T) * inside
    errors = inside * (target - found @ features.T) / (1 - leverage.clip(0, 0.95))
    return (errors**2).sum(1), leverage.sum(1), found


def _beyond_nodes(sums: Sequence[Numbers], whole: Numbers) -> list[float]:
    """Fit whole times by a constant and a factor on each of the sums of node times."""
    features = np.stack([np.ones_like(whole), *sums], -1) / whole[:, None]
    return [float(each) for each in nonnegative_least_squares(features, np.ones_like(whole))]


def fit_smooth(
    model: LatencyModel, groups: Sequence[Group], sizes: Numbers, most: Numbers, dense: float
) -> LatencyModel:
    """Fit a smooth approximation of a model, whose terms have neither rounding nor conditions.

    Each group becomes a sum of nonnegative terms, fitted to the model at ``sizes`` in whole blocks,
    ``(networks, layouts)``; so fewer slots never cost more, and gates can learn by it. It is scaled
    to the time ``dense`` at the sizes of the dense network, ``most``.
    """
    index = {layout: i for i, layout in enumerate(model.layouts)}
    values = model.values(sizes)
    terms = []
    for number in range(len(groups) + 1):
        mine = [i for i, term in enumerate(model.terms) if term.group == number]
        monomials: Sequence[Monomial] = groups[number].monomials if number < len(groups) else [()]
        form = [Term(number, 1.0, tuple(Step(index[x], 1) for x in m)) for m in monomials]
        features = LatencyModel(model.layouts, tuple(form)).values(sizes)
        found = nonnegative_least_squares(features, values[:, mine].sum(-1))
        terms += [
            Term(number, float(ms), term.factors)
            for term, ms in zip(form, found, strict=True)
            if ms
        ]
    scale = dense / LatencyModel(model.layouts, tuple(terms)).values(most).sum()
    scaled = (Term(t.group, t.ms * float(scale), t.factors) for t in terms)
    return LatencyModel(model.layouts, tuple(scaled))


def nonnegative_least_squares(features: Numbers, target: Numbers) -> Numbers:
    """Solve least squares with coefficients ≥ 0, dropping the most negative one at a time."""
    found: Numbers = _nonnegative((features.T @ features)[None], (features.T @ target)[None])[0]
    return found


def _nonnegative(gram: Numbers, projected: Numbers) -> Numbers:
    """Solve many least squares with coefficients ≥ 0, given ``XᵀX`` and ``Xᵀy`` of each."""
    scale = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    left = scale > 0
    scale = np.where(left, scale, 1)
    eye = np.eye(gram.shape[1])
    gram = gram / (scale[:, :, None] * scale[:, None, :]) + _TINY * eye
    projected = projected / scale
    result = np.zeros_like(projected)
    unsolved = np.arange(len(gram))
    while len(unsolved):
        here = left[unsolved]
        system = np.where(here[:, :, None] & here[:, None, :], gram[unsolved], eye)
        found = np.linalg.solve(system, (projected[unsolved] * here)[:, :, None])[:, :, 0]
        result[unsolved] = found / scale[unsolved]
        worst = found.argmin(1)
        is_negative = found.min(1) < 0
        unsolved = unsolved[is_negative]
        left[unsolved, worst[is_negative]] = False
    return result
