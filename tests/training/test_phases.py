import pytest
from hypothesis import given
from hypothesis import strategies as st

from l0prune.errors import UsageError
from l0prune.training.phases import Phases


def test_defaults_come_from_the_number_of_steps():
    phases = Phases.plan(1000)
    assert phases == Phases(total=1000, warmup=50, settle=300)


def test_lengths_are_in_epochs_or_parts_of_one():
    assert Phases.plan(1000, warmup=50, settle=200) == Phases(1000, 50, 200)


def test_lambda_rises_in_a_straight_line_and_is_off_while_settling():
    phases = Phases(total=100, warmup=10, settle=20)
    assert [phases.factor(step) for step in (0, 5, 10, 79)] == [0, 0.5, 1, 1]
    assert [phases.at(step) for step in (0, 9, 10, 79, 80, 99)] == [
        "warm-up", "warm-up", "prune", "prune", "settle", "settle",
    ]  # fmt: skip
    assert phases.factor(80) == 0
    assert [step for step in range(100) if phases.begins_to_settle(step)] == [80]


def test_gates_have_learned_all_they_will_when_settling_begins():
    phases = Phases(total=100, warmup=10, settle=20)
    assert [phases.learned(step) for step in (0, 8, 40, 79, 80, 99, 100)] == [
        0, 0.1, 0.5, 79 / 80, 1, 1, 1,
    ]  # fmt: skip
    assert Phases(total=10, warmup=0, settle=0).learned(10) == 1


def test_without_warm_up_and_settling_it_is_all_pruning():
    phases = Phases.plan(21, warmup=0, settle=0)
    assert {phases.at(step) for step in range(21)} == {"prune"}
    assert {phases.factor(step) for step in range(21)} == {1.0}
    assert [step for step in range(22) if phases.begins_to_settle(step)] == [21]  # after the last


def test_gates_stand_for_as_long_as_they_must():
    assert Phases.plan(20, warmup=0, settle=0, least=1) == Phases(20, 0, 1)
    assert Phases.plan(20, warmup=0, settle=5, least=1) == Phases(20, 0, 5)


def test_phases_that_leave_nothing_are_refused():
    with pytest.raises(UsageError, match="leave nothing of a run of 20 steps"):
        Phases.plan(20, warmup=10, settle=10)


@given(st.integers(1, 300), st.integers(1, 2000))
def test_the_defaults_fit_any_run(epochs, steps):
    phases = Phases.plan(epochs * steps)
    assert phases.warmup + phases.settle < phases.total
    assert phases.at(phases.warmup) == "prune"
