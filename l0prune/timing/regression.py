"""From the times of sampled networks to the terms that predict them, group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from l0prune.plan.layout import Layout
from l0prune.timing.groups import Group, Monomial
from l0prune.timing.stairs import Numbers, Stairs, Step, Term

_ROUNDING = (1, 4, 8, 16, 32, 64)  # blocks that sizes may be rounded up to
_ALIGNMENT = (4, 8, 16, 32, 64)  # blocks that a fast path may ask for
_RIDGES = (1e-9, 1e-6, 1e-5, 1e-4, 1e-3)  # of the mean eigenvalue
_PRICE = 0.01  # of a further coefficient, in shares of the squared error
_MOST = 0.6  # coefficients a sample

Conditions = tuple[tuple[Step, ...], ...]
"""Sets of steps; with each, all terms count once more where all its sizes are whole blocks."""


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

    def some(self, which: Numbers) -> Samples:
        """Those of these numbers."""
        return Samples(self.layouts, self.sizes[which], self.times[which], self.whole[which])


def fitted(groups: Sequence[Group], samples: Samples) -> Stairs:
    """The stairs that predict the samples best, each weighted by one over its whole time.

    For each group several forms are tried, with sizes rounded to blocks or not, and with other
    times where sizes are whole blocks; that which predicts samples best that it has not seen
    (leaving out each in turn) is taken. What a network takes beyond its nodes is a constant, and
    a factor on all; the constant is negative where slow nodes take longer when nobody looks.
    """
    terms: list[Term] = []
    for number, group in enumerate(groups):
        terms += _of_group(number, group, samples)
    stairs = Stairs(samples.layouts, tuple(terms))
    overhead, factor = _beyond_nodes(stairs.values(samples.sizes).sum(-1), samples.whole)
    scaled = [Term(t.group, t.ms * factor, t.factors, t.aligned) for t in terms]
    return Stairs(samples.layouts, (*scaled, Term(len(groups), overhead, ())))


def _of_group(number: int, group: Group, samples: Samples) -> list[Term]:
    weights, times = 1 / samples.whole, samples.times[:, number]
    best_error = np.inf
    best: tuple[list[Term], Numbers] = ([], np.zeros(0))
    for form in _forms(number, group, samples):
        if len(form) > max(1, _MOST * len(times)):
            continue
        features = Stairs(samples.layouts, tuple(form)).values(samples.sizes)
        error, coefficients = _ridge(features, times, weights)
        error *= 1 + _PRICE * len(form)
        if error < best_error:
            best_error, best = error, (form, coefficients)
    return [
        Term(term.group, float(ms), term.factors, term.aligned)
        for term, ms in zip(*best, strict=True)
        if ms
    ]


def _forms(number: int, group: Group, samples: Samples) -> Iterator[list[Term]]:
    """The terms, of one millisecond each, that a group's time may be the sum of."""
    index = {layout: i for i, layout in enumerate(samples.layouts)}
    for block in _ROUNDING:
        plain = [
            Term(number, 1.0, tuple(Step(index[layout], block) for layout in monomial))
            for monomial in group.monomials
        ]
        for conditions in _conditions([index[layout] for layout in group.layouts]):
            yield plain + [
                Term(number, 1.0, term.factors, condition)
                for condition in conditions
                for term in plain
            ]


def _conditions(layouts: Sequence[int]) -> Iterator[Conditions]:
    yield ()
    for block in _ALIGNMENT:
        steps = [Step(layout, block) for layout in layouts]
        yield from (((step,),) for step in steps)
        if len(steps) > 1:
            yield (tuple(steps),)
        if len(steps) > 2:
            yield from ((pair,) for pair in combinations(steps, 2))
        for one, other in combinations(steps[:4], 2):
            yield ((one,), (other,))
            yield ((one,), (other,), (one, other))


def _ridge(features: Numbers, times: Numbers, weights: Numbers) -> tuple[float, Numbers]:
    """The squared error on samples left out, one after the other, and the coefficients.

    With a hat matrix H, the error on a sample that was left out is that of the fit over 1 − Hᵢᵢ.
    Of several strengths of the ridge that is taken which has the smallest error.
    """
    largest = np.abs(features).max(0)
    largest[largest == 0] = 1
    scaled, target = features / largest * weights[:, None], times * weights
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    rotated = scaled @ vectors
    projected = rotated.T @ target
    best_error, best = np.inf, np.zeros(features.shape[1])
    for strength in _RIDGES:
        damped = 1 / (values.clip(0) + strength * values.mean())
        coefficients = damped * projected
        leverage = (rotated**2 @ damped).clip(0, 0.95)
        left_out = (target - rotated @ coefficients) / (1 - leverage)
        error = float(np.mean(left_out**2))
        if error < best_error:
            best_error, best = error, vectors @ coefficients / largest
    return best_error, best


def _beyond_nodes(sums: Numbers, whole: Numbers) -> tuple[float, float]:
    """The constant and the factor by which sums of node times become times of networks."""
    features = np.stack([np.ones_like(sums), sums], -1) / whole[:, None]
    solution, *_ = np.linalg.lstsq(features, np.ones_like(whole), rcond=None)
    return float(solution[0]), float(solution[1])


def smooth(
    stairs: Stairs, groups: Sequence[Group], sizes: Numbers, most: Numbers, dense: float
) -> Stairs:
    """The same without stairs: what widths cost that runtimes like.

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
    left = list(range(features.shape[1]))
    scale = np.abs(features).max(0)
    scale[scale == 0] = 1
    while left:
        found, *_ = np.linalg.lstsq(features[:, left] / scale[left], target, rcond=None)
        if (found >= 0).all():
            result = np.zeros(features.shape[1])
            result[left] = found / scale[left]
            return result
        del left[int(found.argmin())]
    return np.zeros(features.shape[1])
