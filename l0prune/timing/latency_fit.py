"""Fit of the model of a network's time to timed networks.

A network is a sum of groups of nodes, each with a few monomials of sizes (``facts``). A Linear that
reads i and writes o slots has o·i, o and 1. Tried are sums of these with sizes as they are or
rounded up to whole blocks, and with other coefficients where sizes are whole blocks: for a runtime
with a fast path for multiples of 8, ``a·↑o·↑i + b·↑o + c`` where both are, and ``a'·↑o·↑i + b'·↑o +
c'`` elsewhere.
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

_ROUNDING = (1, 4, 8, 16, 32, 64)  # blocks that sizes may be rounded up to
_ALIGNMENT = (4, 8, 16, 32, 64)  # blocks that a fast path may ask for
_TOLD_APART = 4  # layouts of a group whose blocks may differ
_LEAST = ((1, 1), (1, 16), (16, 1))  # sizes that it may ask for, of two
_TINY = 1e-10  # on the diagonal, where features are the same
_NEGLIGIBLE = 1e-10  # squared error, as a share: below it forms are as good as each other
_RANK = 1e-6  # of the largest singular value: below it they are
_PRICE = 0.01  # of a further coefficient, in shares of the squared error
_MOST = 0.6  # coefficients a sample, of a form with several cells

WidthCondition = tuple[tuple[Step, ...], tuple[tuple[Step, ...], ...]]
"""Widths of which some are whole blocks, and not all of each of some sets; see ``Term``."""


@dataclass(frozen=True)
class Samples:
    """Timed networks.

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
        """Return the samples of these numbers."""
        return Samples(self.layouts, self.sizes[which], self.times[which], self.whole[which])


def fit_model(groups: Sequence[Group], samples: Samples) -> LatencyModel:
    """Fit the model that predicts the samples best, each weighted by one over its whole time.

    For each group several forms are tried, with sizes rounded to blocks or not, and with other
    times where sizes are whole blocks; that which predicts samples best that it has not seen
    (leaving out each in turn) is taken. A fast path is the runtime's and not the layer's: the
    error on all groups of the same kind together counts half as much as that on the group. What a
    network takes beyond its nodes is a constant, and factors on nodes whose widths are whole
    blocks and on others: nodes are faster while they are looked at, one run after the other, and
    those the more that go through more memory.
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
    if samples.are_alike:  # only branches can be cut: nothing tells a constant from a factor
        factors = [float(np.mean(samples.whole) / np.mean(sum(sums)))] * len(sums)
        overhead = 0.0
    else:
        overhead, *factors = _beyond_nodes(sums, samples.whole)
    scaled = [replace(t, ms=t.ms * factors[slow]) for t, slow in zip(terms, is_slow, strict=True)]
    return LatencyModel(samples.layouts, (*scaled, Term(len(groups), overhead, ())))


class _Fit(NamedTuple):
    """Form of a group's time, its coefficients, and the squared error that it leaves."""

    error: float
    form: _Form
    coefficients: Numbers


def _kind(group: Group) -> Any:
    """Return what groups have in common whose forms are the same, one by one."""
    place = {layout: number for number, layout in enumerate(group.layouts)}
    return group.operator, tuple(tuple(map(place.get, each)) for each in group.monomials)


def _fits(number: int, group: Group, samples: Samples) -> Iterator[_Fit]:
    """Fit each form to a group's times; as many forms, in the same order, for each kind."""
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
    """Return which networks are in a cell, shape ``(networks,)``, by sizes."""

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
    """Yield the terms of the best form of each of some groups of one kind; of equals the first."""
    errors = np.array([[fit.error for fit in of] for of in fits]) + _NEGLIGIBLE
    scores = (np.log(errors) + np.log(errors.sum(0)) / 2).round(9)
    for of, best in zip(fits, scores.argmin(1), strict=True):
        yield of[best].form.terms(of[best].coefficients)


class _Form(NamedTuple):
    """Sum of terms that a group's time may be.

    Attributes:
        monomials: the layouts whose sizes are multiplied, by number.
        block: to whose multiples sizes are rounded up.
        cells: of widths, each with terms of its own.
    """

    group: int
    monomials: tuple[tuple[int, ...], ...]
    block: int
    cells: tuple[WidthCondition, ...]

    def terms(self, coefficients: Numbers) -> list[Term]:
        """Return the terms with these milliseconds, without those that take none."""
        factors = [tuple(Step(each, self.block) for each in of) for of in self.monomials]
        found = product(self.cells, factors)
        return [
            Term(self.group, float(ms), factor, *cell)
            for (cell, factor), ms in zip(found, coefficients, strict=True)
            if ms
        ]


def _cells(layouts: Sequence[int]) -> Iterator[tuple[WidthCondition, ...]]:
    """Yield ways to divide all widths by which of them are whole blocks.

    A fast path may ask for another block of what is read than of what is written, and for some
    least size of one of them.
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
    """Return the squared error on samples left out in turn, and coefficients of 0 or more.

    With a hat matrix H, the error on a sample that was left out is that of the fit over 1 − Hᵢᵢ.
    The trace of H counts the coefficients that differ: sizes that are the same in all samples of a
    cell make its features multiples of each other. Each has its price.
    """
    scaled, target = features * weights[:, None], times * weights
    found = nonnegative_least_squares(scaled, target)
    used = scaled[:, found > 0] * found[found > 0]
    leverage = (used * np.linalg.pinv(used, rcond=_RANK).T).sum(1)
    error = np.mean(((target - scaled @ found) / (1 - leverage.clip(0, 0.95))) ** 2)
    return float(error * (1 + _PRICE * leverage.sum())), found


def _beyond_nodes(sums: Sequence[Numbers], whole: Numbers) -> list[float]:
    """Fit whole times by a constant and a factor on each of these sums of node times."""
    features = np.stack([np.ones_like(whole), *sums], -1) / whole[:, None]
    return [float(each) for each in nonnegative_least_squares(features, np.ones_like(whole))]


def fit_smooth(
    model: LatencyModel, groups: Sequence[Group], sizes: Numbers, most: Numbers, dense: float
) -> LatencyModel:
    """Fit the times of a model at preferred widths without rounding.

    For each group a sum of plain terms that are not negative, fitted to the model at ``sizes`` in
    whole blocks, ``(networks, layouts)``; so that fewer slots never cost more, and gates can learn
    by it. At the sizes of the dense network, ``most``, the sum is its time.
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
    """Fit least squares with coefficients of 0 or more: those that would be less are left out."""
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
