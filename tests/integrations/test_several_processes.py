"""Gates under the callbacks in two processes that train one model, on the CPU."""

from __future__ import annotations

import pytest
import torch
from processes import free_port, in_processes, tell

import l0prune
from l0prune.gating.kinds.continuous_sparsification import ContinuousSparsification

# Each process loads a framework anew.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def of_trainer(rank, count, port, folder):
    from test_trainer_callback import TEXTS, gated, llama, trained

    tell(rank, count, port)
    return summary(
        *trained(
            folder,
            gated(llama, kind=ContinuousSparsification()),
            data=TEXTS,
            steps=20,
            per_device_train_batch_size=8 // count,
            max_grad_norm=0.1,
        )[:2]
    )


def of_lightning(rank, count, port, folder, parts=1, **arguments):
    from small_task import gated
    from test_lightning_callback import trained

    tell(rank, count, port)
    return summary(
        *trained(
            folder,
            gated(ContinuousSparsification(), norm=False),
            parts=parts,
            accumulate_grad_batches=1,
            strategy="ddp" if count > 1 else "auto",
            devices=count,
            **arguments,
        )[:2]
    )


def of_lightning_on_the_same_batches(rank, count, port, folder):
    """As it shuffles what it shares out."""
    return of_lightning(rank, count, port, folder, use_distributed_sampler=False)


def in_several(run, count, folder):
    port = free_port()
    (own := folder / str(count)).mkdir()
    return in_processes(run, count, port, own, count=count, folder=own)


def summary(model, pruner):
    small = l0prune.export(model)
    return {
        "processes": torch.distributed.get_world_size(),
        "log_alpha": pruner.gates.log_alpha.detach().clone(),
        "weights": [weight.detach().clone() for weight in pruner.weights],
        "params": small.params / small.params_before,
    }


def agree(first, second):
    assert [first["processes"], second["processes"]] == [2, 2]
    assert torch.equal(first["log_alpha"], second["log_alpha"])
    for mine, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("run", "budget"),
    [(of_trainer, 0.6), (of_lightning_on_the_same_batches, 0.5)],
    ids=["transformers", "lightning"],
)
def test_two_processes_learn_the_gates_of_one(run, budget, tmp_path):
    """With gates that draw nothing; a Trainer gives each process its half of every batch."""
    (alone,), both = in_several(run, 1, tmp_path), in_several(run, 2, tmp_path)
    agree(*both)
    torch.testing.assert_close(both[0]["log_alpha"], alone["log_alpha"], atol=1e-3, rtol=1e-3)
    assert both[0]["params"] == alone["params"] <= budget


def test_processes_agree_on_gates_that_each_learns_from_other_examples(tmp_path):
    both = in_several(of_lightning, 2, tmp_path)
    agree(*both)
    assert both[0]["params"] == both[1]["params"] <= 0.5
