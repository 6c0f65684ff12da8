"""Gates in a loop of one's own: what finetune does, step by step, and what is said."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from small_task import FEATURES, clouds, differing, gated, tensors
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning, NotGated, UsageError
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification
from l0prune.training.penalty import penalty
from l0prune.training.pruner import Pruner

STEPS = 40
SETTINGS = {"budget": "params=0.5", "gate_lr": 0.2}


def batches(steps, size=30):
    examples = clouds()
    inputs, targets = examples.inputs, examples.targets
    for step in range(steps):
        rows = torch.arange(step * size, (step + 1) * size) % len(inputs)
        yield inputs[rows], targets[rows]


def own_loop(model, pruner, optimizer, steps, start=0):
    for inputs, targets in list(batches(start + steps))[start:]:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()
    return model


def made(steps=STEPS, taken=True, **settings):
    """A run whose optimizer is as in the README; or one that holds the gates, too."""
    model = gated()
    pruner = Pruner(model, steps=steps, **{"say": print, **SETTINGS, **settings})
    return model, pruner, torch.optim.Adam(groups_of(model, pruner, taken), fused=True)


def groups_of(model, pruner, taken):
    if taken:
        return pruner.param_groups(lr=1e-2)
    weights, gates = l0prune.param_groups(model, 1e-2, pruner.gate_lr)
    return [weights, gates | {"betas": (0.9, 0.99)}]


def started(model, pairs, **settings):
    """A ``Pruner`` whose gates start as ``finetune`` has it."""
    pruner = Pruner(model, **settings)
    said = pruner.start_from(pairs)
    assert said.startswith("start: gates as their scores say: fisher of 8 batches; cut at once")
    return pruner


def started_by_hand(model, pairs, **settings):
    scores = l0prune.score(model, "fisher", pairs, batches=10)
    l0prune.gates(model).init_from_scores(scores)
    l0prune.fit(model, f"params={0.5**0.5}", scores, fill=False)
    return Pruner(model, **settings)


@pytest.mark.parametrize("start", [started, started_by_hand])
def test_a_loop_of_ones_own_is_finetune_to_the_bit(start):
    """Eight batches of 30 an epoch, no average, no recalibration: what is left is the same."""
    pairs = [(x, y) for x, y in batches(8)]
    ours = gated()
    settings = {**SETTINGS, "settle": 2, "warmup": 1, "lr": 1e-2, "compact": "settle"}
    with torch.random.fork_rng():
        l0prune.finetune(
            ours, pairs, epochs=5, ema=0.0, recalibrate=0, schedule="constant", progress=False,
            device="cpu", **settings,
        )  # fmt: skip
    own = gated()
    settings = {"steps": STEPS, "warmup": 8, "settle": 16, "say": print, "compact": "settle"}
    pruner = start(own, pairs, **settings, **SETTINGS)
    optimizer = torch.optim.Adam(pruner.param_groups(lr=1e-2), fused=True)
    torch.manual_seed(0)  # as finetune seeds its run
    own_loop(own.train(), pruner, optimizer, STEPS)
    assert differing(tensors(ours), tensors(own)) == []
    assert pruner.phase == "settle"


def test_phases_go_by_steps_and_the_gates_with_them():
    model, pruner, optimizer = made(warmup=4, settle=10)
    seen = []
    for step in range(STEPS):
        seen.append((pruner.phase, pruner.gates.fixed))
        own_loop(model, pruner, optimizer, 1, start=step)
    assert seen[:4] == [("warm-up", False)] * 4
    assert seen[4:30] == [("prune", False)] * 26
    assert seen[30:] == [("settle", True)] * 10


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_gates_that_stand_do_so_in_a_loop_of_ones_own_around_ddp(tmp_path):
    """DDP waits for a gradient of every parameter, and gates that stand had none."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, pruner, optimizer = made()
        around, stood = nn.parallel.DistributedDataParallel(model), None
        for inputs, targets in batches(STEPS):
            if pruner.phase == "settle" and stood is None:
                stood = pruner.gates.log_alpha.detach().clone()
            nn.functional.cross_entropy(around(inputs), targets).backward()
            pruner.before_step(optimizer)
            optimizer.step()
            pruner.after_step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    assert torch.equal(stood, pruner.gates.log_alpha)


def test_the_penalty_is_added_after_clipping_and_only_once():
    model, pruner, _ = made(budget=None, lam=0.01, warmup=0, taken=False)
    for _ in range(3):  # accumulation: three backwards, one step
        model(torch.randn(4, FEATURES)).sum().backward()
    before = pruner.gates.log_alpha.grad.clone()
    (expected,) = torch.autograd.grad(penalty(model, 0.01), pruner.gates.log_alpha)
    nn.utils.clip_grad_norm_(pruner.weights, 1e-3)
    value = pruner.before_step()
    torch.testing.assert_close(pruner.gates.log_alpha.grad - before, expected)
    torch.testing.assert_close(value, penalty(model, 0.01).detach())


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.one_in(2)
def test_a_stop_and_a_fresh_pruner_are_the_same_to_the_bit(taken, starts):
    whole = made(taken=taken)
    for model, pruner, optimizer in (whole,):
        if starts:
            assert pruner.start_from(list(batches(8)))
        torch.manual_seed(1)
        own_loop(model, pruner, optimizer, 20)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), pruner.state_dict()))
        file = io.BytesIO()
        torch.save(kept[2], file)
        rng = torch.get_rng_state()
        own_loop(model, pruner, optimizer, 20, start=20)
    model, pruner, optimizer = made(taken=taken)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    file.seek(0)
    pruner.load_state_dict(torch.load(file, weights_only=True))
    torch.set_rng_state(rng)
    own_loop(model, pruner, optimizer, 20, start=20)
    assert differing(tensors(whole[0]), tensors(model)) == []


def test_gates_of_their_own_optimizer_are_out_of_reach_of_any_other():
    model = gated()
    pruner = Pruner(model, steps=STEPS, lam=0.0, warmup=0, gate_lr=0.1, say=print)
    pruner.take_gates()
    theirs = torch.optim.AdamW(model.parameters(), lr=100.0, weight_decay=0.5)
    start = pruner.gates.log_alpha.detach().clone()
    inputs, targets = next(batches(1))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with_gates = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert torch.equal(with_gates, nn.utils.get_total_norm([p.grad for p in pruner.weights]))
    pruner.before_step(theirs)
    theirs.step()
    moved = (pruner.gates.log_alpha.detach() - start).abs()
    assert 0 < moved.max() <= 0.1 * 1.0001
    assert pruner.gates.log_alpha not in theirs.state


def test_gates_of_their_own_optimizer_learn_as_in_a_group_of_another():
    ends = []
    for taken in (False, True):
        model, pruner, optimizer = made(taken=taken)
        torch.manual_seed(1)
        own_loop(model, pruner, optimizer, STEPS)
        ends.append(tensors(model))
    assert differing(*ends) == []


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.one_in(2)
def test_accumulation_gives_the_same_gates(taken):
    """With gates that draw nothing: four quarters of a batch are the batch."""
    ends = []
    for parts in (1, 4):
        model = gated(ContinuousSparsification(), norm=False)
        pruner = Pruner(model, steps=STEPS, say=print, **SETTINGS)
        optimizer = torch.optim.Adam(groups_of(model, pruner, taken))
        for inputs, targets in batches(STEPS, size=32):
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                (nn.functional.cross_entropy(model(x), y) / parts).backward()
            pruner.before_step(optimizer)
            optimizer.step()
            pruner.after_step()
            optimizer.zero_grad()
        ends.append(pruner.gates.log_alpha.detach())
    torch.testing.assert_close(*ends, atol=1e-4, rtol=1e-4)


def test_a_scaled_loss_gives_the_same_gates():
    ends = []
    for scale in (1.0, 1024.0):
        model, pruner, optimizer = made(lam=0.01, l2=1e-3, warmup=0)
        torch.manual_seed(1)
        for inputs, targets in batches(STEPS):
            (scale * nn.functional.cross_entropy(model(inputs), targets)).backward()
            pruner.before_step(scale=scale)
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / scale
            optimizer.step()
            pruner.after_step()
            optimizer.zero_grad()
        ends.append(pruner.gates.log_alpha.detach())
    torch.testing.assert_close(*ends, atol=1e-3, rtol=1e-3)


def test_a_loop_that_ends_early_can_be_finished():
    model, pruner, optimizer = made()
    own_loop(model, pruner, optimizer, 10)
    assert pruner.metrics()["params"] > 0.5
    pruner.finish()
    assert pruner.gates.fixed
    assert pruner.metrics()["params"] <= 0.5
    stood = pruner.gates.log_alpha.detach().clone()
    pruner.finish()
    assert torch.equal(stood, pruner.gates.log_alpha)


# --- what is said ---------------------------------------------------------------------------


def test_an_export_over_the_budget_of_a_loop_that_ended_early_is_said():
    model = gated()
    pruner = Pruner(model, steps=STEPS, budget="params=0.3", say=print)
    optimizer = torch.optim.Adam(pruner.param_groups(), lr=1e-3)
    with pytest.warns(L0pruneWarning, match="neither its before_step.* nor its after_step"):
        l0prune.export(model)
    own_loop(model, pruner, optimizer, 3)
    with pytest.warns(L0pruneWarning, match=f"for params=0.3. After 3 of {STEPS} steps .*finish"):
        l0prune.export(model)
    pruner.finish()
    with warnings.catch_warnings(action="error"):
        assert l0prune.export(model).params <= 0.3 * l0prune.export(model).params_before


@pytest.mark.parametrize("left_out", ["after_step", "before_step"])
def test_one_call_without_the_other_is_said_once(left_out, monkeypatch):
    found = []
    model = gated()
    pruner = Pruner(model, steps=STEPS, lam=1e-3, say=found.append)
    optimizer = torch.optim.Adam(pruner.param_groups(), lr=1e-3)
    monkeypatch.setattr(pruner, left_out, lambda *_: None)
    own_loop(model, pruner, optimizer, 5)
    assert len([text for text in found if f"without pruner.{left_out}()" in text]) == 1


def said(pruner, optimizer, model, steps=1):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        own_loop(model, pruner, optimizer, steps)
    return [str(each.message) for each in found]


@pytest.mark.slow
def test_a_healthy_run_says_nothing():
    model, pruner, optimizer = made(steps=400, say=None)
    assert said(pruner, optimizer, model, steps=400) == []


def test_gates_that_are_frozen():
    model, pruner, optimizer = made(say=None)
    pruner.gates.log_alpha.requires_grad_(False)
    (text,) = said(pruner, optimizer, model)
    assert "frozen" in text


def test_gates_that_are_frozen_cannot_be_taken():
    _, pruner, _ = made()
    pruner.gates.log_alpha.requires_grad_(False)
    with pytest.raises(UsageError, match="frozen"):
        pruner.take_gates()


def test_gates_that_no_optimizer_holds():
    model, pruner, _ = made(say=None, taken=False)
    (text,) = said(pruner, torch.optim.Adam(pruner.weights), model, steps=3)
    assert "take_gates()" in text


def test_gates_that_are_decayed():
    model, pruner, _ = made(say=None, taken=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2, weight_decay=0.1)
    (text,) = said(pruner, optimizer, model)
    assert "weight_decay=0.1" in text


SCHEDULES = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, total_steps=STEPS),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-5, 1e-3, cycle_momentum=False),
    "warm-up": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1e-3, total_iters=STEPS),
}


def scheduled(model, pruner, optimizer, schedule):
    """A loop with a scheduler of all groups; what is said, and where the gates end."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        steps = SCHEDULES[schedule](optimizer)
        torch.manual_seed(1)
        for step in range(STEPS):
            own_loop(model, pruner, optimizer, 1, start=step)
            steps.step()
    return [str(each.message) for each in found if "l0prune" in str(each.message)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.one_in(3)
def test_no_scheduler_reaches_the_gates(schedule):
    model, pruner, optimizer = made(say=None)
    text = " ".join(scheduled(model, pruner, optimizer, schedule))
    assert "hardly" not in text
    assert "no gate can close" not in text
    assert l0prune.export(model).params <= 0.5 * l0prune.export(model).params_before


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scheduler_that_sets_the_rate_of_gates_is_the_cause_that_is_named(schedule):
    model, pruner, optimizer = made(say=None, taken=False)
    text, *more = scheduled(model, pruner, optimizer, schedule)
    assert "scheduler" in text
    assert not any("hardly moved" in each for each in more)
    assert "take_gates()" in text
    assert "gate_lr=0.2" in text


def test_another_run_takes_the_gates_over():
    """Whatever became of the first one: its hook would keep their gradient from the second."""
    model, first, optimizer = made()
    own_loop(model, first, optimizer, 3)
    before = l0prune.gates(model).log_alpha.detach().clone()
    second = Pruner(model, steps=STEPS, say=print, **SETTINGS)
    own_loop(model, second, torch.optim.Adam(groups_of(model, second, taken=False)), 3)
    assert not torch.equal(before, l0prune.gates(model).log_alpha)
    third = Pruner(model, steps=STEPS, say=print, **SETTINGS)
    third.take_gates()
    del third
    gc.collect()
    model(torch.randn(4, FEATURES)).sum().backward()
    assert bool(l0prune.gates(model).log_alpha.grad.any())


def test_gates_that_move_too_slowly():
    model, pruner, optimizer = made(say=None, gate_lr=1e-3)
    (text,) = said(pruner, optimizer, model)
    assert "gate_lr=0.001" in text


def test_what_is_said_goes_where_the_user_wants_it():
    texts = []
    model, pruner, _ = made(say=texts.append, taken=False)
    own_loop(model, pruner, torch.optim.Adam(pruner.weights), 1)
    assert len(texts) == 1


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"budget": "params=0.01"}, "params"),
        ({"bugdet": "params=0.5"}, "budget"),
        ({"warmup": 5, "settle": 5, "lam": 0.1}, "10 steps"),
        ({}, "N"),
        ({"steps": 0.3}, "steps must be a whole number"),
        ({"warmup": "10"}, "warmup must be a whole number"),
        ({"settle": True}, "settle must be a whole number"),
    ],
)
def test_what_no_run_can_be_made_of(given, text):
    with pytest.raises(UsageError, match=text):
        Pruner(gated(), **{"steps": 10, **given})
    with pytest.raises(NotGated):
        Pruner(nn.Linear(2, 2), **{"steps": 10, **given})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"axes": [["other", 3]]}, "another model"),
        ({"phases": [99, 0, 1]}, "99 steps"),
        ({"budget": {}}, "another budget"),
        ({"format": 99}, "no state"),
    ],
)
def test_the_state_of_another_run_changes_nothing(change, text):
    _, pruner, _ = made()
    state = pruner.state_dict()
    _, other, _ = made()
    with pytest.raises(UsageError, match=text):
        other.load_state_dict({**state, **change, "step": 7})
    assert other.step == 0


def test_how_widths_were_chosen_outlives_a_stop():
    model = gated()
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) < 7)
    pruner = l0prune.Pruner(model, steps=10, settle=4, lam=0.1, round_to=6)
    assert "fitted" not in pruner.record()
    pruner.finish()
    found = pruner.record()["fitted"]
    assert found["filling"][gates.axes[0].name] == 12 - 7
    again = l0prune.Pruner(gated(), steps=10, settle=4, lam=0.1, round_to=6)
    again.load_state_dict(pruner.state_dict())
    assert again.record()["fitted"] == found
