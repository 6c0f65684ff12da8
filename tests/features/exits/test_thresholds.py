"""Thresholds beside all that there are, on few examples."""

import itertools

import numpy as np
import pytest

from l0prune.features.exits.thresholds import HeldOut, choose


def drawn(seed, exits=2, n=7):
    random = np.random.default_rng(seed)
    scores = random.integers(0, 5, (exits, n)).astype(float)
    errors = random.integers(0, 2, (exits + 1, n)).astype(float)
    return HeldOut(scores, errors, np.cumsum(random.random(exits + 1)))


def within(most):
    return lambda errors, costs: np.where(costs <= most, errors, np.inf)


def all_of(held_out):
    edges = [-np.inf, *np.arange(0.5, 5), np.inf]
    for thresholds in itertools.product(edges, repeat=len(held_out.scores)):
        yield np.array(thresholds)


def test_results_are_those_of_each_example():
    held_out = drawn(0)
    thresholds = np.array([3.0, 1.0])
    total = np.zeros(2)
    for example in range(7):
        way = next((n for n in (0, 1) if held_out.scores[n, example] >= thresholds[n]), 2)
        total += held_out.errors[way, example], held_out.costs[way]
    assert held_out.result(thresholds) == pytest.approx(total / 7)


@pytest.mark.parametrize("seed", range(20))
def test_one_threshold_is_the_best_of_all(seed):
    held_out = drawn(seed, exits=1)
    objective = within(held_out.costs.mean())
    results = np.array([held_out.result(each) for each in all_of(held_out)]).T
    found = held_out.result(choose(held_out, objective))
    assert objective(*np.array(found)) == pytest.approx(objective(*results).min())


def test_two_thresholds_are_nearly_the_best_and_keep_to_the_limit():
    short = 0
    for seed in range(12):
        held_out = drawn(seed)
        most = np.quantile(held_out.costs, 0.6)
        results = np.array([held_out.result(each) for each in all_of(held_out)]).T
        error, cost = held_out.result(choose(held_out, within(most)))
        assert cost <= most
        short += error > within(most)(*results).min() + 1e-9
    assert short <= 1


def test_what_cannot_be_met_is_none():
    held_out = drawn(1)
    assert choose(held_out, within(held_out.costs.min() / 2)) is None


def test_thresholds_lie_between_scores():
    held_out = drawn(2, n=50)
    found = choose(held_out, within(held_out.costs.mean()))
    for threshold, scores in zip(found, held_out.scores, strict=True):
        assert not np.isfinite(threshold) or np.abs(scores - threshold).min() >= 0.5
