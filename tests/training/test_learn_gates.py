"""Gates that learn while the weights of the network stand."""

import copy
import pickle
import signal

import pytest
import torch
import torch.nn.functional as F
from small_task import clouds, data, differing, gated, tensors
from torch import nn

import l0prune
from l0prune.errors import Interrupted, L0pruneWarning, UsageError
from l0prune.features.distillation.teacher import Teacher
from l0prune.running.batches import call
from l0prune.training.doctor import diverged
from l0prune.training.settings import Settings
from l0prune.training.standing import Standing

RUN = {"learn": "gates", "budget": "macs=0.5", "batch_size": 30, "progress": False, "gate_lr": 0.1}
GATES = ["l0prune_gates.log_alpha"]


def test_frozen_weights_are_reported_where_they_were_to_learn(model):
    """Also in a loop of the user's own; not with learn="gates", nor where one weight learns."""
    model.requires_grad_(False)
    l0prune.gates(model).log_alpha.requires_grad_(True)
    before = tensors(model)
    with pytest.warns(L0pruneWarning, match=r"all weights .* frozen .*learn='gates'"):
        l0prune.finetune(model, data(), epochs=1, **{**RUN, "learn": True})
    assert {"0.weight", "0.bias", "4.weight", "4.bias"}.isdisjoint(
        differing(before, tensors(model))
    )
    said = []
    for options in ({}, {"learn": "gates"}):
        pruner = l0prune.Pruner(model, lam=0.01, steps=4, say=said.append, **options)
        F.cross_entropy(model(torch.randn(4, 6)), torch.arange(4) % 3).backward()
        pruner.before_step()
        pruner.finish() if options else pruner.release_gates()
    assert [text.partition(" (")[0] for text in said if "frozen" in text] == [
        "all weights of this model are frozen"
    ]
    model[4].bias.requires_grad_(True)
    l0prune.finetune(model, data(), epochs=1, **{**RUN, "learn": True})


@pytest.fixture
def model():
    """A gated network with statistics that are not those of a batch."""
    result = gated()
    with torch.no_grad():
        result[1].running_mean.normal_()
        result[1].running_var.uniform_(0.5, 2)
    return result


def test_weights_and_statistics_stand_and_the_budget_is_met(model):
    before, mode = tensors(model), model.training
    frozen = model[4].bias.requires_grad_(False)
    seen = []

    def loss(outputs, targets):
        seen.append([(n, p.grad) for n, p in model.named_parameters() if p.requires_grad])
        assert not model[1].training
        return F.cross_entropy(outputs, targets)

    groups = []

    def adam(given):
        groups.extend(given)
        return torch.optim.Adam(given)

    history = l0prune.finetune(model, data(), epochs=4, loss=loss, optimizer=adam, **RUN)
    assert differing(before, tensors(model)) == GATES
    assert {name for step in seen for name, _ in step} == set(GATES)
    assert [group["name"] for group in groups] == ["gates"]
    assert model[0].weight.requires_grad
    assert not frozen.requires_grad
    assert model.training == mode
    assert model[1].training == mode
    assert "train" not in vars(model[1])
    last = history.last
    assert last["macs"] <= 0.5 * last["dense_macs"]
    assert last["phase"] == "prune"
    assert history.facts["settle"] == 0
    exported = l0prune.export(model)
    assert exported.macs == last["macs"]
    assert l0prune.evaluate(model, data())["test_loss"] == pytest.approx(last["test_loss"])


@pytest.mark.slow
def test_compensation_comes_after_it(model):
    l0prune.finetune(model, data(), epochs=4, **{**RUN, "budget": "macs=0.3"})
    found = l0prune.compensate(model, clouds().inputs)
    assert found.after.error < found.before.error
    exported = l0prune.export(model)
    x = clouds(30, seed=2).inputs
    torch.testing.assert_close(exported.module(x), model.eval()(x), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_price_alone_closes_gates(model):
    before = tensors(model)
    history = l0prune.finetune(model, data(), epochs=20, lam=0.02, **{**RUN, "budget": None})
    assert history.last["macs"] < history.last["dense_macs"]
    assert differing(before, tensors(model)) == GATES


@pytest.mark.parametrize(
    "stop", [15, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (3, 23, 24))]
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(model, tmp_path, stop):
    other, steps = copy.deepcopy(model), []

    def loss(outputs, targets):
        steps.append(model.training)
        if sum(steps) == stop:
            signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(outputs, targets)

    def plain(outputs, targets):
        return F.cross_entropy(outputs, targets)

    loss.__qualname__ = plain.__qualname__ = "loss"
    whole = l0prune.finetune(other, data(), epochs=3, loss=plain, **RUN)
    found = tensors(model)
    with pytest.raises(Interrupted):
        l0prune.finetune(model, data(), epochs=3, loss=loss, out=tmp_path, report=False, **RUN)
    assert model[0].weight.requires_grad
    again = l0prune.finetune(
        model, data(), epochs=3, loss=plain, out=tmp_path, resume=True, report=False, **RUN
    )
    assert differing(tensors(other), tensors(model)) == []
    assert differing(found, tensors(model)) == GATES
    for one, two in zip(whole.records, again.records, strict=True):
        assert {**one, "seconds": 0} == {**two, "seconds": 0}


def test_inputs_alone_are_answered_by_the_network_itself(model):
    inputs = clouds().inputs
    history = l0prune.finetune(model, (inputs, clouds(60, seed=1).inputs), epochs=2, **RUN)
    assert history.facts["settings"]["loss"] == "mse"
    assert history.records[0]["before"]["test_loss"] < 1e-10
    assert history.last["macs"] <= 0.5 * history.last["dense_macs"]


def test_without_its_gates_it_is_its_own_teacher(model):
    plain, inputs = l0prune.ungate(copy.deepcopy(model)).eval(), clouds(12).inputs
    with torch.no_grad():
        l0prune.gates(model).log_alpha[:8] = -4
    standing = Standing(model.train())
    teacher = Teacher.of(model, Settings(learn="gates", distill=1.0, temperature=2.0))
    outputs = call(model, inputs)
    found = teacher.mixed(torch.tensor(3.0), outputs, inputs)
    mine, theirs = ((each / 2).log_softmax(1) for each in (outputs, plain(inputs)))
    torch.testing.assert_close(found, 4 * (theirs.exp() * (theirs - mine)).sum(1).mean())
    assert teacher.tensors() == {}
    assert "own teacher" in teacher.needs_whole
    assert model.training
    assert not l0prune.gates(model).bypassed
    found.backward()
    assert l0prune.gates(model).log_alpha.grad.any()
    apart = Teacher.of(model, Settings(learn="gates", distill=1.0, match="2"))
    assert apart.tensors()
    apart.close()
    standing.release()


def test_a_run_learns_from_its_own_teacher_without_a_copy(model, monkeypatch):
    monkeypatch.setattr("l0prune.features.distillation.teacher._dense", None)
    before = tensors(model)
    history = l0prune.finetune(model, data(), epochs=1, distill=1.0, **RUN)
    assert differing(before, tensors(model)) == GATES
    assert history.last["training_macs"] == 1


def test_in_a_loop_of_the_users_own(model):
    before, norm = tensors(model), model[1]
    inputs, targets = clouds(120).inputs, clouds(120).targets
    pruner = l0prune.Pruner(model, steps=30, learn="gates", budget="macs=0.5", gate_lr=0.3)
    assert model[0].weight.requires_grad is False
    with pytest.raises(UsageError, match="nothing for an optimizer"):
        pruner.param_groups()
    for step in range(30):
        model.train()
        F.cross_entropy(model(inputs), targets).backward()
        assert not norm.training
        pickle.loads(pickle.dumps(model))
        pruner.before_step()
        pruner.after_step()
        if step == 10:
            pruner.compaction.begin()
    assert differing(before, tensors(model)) == GATES
    assert norm.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    exported = l0prune.export(model)
    assert exported.macs <= 0.5 * exported.macs_before


@pytest.mark.slow
def test_a_loop_that_ends_early_is_finished(model):
    pruner = l0prune.Pruner(model, steps=30, learn="gates", budget="macs=0.5")
    F.cross_entropy(model(clouds(30).inputs), clouds(30).targets).backward()
    pruner.before_step()
    pruner.after_step()
    pruner.finish()
    exported = l0prune.export(model)
    assert exported.macs <= 0.5 * exported.macs_before
    assert model[0].weight.requires_grad


def test_norms_that_were_frozen_before_stay_so():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4))
    model.train()
    model[1].eval()
    standing = Standing(model, nn.Linear(2, 2))
    model.train()
    assert (model[1].training, model[2].training) == (False, True)  # it keeps no statistics
    standing.release()
    assert (model[1].training, model[0].weight.requires_grad) == (False, True)
    model.train()
    assert model[1].training


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"penalty": "mcp", "budget": "macs=0.5"}, "closes slots by their weights"),
        ({"l2": 1e-3}, "leave l2 out"),
        ({"settle": 2.0}, r"nothing to settle.*compensate"),
    ],
)
def test_what_makes_no_sense_with_weights_that_stand_is_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        Settings(learn="gates", **settings)
    asked = {name: int(value) if name == "settle" else value for name, value in settings.items()}
    with pytest.raises(UsageError, match=says):
        l0prune.Pruner(gated(), steps=10, learn="gates", **asked)


def test_a_loss_that_is_no_number_is_not_put_down_to_the_rate_of_weights():
    settings = Settings(learn="gates", lr=0.7)
    said = str(diverged("the loss is nan", "epoch 1", settings, 0, gated=True))
    assert "gate_lr" in said
    assert "0.7" not in said


def test_other_words_are_refused():
    with pytest.raises(UsageError, match="learn must be 'gates' or true or false"):
        Settings(learn="weights")
    with pytest.raises(UsageError, match="a Pruner has nothing to do"):
        l0prune.Pruner(gated(), steps=10, learn=False)
