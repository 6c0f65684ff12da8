"""What is predicted of an export is corrected by what is observed of it."""

from types import SimpleNamespace

import pytest
import torch
from residual import SIZE, gated, random_scores
from stairs import Stairs, registered

import l0prune
from l0prune.errors import L0pruneWarning, UsageError
from l0prune.progress.stages import advanced
from l0prune.selection import fitted
from l0prune.selection.correction import corrected
from l0prune.selection.fitting import SlotChoice


@pytest.fixture
def observed(monkeypatch):
    """Stairs of which something else is seen than they say."""

    def make(factor, overhead=0.0):
        monkeypatch.setattr(Stairs, "factor", factor)
        monkeypatch.setattr(Stairs, "overhead", overhead)
        monkeypatch.setattr(Stairs, "looked", 0)

    with registered(Stairs):
        yield make


@pytest.mark.parametrize(("factor", "overhead"), [(1.3, 0.0), (0.7, 0.0), (1.1, 2e4), (1.0, -2e4)])
@pytest.mark.parametrize("round_to", [1, "auto"])
@pytest.mark.one_in(8)
def test_what_is_observed_meets_the_budget(observed, factor, overhead, round_to):
    observed(factor, overhead)
    model = gated(random_scores(2, SIZE))
    measure = Stairs(l0prune.gates(model).plan)
    told = []
    with fitted.watched(told.append):
        ((_, seen),) = l0prune.fit(model, "stairs=0.5", round_to=round_to).items()
    assert seen == measure.observed(model) <= 0.5 * measure.dense()
    if round_to == "auto":  # one slot after the other finds no way past a step up
        assert seen > 0.3 * measure.dense()
    assert len(told[0].looks) <= 7


def test_the_network_is_not_made_smaller_than_it_has_to_be(observed):
    """Where less is seen than was predicted, there is room for more."""
    open_slots = []
    for factor in (1.0, 0.6):
        observed(factor)
        model = gated(random_scores(2, SIZE))
        l0prune.fit(model, "stairs=0.5")
        open_slots.append(int(l0prune.gates(model).open().sum()))
    assert open_slots[1] > open_slots[0]


def test_gates_move_once_however_many_choices_are_looked_at(observed):
    observed(1.3)
    scores = random_scores(2, SIZE)
    model = gated(scores)
    before = l0prune.gates(model).open()
    l0prune.fit(model, "stairs=0.5")
    gates = l0prune.gates(model)
    same = gates.open() == before
    assert torch.equal(gates.log_alpha[same], scores[same])


def test_what_cannot_be_met_is_said(observed):
    observed(1.0, 1e9)
    with pytest.warns(L0pruneWarning, match=r"stairs=0\.5 is not met: .* st of steps were"):
        counts = l0prune.fit(gated(random_scores(2, SIZE)), "stairs=0.5")
    assert counts["stairs=0.5"] > 1e9


def test_a_budget_on_some_axes_is_not_observed(observed):
    observed(100.0)
    model = gated(random_scores(2, SIZE))
    l0prune.fit(model, "inner: stairs=0.5")
    assert Stairs.looked == 0


def test_what_is_predicted_alone_is_met_without_a_look(observed):
    observed(100.0)
    model = gated(random_scores(2, SIZE))
    measure = Stairs(l0prune.gates(model).plan)
    ((_, amount),) = l0prune.fit(model, "stairs=0.5", observe=False).items()
    assert Stairs.looked == 0
    assert amount == measure.actual(l0prune.gates(model).open()) <= 0.5 * measure.dense()


def test_each_look_is_counted(observed):
    observed(1.3)
    model, shares = gated(random_scores(2, SIZE)), []
    with advanced.watched(lambda work: shares.append((work.name, work.share))):
        l0prune.fit(model, "stairs=0.5")
    assert {name for name, _ in shares} == {"fitting to the budget"}
    shares = [share for _, share in shares]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1
    assert len({*shares}) > 2


def test_who_watches_is_told_of_each_look(observed):
    observed(1.3)
    model, told = gated(random_scores(2, SIZE)), []
    measure = Stairs(l0prune.gates(model).plan)
    with fitted.watched(told.append):
        ((_, seen),) = l0prune.fit(model, "stairs=0.5").items()
    (found,) = told
    met = sum(look.observed <= look.allowed for look in found.looks)
    assert len(found.looks) == Stairs.looked - 2 * met > 1
    assert {look.budget for look in found.looks} == {"stairs=0.5"}
    assert {(look.dense, look.allowed) for look in found.looks} == {
        (measure.dense(), 0.5 * measure.dense())
    }
    assert all(look.observed == pytest.approx(1.3 * look.predicted) for look in found.looks)
    (taken,) = [look for look in found.looks if look.chosen]
    assert taken.observed == seen
    assert taken.predicted == measure.actual(l0prune.gates(model).open())
    assert found.to_dict()["looks"][0]["predicted"] == found.looks[0].predicted


class Slots:
    """A bound of so many slots."""

    most, limit = 500.0, "slots=500"
    measure = SimpleNamespace(show=str, label="slots")

    def actual(self, open_):
        return float(open_.sum())


class Counting:
    """Takes as many slots as it may."""

    def __init__(self, bound):
        self.bound, self.most = bound, {bound: bound.most}

    def choose(self, start, *, fill):
        open_ = start & (torch.arange(len(start)) < int(self.most[self.bound]))
        return SlotChoice(open_, open_)


def test_a_step_that_was_not_predicted_is_found_from_both_sides():
    """Up to 480 slots less is seen than predicted, beyond them more: no factor fits both."""
    bound = Slots()

    def observe(open_):
        count = bound.actual(open_)
        return {bound: count * (0.8 if count <= 480 else 1.1)}

    start = torch.ones(1000, dtype=torch.bool)
    choice, tried = corrected(Counting(bound), start, observe, fill=True)
    assert any(choice is each for each in tried)
    assert 470 <= bound.actual(choice.open_) <= 480


def test_a_choice_that_was_lucky_once_is_not_taken():
    """Each choice looks smaller than it is at its first look: the budget is met all the same."""
    bound, looked = Slots(), []

    def observe(open_):
        count = bound.actual(open_)
        looked.append(count)
        return {bound: count * (0.9 if looked.count(count) == 1 else 1.08)}

    start = torch.ones(1000, dtype=torch.bool)
    choice, tried = corrected(Counting(bound), start, observe, fill=True)
    assert 1.08 * bound.actual(choice.open_) == pytest.approx(choice.seen[bound])
    assert 0.97 * bound.most <= choice.seen[bound] <= bound.most
    assert all(looked.count(bound.actual(each.open_)) in (1, 3) for each in tried)


def test_what_fails_leaves_the_gates_as_they_were(observed, monkeypatch):
    def failing(*_):
        raise KeyboardInterrupt

    observed(1.0)
    monkeypatch.setattr(Stairs, "observed", failing)
    model = gated(random_scores(2, SIZE))
    before = l0prune.gates(model).log_alpha.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        l0prune.fit(model, "stairs=0.5")
    assert torch.equal(l0prune.gates(model).log_alpha.detach(), before)


def test_of_two_choices_that_meet_a_bound_the_one_that_keeps_more_is_taken():
    """Beyond 600 slots much less is seen than predicted, so that more slots are quicker."""
    bound = Slots()

    def observe(open_):
        count = bound.actual(open_)
        return {bound: count * (0.8 if count <= 600 else 0.5)}

    start = torch.arange(1000) < 700
    choice, tried = corrected(Counting(bound), start, observe, fill=True)
    assert [bound.actual(each.open_) for each in tried] == [500, 625, 700]
    assert choice is tried[-1]


def test_where_none_is_small_enough_one_is_taken_that_is_as_small_as_they_come():
    bound = Slots()

    class NoFewer(Counting):
        def choose(self, start, *, fill):
            if self.most[bound] < 450:
                raise UsageError("there is none")
            return super().choose(start, fill=fill)

    def observe(open_):
        return {bound: 1.3 * bound.actual(open_)}

    start = torch.ones(1000, dtype=torch.bool)
    with pytest.warns(L0pruneWarning, match="not met"):
        choice, _ = corrected(NoFewer(bound), start, observe, fill=True)
    assert 450 <= bound.actual(choice.open_) < 460
