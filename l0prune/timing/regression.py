"""From the times of sampled networks to the terms that predict them, group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from l0prune.plan.layout import Layout
from l0prune.timing.facts import Group, Monomial
from l0prune.timing.stairs import Numbers, Stairs, Step, Term

_ROUNDING = (1, 4, 8, 16, 32, 64)  # blocks that sizes may be rounded up to
_ALIGNMENT = (4, 8, 16, 32, 64)  # blocks that a fast path may ask for
_TINY = 1e-10  # on the diagonal, where features are the same
_PRICE = 0.01  # of a further coefficient, in shares of the squared error
_MOST = 0.6  # coefficients a sample

Cell = tuple[tuple[Step, ...], tuple[tuple[Step, ...], ...]]
"""Widths of which some are whole blocks, and not all of each of some sets; see ``Term``."""


@dataclass(frozen=True)
class Samples:
    """Timed networks.

    Attributes:
        layouts: of the plan.
        sizes: of each layout in each network, shape ``(networks, layouts)``.
        times: of each group in milliseconds, shape ``(networks, groups)``.
        whole: of each network, shape ``(networks,)``.
    """

    layouts: tuple[Layout, ...]
    sizes: Numbers
    times: Numbers
    whole: Numbers

    @property
    def are_alike(self) -> bool:
        """Return whether all networks have the same widths."""
        return bool((self.sizes == self.sizes[:1]).all())

    def some(self, which: Numbers) -> Samples:
        """Return the samples of these numbers."""
        return Samples(self.layouts, self.sizes[which], self.times[which], self.whole[which])


def fitted(groups: Sequence[Group], samples: Samples) -> Stairs:
    """The stairs that predict the samples best, each weighted by one over its whole time.

    For each group several forms are tried, with sizes rounded to blocks or not, and with other
    times where sizes are whole blocks; that which predicts samples best that it has not seen
    (leaving out each in turn) is taken. What a network takes beyond its nodes is a constant, and
    factors on nodes whose widths are whole blocks and on others: nodes are faster while they are
    looked at, one run after the other, and those the more that go through more memory.
    """
    terms: list[Term] = []
    for number, group in enumerate(groups):
        terms += _of_group(number, group, samples)
    values = Stairs(samples.layouts, tuple(terms)).values(samples.sizes)
    is_slow = [bool(term.unless) for term in terms]
    sums = [values[:, np.equal(is_slow, which)].sum(-1) for which in (False, True)]
    if samples.are_alike:  # only branches can be cut: nothing tells a constant from a factor
        factors = [float(np.mean(samples.whole) / np.mean(sum(sums)))] * len(sums)
        overhead = 0.0
    else:
        overhead, *factors = _beyond_nodes(sums, samples.whole)
    scaled = [replace(t, ms=t.ms * factors[slow]) for t, slow in zip(terms, is_slow, strict=True)]
    return Stairs(samples.layouts, (*scaled, Term(len(groups), overhead, ())))


def _of_group(number: int, group: Group, samples: Samples) -> list[Term]:
    weights, times = 1 / samples.whole, samples.times[:, number]
    best_error = np.inf
    best: tuple[list[Term], Numbers] = ([], np.zeros(0))
    for form in _forms(number, group, samples):
        if len(form) > max(1, _MOST * len(times)):
            continue
        features = Stairs(samples.layouts, tuple(form)).values(samples.sizes)
        error, coefficients = _left_out(features, times, weights)
        error *= 1 + _PRICE * np.count_nonzero(coefficients)
        if error < best_error:
            best_error, best = error, (form, coefficients)
    return [replace(term, ms=float(ms)) for term, ms in zip(*best, strict=True) if ms]


def _forms(number: int, group: Group, samples: Samples) -> Iterator[list[Term]]:
    """The terms, of one millisecond each, that a group's time may be the sum of."""
    index = {layout: i for i, layout in enumerate(samples.layouts)}
    for block in _ROUNDING:
        plain = [
            Term(number, 1.0, tuple(Step(index[layout], block) for layout in monomial))
            for monomial in group.monomials
        ]
        for cells in _cells([index[layout] for layout in group.layouts]):
            yield [
                replace(term, aligned=aligned, unless=unless)
                for aligned, unless in cells
                for term in plain
            ]


def _cells(layouts: Sequence[int]) -> Iterator[list[Cell]]:
    """Ways to divide all widths by which of them are whole blocks."""
    yield [((), ())]
    for block in _ALIGNMENT:
        steps = [Step(layout, block) for layout in layouts]
        sets: list[tuple[Step, ...]] = [(step,) for step in steps]
        if len(steps) > 1:
            sets.append(tuple(steps))
        if len(steps) > 2:
            sets += combinations(steps, 2)
        yield from ([(each, ()), ((), (each,))] for each in sets)
        for one, other in combinations(steps[:4], 2):
            yield [
                ((one, other), ()),
                ((one,), ((other,),)),
                ((other,), ((one,),)),
                ((), ((one,), (other,))),
            ]


def _left_out(features: Numbers, times: Numbers, weights: Numbers) -> tuple[float, Numbers]:
    """The squared error on samples left out, one after the other, and coefficients of 0 or more.

    With a hat matrix H, the error on a sample that was left out is that of the fit over 1 − Hᵢᵢ.
    """
    scaled, target = features * weights[:, None], times * weights
    found = not_negative(scaled, target)
    used = scaled[:, found > 0]
    if not used.shape[1]:
        return float(np.mean(target**2)), found
    orthogonal, _ = np.linalg.qr(used)
    leverage = (orthogonal**2).sum(1).clip(0, 0.95)
    return float(np.mean(((target - scaled @ found) / (1 - leverage)) ** 2)), found


def _beyond_nodes(sums: Sequence[Numbers], whole: Numbers) -> list[float]:
    """The constant, and a factor on each of these sums of node times, that make whole times."""
    features = np.stack([np.ones_like(whole), *sums], -1) / whole[:, None]
    return [float(each) for each in not_negative(features, np.ones_like(whole))]


def smooth(
    stairs: Stairs, groups: Sequence[Group], sizes: Numbers, most: Numbers, dense: float
) -> Stairs:
    """Fit times at preferred widths, without stairs.

    For each group a sum of plain terms that are not negative, fitted to the stairs at these sizes;
    so that fewer slots never cost more, and gates can learn by it.

    Args:
        stairs: of the runtime.
        groups: their nodes.
        sizes: of the layouts, in whole blocks; shape ``(networks, layouts)``.
        most: those of the dense network, shape ``(layouts,)``.
        dense: milliseconds of that, which the result has there.
    """
    index = {layout: i for i, layout in enumerate(stairs.layouts)}
    values = stairs.values(sizes)
    terms = []
    for number in range(len(groups) + 1):
        mine = [i for i, term in enumerate(stairs.terms) if term.group == number]
        monomials: Sequence[Monomial] = groups[number].monomials if number < len(groups) else [()]
        form = [Term(number, 1.0, tuple(Step(index[x], 1) for x in m)) for m in monomials]
        features = Stairs(stairs.layouts, tuple(form)).values(sizes)
        found = not_negative(features, values[:, mine].sum(-1))
        terms += [
            Term(number, float(ms), term.factors)
            for term, ms in zip(form, found, strict=True)
            if ms
        ]
    scale = dense / Stairs(stairs.layouts, tuple(terms)).values(most).sum()
    scaled = (Term(t.group, t.ms * float(scale), t.factors) for t in terms)
    return Stairs(stairs.layouts, tuple(scaled))


def not_negative(features: Numbers, target: Numbers) -> Numbers:
    """Least squares whose coefficients are 0 or more: those that would be less are left out."""
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
