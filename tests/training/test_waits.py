"""A step asks the device for no number: on a GPU the host would wait for all that is under way."""

import pytest
import torch
from shared_runs import COMMON, doubled, loss, mlp, residual, task

import l0prune
from benchmarks.host import Waits

EPOCHS, SETTLE = 4, 1
BUDGET = {"lam": None, "budget": "params=0.5,macs=0.6"}
LEARNING = (EPOCHS - SETTLE) * len(doubled()) // COMMON["batch_size"]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (mlp, {"l2": 1e-2, "prior": 0.5, "clip": 1.0}),
        (mlp, {**BUDGET, "distill": 0.5, "optimizer": "sgd", "round_to": 4}),
        (residual, {**BUDGET, "checkpointing": True, "ema": 0.9, "autocast": "bf16"}),
    ],
    ids=["penalty", "budgets", "branches"],
)
@pytest.mark.one_in(4)
def test_a_step_waits_for_nothing(make, settings):
    own = {**COMMON, "gate_lr": None, **settings, "epochs": EPOCHS, "settle": SETTLE}
    with Waits().watching() as waits:
        l0prune.finetune(make(), task(doubled()), **own, compact="never")
    learning, settling = waits.by_step[:LEARNING], waits.by_step[LEARNING:]
    assert len(settling) == LEARNING // (EPOCHS - SETTLE)
    assert not any(learning[1:]), waits.places  # in the first one what is worked out is kept
    # On a CPU it looks whether the gates still stand as they stood; their fit comes before.
    assert max(settling[1:]) <= 1, waits.places


def test_a_step_of_a_loop_of_your_own_waits_for_nothing():
    model, waits = mlp(), Waits()
    pruner = l0prune.Pruner(model, budget="params=0.5", steps=400)
    optimizer = torch.optim.SGD(pruner.param_groups(lr=1e-3), fused=True)
    assert 400 * 0.7 / 20 > 6  # steps between two looks
    for inputs, targets in list(doubled().batches(30))[:6]:
        with waits.one_step():
            loss(model(inputs), targets).backward()
            pruner.before_step(optimizer)
            optimizer.step()
            pruner.after_step()
            optimizer.zero_grad()
    assert not any(waits.by_step[2:]), waits.places


def test_waits_are_seen():
    waits, x = Waits(), torch.arange(3.0)
    with waits.one_step():
        float(x[0]), bool(x.any()), x.tolist(), x.cpu(), x[x > 1], x.nonzero(), torch.equal(x, x)
    with waits.one_step():
        x[torch.tensor([1])], torch.where(x > 1, x, 0), x.sum()
    assert waits.by_step == [7, 0]
