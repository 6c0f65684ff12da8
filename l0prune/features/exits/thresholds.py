"""Choice of thresholds on held-out examples, by mean error and mean cost.

For a price μ of cost the thresholds minimise ``mean(error) + μ·mean(cost)`` by coordinate descent:
with the others fixed, the best threshold of one exit is found exactly, by cumulative sums over the
examples that reach it, sorted by score. Prices from very low to very high give a frontier; the
points within the limit are then improved, again by coordinate descent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_PRICES = np.geomspace(1e-4, 1e2, 40)
_ROUNDS = 10
_STARTS = 20  # points of the frontier to improve, at most

Array = np.ndarray
Objective = Callable[[Array, Array], Array]
"""Function of mean errors and mean costs to minimise; infinite where a limit is exceeded."""


@dataclass(frozen=True)
class HeldOut:
    """Scores, errors and costs of all exits on held-out examples.

    Attributes:
        scores: of the early exits; (exits, n).
        errors: of all exits, the last one included; (exits + 1, n), the larger the worse.
        costs: of the ways through the network that end at each exit; (exits + 1,).
    """

    scores: Array
    errors: Array
    costs: Array

    def ways(self, thresholds: Array) -> Array:
        """Return the number of the exit that answers each example."""
        passes = self.scores >= thresholds[:, None]
        return np.where(passes.any(0), passes.argmax(0), len(self.scores))

    def result(self, thresholds: Array) -> tuple[float, float]:
        """Return the mean error and the mean cost."""
        ways = self.ways(thresholds)
        picked = self.errors[ways, np.arange(len(ways))]
        return float(picked.mean()), float(self.costs[ways].mean())


def never(held_out: HeldOut) -> Array:
    """Return infinite thresholds, which no score reaches."""
    return np.full(len(held_out.scores), np.inf)


def choose(held_out: HeldOut, objective: Objective) -> Array | None:
    """Return the thresholds of the least objective; None where the objective is always infinite.

    Thresholds are midpoints between observed scores; infinite for an exit that answers nothing,
    and minus infinity for one that answers every example that reaches it.
    """
    found = [never(held_out)]
    whole = held_out.costs[-1]
    for price in _PRICES:
        found.append(_by_turns(held_out, found[-1], _priced(price / whole)))
    for first in range(len(held_out.scores)):  # all at one exit
        found.append(np.where(np.arange(len(held_out.scores)) == first, -np.inf, np.inf))
    values = [_value(held_out, each, objective) for each in found]
    starts = {value: each for value, each in zip(values, found, strict=True) if np.isfinite(value)}
    if not starts:
        return None
    ends = [_by_turns(held_out, starts[value], objective) for value in sorted(starts)[:_STARTS]]
    return min(ends, key=lambda each: _value(held_out, each, objective))


def _priced(price: float) -> Objective:
    return lambda errors, costs: errors + price * costs


def _value(held_out: HeldOut, thresholds: Array, objective: Objective) -> float:
    error, cost = held_out.result(thresholds)
    return float(objective(np.array([error]), np.array([cost]))[0])


def _by_turns(held_out: HeldOut, thresholds: Array, objective: Objective) -> Array:
    """Minimise the objective by coordinate descent over the thresholds."""
    found, least = thresholds.copy(), _value(held_out, thresholds, objective)
    for _ in range(_ROUNDS):
        before = least
        for number in range(len(found)):
            value, threshold = _best_of_one(held_out, found, number, objective)
            if value < least:
                least, found[number] = value, threshold
        if least == before:
            break
    return found


def _best_of_one(
    held_out: HeldOut, thresholds: Array, number: int, objective: Objective
) -> tuple[float, float]:
    """Return the least objective, and the threshold of one exit that attains it."""
    without = thresholds.copy()
    without[number] = np.inf
    ways = held_out.ways(without)
    n = len(ways)
    reached = np.flatnonzero(ways > number)
    order = reached[np.argsort(-held_out.scores[number, reached], kind="stable")]
    scores, columns = held_out.scores[number, order], np.arange(n)
    gained = held_out.errors[number, order] - held_out.errors[ways[order], order]
    saved = held_out.costs[number] - held_out.costs[ways[order]]
    errors = held_out.errors[ways, columns].sum() + np.concatenate([[0.0], gained.cumsum()])
    costs = held_out.costs[ways].sum() + np.concatenate([[0.0], saved.cumsum()])
    values = objective(errors / n, costs / n)
    values[1:-1][scores[1:] == scores[:-1]] = np.inf  # equal scores pass together
    best = int(values.argmin())
    edges = np.concatenate([[np.inf], scores, [-np.inf]])
    if not 0 < best < len(order):
        return float(values[best]), float(edges[best + (best > 0)])
    return float(values[best]), float((edges[best] + edges[best + 1]) / 2)
