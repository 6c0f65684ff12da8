"""Fit of a latency model to timed networks.

A network's time is the sum of the times of its *groups*, nodes that are timed as one (``facts``).
Groups with the same operator and pattern of monomials are of one *kind*. A *form* is a candidate
for a group's time: a sum of *terms*, coefficient times a product of *steps*, which are sizes
rounded up to whole blocks. It may have separate coefficients in several *cells*, parts of all
widths that differ in which sizes are whole blocks. For a Linear that reads i and writes o slots, on
a runtime with a fast path for multiples of 8: ``a·↑o·↑i + b·↑o + c`` in the cell where both are
multiples, and ``a'·↑o·↑i + b'·↑o + c'`` in the cell of all other widths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from l0prune.plan.layout import Layout
from l0prune.timing.facts import Group, Monomial
from l0prune.timing.latency_model import LatencyModel, Numbers, Step, Term

_ROUNDING = (1, 4, 8, 16, 32, 64)  # blocks to which sizes may be rounded up
_ALIGNMENT = (4, 8, 16, 32, 64)  # blocks that a fast path may require
_TOLD_APART = 4  # layouts of a group that are tried in pairs, with a block each
_LEAST = ((1, 1), (1, 16), (16, 1))  # minimum sizes that it may require, of a pair
_TINY = 1e-10  # added to the Gram matrix's diagonal, for equal features
_NEGLIGIBLE = 1e-10  # added to relative squared errors, below which forms are equally good
_RANK = 1e-6  # share of the largest singular value below which others count as 0
_PRICE = 0.01  # penalty of each coefficient, as a share of the squared error
_MOST = 0.6  # coefficients per sample, at most, of a form with several cells

WidthCondition = tuple[tuple[Step, ...], tuple[tuple[Step, ...], ...]]
"""Cell: the widths that meet the conditions ``aligned`` and ``unless``; see ``Term``."""


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

    For each group several forms are tried, with sizes rounded up to blocks or not, and with one or
    several cells; the form with the least leave-one-out error is chosen. A fast path belongs to the
    runtime, not to a layer: the error on all groups of the same kind counts half as much as that on
    the group. A network's time beyond its nodes' is modelled by a constant, a factor on terms with
    ``unless`` and one on all others: nodes run faster while they are profiled, one run after the
    other, and the more so the more memory they use.
    """
    terms: list[Term] = []
    kinds: dict[Any, list[list[_Fit]]] = defaultdict(list)
    for number, group in enumerate(groups):
        kinds[_kind(group)].append(list(_fits(number, group, samples)))
    for fits in kinds.values():
        terms += chain(*_best_of_each(fits))
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


class _Fit(NamedTuple):
    """Form of a group's time, its fitted coefficients, and its leave-one-out squared error."""

    error: float
    form: _Form
    coefficients: Numbers


def _kind(group: Group) -> Any:
    """Return the key of a group's kind: its operator and the pattern of its monomials."""
    place = {layout: number for number, layout in enumerate(group.layouts)}
    return group.operator, tuple(tuple(map(place.get, each)) for each in group.monomials)


def _fits(number: int, group: Group, samples: Samples) -> Iterator[_Fit]:
    """Yield each form, fitted to a group's times; the forms are the same for all of a kind."""
    index = {layout: i for i, layout in enumerate(samples.layouts)}
    monomials = tuple(tuple(index[layout] for layout in each) for each in group.monomials)
    most = _MOST * len(samples.whole) / len(monomials)
    every = list(_cells([index[layout] for layout in group.layouts]))
    every = [cells for cells in every if len(cells) == 1 or len(cells) <= most]
    inside = [[_are_in(cell, samples.sizes) for cell in cells] for cells in every]
    weights, times = 1 / samples.whole, samples.times[:, number]
    known: dict[bytes, tuple[float, Numbers]] = {}
    for block in _ROUNDING:
        rounded = np.ceil(samples.sizes / block) * block
        products = np.stack([rounded[:, each].prod(1) for each in monomials], 1)
        for cells, masks in zip(every, inside, strict=True):
            features = np.concatenate([products * mask[:, None] for mask in masks], 1)
            key = features.tobytes()
            if key not in known:
                known[key] = _left_out(features, times, weights)
            error, coefficients = known[key]
            yield _Fit(error, _Form(number, monomials, block, cells), coefficients)


def _are_in(cell: WidthCondition, sizes: Numbers) -> NDArray[np.bool_]:
    """Return the mask of the networks in a cell, shape ``(networks,)``, given their sizes."""

    def hold(steps: Sequence[Step]) -> NDArray[np.bool_]:
        held = np.ones(len(sizes), bool)
        for step in steps:
            size = sizes[:, step.layout]
            held &= (size % step.block == 0) & (size >= step.least)
        return held

    aligned, unless = cell
    result = hold(aligned)
    for each in unless:
        result &= ~hold(each)
    return result


def _best_of_each(fits: Sequence[Sequence[_Fit]]) -> Iterator[list[Term]]:
    """Yield the terms of the best form of each group, all of one kind; the first of equal ones."""
    errors = np.array([[fit.error for fit in of] for of in fits]) + _NEGLIGIBLE
    scores = (np.log(errors) + np.log(errors.sum(0)) / 2).round(9)
    for of, best in zip(fits, scores.argmin(1), strict=True):
        yield of[best].form.terms(of[best].coefficients)


class _Form(NamedTuple):
    """Candidate for a group's time: a sum of terms, with separate coefficients in each cell.

    Attributes:
        monomials: the layouts whose sizes are multiplied, by index.
        block: block to whose multiples sizes are rounded up.
        cells: partition of all widths.
    """

    group: int
    monomials: tuple[tuple[int, ...], ...]
    block: int
    cells: tuple[WidthCondition, ...]

    def terms(self, coefficients: Numbers) -> list[Term]:
        """Return the terms with these milliseconds, without those of 0."""
        factors = [tuple(Step(each, self.block) for each in of) for of in self.monomials]
        found = product(self.cells, factors)
        return [
            Term(self.group, float(ms), factor, *cell)
            for (cell, factor), ms in zip(found, coefficients, strict=True)
            if ms
        ]


def _cells(layouts: Sequence[int]) -> Iterator[tuple[WidthCondition, ...]]:
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


def _left_out(features: Numbers, times: Numbers, weights: Numbers) -> tuple[float, Numbers]:
    """Return the leave-one-out squared error with a penalty, and nonnegative coefficients.

    With a hat matrix H, the error on a sample that was left out is that of the fit over 1 − Hᵢᵢ.
    The trace of H counts the independent coefficients: sizes that are the same in all samples of a
    cell make its features multiples of each other. Each adds the penalty ``_PRICE``.
    """
    scaled, target = features * weights[:, None], times * weights
    found = nonnegative_least_squares(scaled, target)
    used = scaled[:, found > 0] * found[found > 0]
    leverage = (used * np.linalg.pinv(used, rcond=_RANK).T).sum(1)
    error = np.mean(((target - scaled @ found) / (1 - leverage.clip(0, 0.95))) ** 2)
    return float(error * (1 + _PRICE * leverage.sum())), found


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
    scale = np.sqrt((features**2).sum(0))
    left = np.flatnonzero(scale)
    scaled = features[:, left] / scale[left]
    gram, projected = scaled.T @ scaled, scaled.T @ target
    gram[np.diag_indices_from(gram)] += _TINY
    here = np.arange(len(left))
    result = np.zeros(features.shape[1])
    while len(here):
        found = np.linalg.solve(gram[np.ix_(here, here)], projected[here])
        if (found >= 0).all():
            result[left[here]] = found / scale[left[here]]
            break
        here = np.delete(here, found.argmin())
    return result
