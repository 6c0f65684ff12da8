"""As much of the data is looked at as the run can bear."""

import pytest

from l0prune.training.start import ScoringBudget


def test_slots_take_a_twentieth_of_the_steps_within_limits():
    assert [ScoringBudget.of(steps, 32, 0).slots for steps in (1, 200, 1000, 10**6)] == [
        10,
        10,
        50,
        100,
    ]


def test_branches_take_half_as_much():
    found = [ScoringBudget.of(2000, 32, branches) for branches in (1, 30, 60, 1000)]
    assert [(budget.branches, budget.few) for budget in found] == [
        (30, 32),
        (1, 32),
        (1, 16),
        (1, 8),
    ]
    assert ScoringBudget.of(2000, 4, 1000).few == 4


def test_ways_take_half_as_much():
    assert [ScoringBudget.of(steps, 32, 9).ways for steps in (10, 142, 280, 480, 10**6)] == [
        1,
        1,
        2,
        4,
        8,
    ]


def test_what_all_cost():
    budget = ScoringBudget.of(
        2000, 32, 30
    )  # 100 batches; 30 branches in 5 forwards; 11 ways on 8 batches
    assert (budget.branches, budget.few, budget.ways) == (1, 32, 8)
    assert budget.steps(32, 30) == pytest.approx(100 + (30 * 5 + 11 * 8) / 3)
