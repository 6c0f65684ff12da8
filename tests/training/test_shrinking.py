"""When a network is cut in a loop of one's own, and what makes it whole again."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cut_networks import IMAGES, Inline, Side, half_closed, weights, without
from round_trips import through_torch
from small_task import differing, tensors
from torch.testing import assert_close

import l0prune
from l0prune.errors import L0pruneError, UsageError
from l0prune.training.compaction import Compaction, CompactionPolicy


@pytest.fixture
def model():
    return half_closed()


def pruner_of(model, steps=12, **settings):
    return l0prune.Pruner(
        model, steps=steps, warmup=0, settle=6, compact="settle", say=settings.pop("say", print),
        lam=0.0, **settings,
    )  # fmt: skip


def trained(model, pruner, optimizer, count):
    for _ in range(count):
        model(IMAGES).square().mean().backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()


def states(model, pruner, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), pruner.state_dict()))


def started(model):
    pruner = pruner_of(model)
    return model, pruner, torch.optim.Adam(pruner.param_groups(lr=1e-3))


def loaded(run, found):
    for each, state in zip((run[0], run[2], run[1]), (found[0], found[1], found[2]), strict=True):
        each.load_state_dict(state)


def test_a_loop_of_ones_own_is_cut_while_its_gates_stand_and_whole_in_the_end(model):
    shapes = {name: p.shape for name, p in model.named_parameters()}
    l0prune.gates(model).fixed = False
    run = started(model)
    sizes = []
    for _ in range(12):
        trained(*run, 1)
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert sizes[:5] == [sizes[0]] * 5
    assert sizes[5:11] == [sizes[5]] * 6
    assert sizes[5] < sizes[0] == sizes[11]
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert l0prune.export(model).params < sizes[0]


@pytest.mark.parametrize(
    "action",
    [
        l0prune.export,
        lambda model: l0prune.save(model, Path(__file__) / "no folder"),
        lambda model: l0prune.gates(model).set_open(l0prune.gates(model).open()),
        lambda model: l0prune.fit(model),
        lambda model: l0prune.score(model, "magnitude"),
        lambda model: l0prune.Pruner(model, steps=10),
        l0prune.ungate,
    ],
)
@pytest.mark.one_in(4)
def test_what_wants_the_whole_model_makes_a_cut_one_whole(model, action):
    parameters, run = weights(model), started(model)
    shapes = [p.shape for p in parameters]
    trained(*run, 7)
    assert [p.shape for p in parameters] != shapes
    with suppress(L0pruneError):
        action(model)
    assert [p.shape for p in parameters] == shapes
    assert run[1].compaction.cut is None


def test_what_is_closed_before_the_first_step_of_an_own_loop_goes_after_it(model):
    pruner = l0prune.Pruner(model, steps=1000, compact="auto", lam=0.0, say=print)
    optimizer = torch.optim.Adam(pruner.param_groups(lr=1e-3))
    assert pruner.compaction.cut is None
    trained(model, pruner, optimizer, 1)
    assert pruner.compaction.cut is not None
    assert pruner.compaction.share < 0.9


def test_what_was_made_whole_is_cut_again_at_the_next_look(model):
    pruner = l0prune.Pruner(
        model, steps=100, warmup=0, settle=60, compact="settle", say=print, lam=0.0
    )
    run = model, pruner, torch.optim.Adam(pruner.param_groups(lr=1e-3))
    trained(*run, 50)
    share = run[1].compaction.share
    assert share < 1
    exported = l0prune.export(model)
    assert run[1].compaction.share == 1
    trained(*run, 6)
    assert run[1].compaction.share == share
    trained(*run, 44)
    assert run[1].compaction.share == 1
    assert l0prune.export(model).params == exported.params


@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch])
@pytest.mark.parametrize("of", ["widths", "branch"])
@pytest.mark.one_in(2)
def test_a_copy_of_a_cut_model_computes_the_same_and_is_exported(copied, of, model):
    if of == "branch":
        model = without(Side(), "down")
        small = Compaction(model.train())
        small.begin()
    else:
        run = started(model)
        trained(*run, 7)
        small = run[1].compaction
    other = copied(model)
    expected = model.eval()(IMAGES)
    assert torch.equal(other.eval()(IMAGES), expected)
    assert_close(l0prune.export(other).module(IMAGES), expected)
    assert small.cut is not None
    whole = tensors(other)
    small.end()
    assert differing(tensors(model), whole) == []


def test_part_of_a_cut_model_does_not_know_what_was_cut_off(model):
    trained(*started(model), 7)
    gates = copy.copy(l0prune.gates(model))
    gates.made_whole_by = None
    with pytest.raises(UsageError, match="what was cut off is not here"):
        gates.make_whole()


def test_in_an_own_loop_all_optimizers_have_to_be_known(model):
    for named in (0, 1, 2):
        other, said = copy.deepcopy(model), []
        pruner = l0prune.Pruner(other, lam=0.0, steps=20, compact="settle", say=said.append)
        pruner.take_gates()
        parts = pruner.weights[:2], pruner.weights[2:]
        optimizers = [torch.optim.Adam(part) for part in parts]
        for _ in range(18):
            other(IMAGES).square().mean().backward()
            pruner.before_step(*optimizers[:named])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            pruner.after_step()
        assert (pruner.compaction.cut is not None) == (named == 2)
        assert any("no optimizer that before_step" in text for text in said) == (named < 2)


@pytest.mark.parametrize("saved", [3, 8])
@pytest.mark.parametrize("now", [0, 4, 9])
@pytest.mark.one_in(3)
def test_a_checkpoint_of_before_the_cut_or_after_it_is_loaded_at_any_time(model, saved, now):
    other = copy.deepcopy(model)
    run = started(model)
    torch.manual_seed(0)
    trained(*run, saved)
    found, drawn = states(*run), torch.get_rng_state()
    trained(*run, 12 - saved)
    mine = started(other)
    trained(*mine, now)
    loaded(mine, found)
    torch.set_rng_state(drawn)
    trained(*mine, 12 - saved)
    assert differing(tensors(model), tensors(other)) == []


def test_a_run_that_goes_on_knows_what_could_not_be_cut(monkeypatch):
    def in_vain(*_):
        tried.append(1)
        raise UsageError("in vain")

    tried, said = [], []
    monkeypatch.setattr(Compaction, "_cut_to", in_vain)
    model = without(Inline(), "inner")
    before = CompactionPolicy(Compaction(model), "auto", said.append)
    before.to_what_stands()
    assert len(tried) == 2  # there may be no way around what is gone
    state = before.state_dict()
    assert (state["failed"], state["goes_around"]) == (True, False)
    after = CompactionPolicy(Compaction(model), "auto", said.append)
    after.load_state_dict(state)
    after.to_what_stands()
    assert len(tried) == 2
    assert after.state_dict() == state
    assert said == ["compact: the network keeps its size while it trains: in vain"]
