"""`finetune` of a network that is cut while it trains."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cut_networks import unread
from shared_runs import COMMON, doubled, loss, mlp, residual, task
from torch.testing import assert_close

import l0prune
from l0prune.running.task import Task
from l0prune.training.compaction import Compaction

HALF = {**COMMON, "budget": "params=0.5", "lam": None, "gate_lr": None}


def finetuned(make, compact, **settings):
    """What is left of a model that was pruned to half of its parameters, and its training MACs."""
    model = make()
    own = {**HALF, "epochs": 6, **settings}
    with torch.random.fork_rng():
        history = l0prune.finetune(model, task(doubled()), **own, compact=compact)
    assert all(p.grad is None for p in model.parameters())
    state = l0prune.export(model).module.state_dict()
    for path in unread(model):  # a closed branch that is passed by counts no batches
        state.pop(f"{path}.num_batches_tracked", None)
    return state, history.last["training_macs"]


# said by Dynamo alone, which looks at all that a forward reads
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("make", "way"),
    [
        (mlp, {"optimizer": "sgd", "ema": 0.9}),
        (mlp, {"distill": 0.5, "schedule": "constant"}),
        (residual, {"checkpointing": True, "accumulate": 2}),
        pytest.param(residual, {"compile": "eager"}, marks=pytest.mark.slow),
        (partial(residual, True), {"l2": 1e-2, "optimizer": "adamw", "weight_decay": 0.1}),
    ],
    ids=["average", "distilled", "checkpointed", "compiled", "norms and L2"],
)
@pytest.mark.one_in(6)
def test_a_run_that_is_cut_learns_what_one_that_only_masks_does(make, way):
    whole, all_of_it = finetuned(make, "never", **way)
    cut, less = finetuned(make, "settle", **way)
    assert less < 0.95 < all_of_it == 1
    assert_close(whole, cut, rtol=1e-9, atol=1e-10)


def test_gates_that_are_closed_for_good_are_cut_while_others_learn():
    _, late = finetuned(mlp, "settle")
    _, early = finetuned(mlp, "auto")
    assert early < late


def test_what_raises_leaves_the_model_whole():
    model = mlp()
    shapes = [p.shape for p in model.parameters()]
    calls = []

    def failing(outputs, targets):
        calls.append(len(next(model.parameters())))
        if len(calls) >= 47:
            raise ZeroDivisionError
        return loss(outputs, targets)

    with pytest.raises(ZeroDivisionError):
        l0prune.finetune(model, Task(doubled(), loss=failing), **HALF | {"epochs": 6})
    assert calls[-2] < calls[0] == calls[-1]  # it is tried on the whole network, too
    assert [p.shape for p in model.parameters()] == shapes


def test_what_hinders_a_cut_is_said_before_the_first_step(capsys):
    settings = {**COMMON, "epochs": 2, "progress": True}
    l0prune.finetune(mlp(), task(doubled()), **settings, distill=0.5, match="0")
    said = capsys.readouterr().err
    text = "compact: the network keeps its size while it trains: match compares what its modules"
    assert text in " ".join(said.split())
    assert said.index("compact:") < said.index("epoch 1/2")
    l0prune.finetune(mlp(), task(doubled()), **settings, distill=0.5, match="0", compact="never")
    assert "compact" not in capsys.readouterr().err


def test_hooks_keep_the_size_of_the_network(capsys):
    model, seen = mlp(), []
    width = model[0].out_features
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    assert "0 has hooks" in Compaction(model).hindrance()
    history = l0prune.finetune(model, task(doubled()), **HALF | {"progress": True})
    assert set(seen) == {width}
    assert history.last["training_macs"] == 1
    assert "keeps its size while it trains: 0 has hooks" in capsys.readouterr().err


def test_a_loss_that_knows_the_whole_sizes_keeps_the_network_whole(capsys):
    model = mlp()
    kept = [(p, p.detach().clone()) for p in model.parameters() if p.dim() > 1]

    def near(outputs, targets):
        return loss(outputs, targets) + sum(((p - was) ** 2).sum() for p, was in kept)

    near_task = Task(doubled(), loss=near)
    history = l0prune.finetune(model, near_task, **HALF | {"progress": True})
    assert history.last["training_macs"] == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "what knows its own sizes fails at those that are left: The size of tensor" in said


class Elsewhere(RuntimeError):
    """As other packages have of their own."""


@pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError, Elsewhere])
@pytest.mark.parametrize("of", ["loss", "metric"])
@pytest.mark.one_in(4)
def test_whatever_error_it_is_that_the_sizes_make(of, error, capsys):
    model = mlp()
    width = model[0].out_features

    def known(value):
        if model[0].out_features != width:
            raise error("it has been another size")
        return value

    own = {of: lambda outputs, targets: known(loss(outputs, targets))}
    given = Task(doubled(), doubled(), **{"loss": loss, **own})
    history = l0prune.finetune(model, given, **HALF | {"progress": True})
    assert len(history.records) == HALF["epochs"]
    assert all("test_loss" in record for record in history.records)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("fails at those that are left") == 1
    assert "it has been another size" in said


@pytest.mark.parametrize("of", ["loss", "metric"])
def test_an_error_that_comes_once_is_not_of_the_sizes(of, capsys):
    """Such as that of a worker process that was ended, which is raised wherever the run is."""
    model, raised = mlp(), []
    width = model[0].out_features

    def ended(value):
        if model[0].out_features != width and not raised:
            raised.append(RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated"))
            raise raised[0]
        return value

    own = {of: lambda outputs, targets: ended(loss(outputs, targets))}
    given = Task(doubled(), doubled(), **{"loss": loss, **own})
    with pytest.raises(RuntimeError) as error:
        l0prune.finetune(model, given, **HALF | {"progress": True})
    assert error.value is raised[0]
    assert "knows its own sizes" not in capsys.readouterr().err
    assert model[0].out_features == width


def test_a_network_within_another_module_is_trained_whole(capsys):
    around = torch.nn.Sequential(mlp())
    history = l0prune.finetune(around, task(doubled()), **HALF | {"progress": True})
    assert history.last["training_macs"] == 1
    assert "it is a part of the module that is trained" in capsys.readouterr().err
    assert l0prune.export(around).params < l0prune.export(around).params_before
