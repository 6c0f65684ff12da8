import copy
import json
import math

import pytest
import torch
from small_task import CLASSES, FEATURES, clouds, data, differing, gated, network, tensors
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import l0prune
from l0prune.data import Data, Tensors
from l0prune.errors import AlreadyGated, DataError, FileError, L0pruneWarning, NotGated, UsageError
from l0prune.files.atomic import claimed
from l0prune.running.evaluate import evaluate
from l0prune.running.task import Task
from l0prune.training.penalty import param_groups, penalty
from l0prune.training.run import finetune, train_dense

QUIET = {"progress": False, "batch_size": 30, "device": "cpu"}


def order(epoch, seed=0):
    """The training batches of an epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return clouds().batches(30, generator=generator)


def test_dense_training_is_the_textbook_loop_to_the_bit():
    model, twin = network(norm=False), network(norm=False)
    history = train_dense(model, data(), epochs=2, ema=0, optimizer="sgd", lr=0.1, **QUIET)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, fused=True)
    losses = []
    for epoch in range(2):
        for inputs, targets in order(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(twin(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert differing(tensors(model), tensors(twin)) == []
    assert history.last["train_loss"] == pytest.approx(sum(losses[8:]) / 8, rel=1e-12)
    assert history.last["phase"] == "dense"


@pytest.mark.parametrize(
    "terms", [{}, {"counting": "groups", "prior": 0.1, "l2": 0.02, "l2_detach": True}]
)
def test_pruning_is_the_users_own_loop_to_the_bit(terms):
    model, twin = gated(norm=False), gated(norm=False)
    rest = {"ema": 0, "warmup": 0, "settle": 0, "lam": "2/N", "gate_lr": 0.05, "seed": 4}
    history = finetune(model, data(), epochs=2, **rest, **terms, **QUIET)
    optimizer = torch.optim.Adam(param_groups(twin, lr=1e-3, gate_lr=0.05), fused=True)
    torch.manual_seed(4)
    penalties = []
    for epoch in range(2):
        for inputs, targets in order(epoch, seed=4):
            optimizer.zero_grad()
            loss = cross_entropy(twin(inputs), targets)
            extra = penalty(twin, 2 / 240, n=240, **terms)
            (loss + extra).backward()
            optimizer.step()
            penalties.append(extra.item())
    assert differing(tensors(model), tensors(twin)) == []
    assert history.last["penalty"] == pytest.approx(sum(penalties[8:]) / 8, rel=1e-12)


@pytest.mark.slow
def test_features_that_say_nothing_are_cut_and_the_others_stay():
    model = network()
    dense = train_dense(model, data(), epochs=10, **QUIET).last
    l0prune.gate(model, torch.zeros(2, FEATURES))
    history = finetune(model, data(), lam="1/N", epochs=40, gate_lr=0.05, **QUIET)
    assert dense["error"] < 0.1
    assert history.last["error"] <= dense["error"] + 0.02
    features = next(axis for axis in l0prune.gates(model).axes if axis.kind == "input")
    assert features.open.tolist() == [True] * 3 + [False] * 3  # the centres differ in three
    # 3 of 6 columns of 16 weights have gone with the features, and more with neurons.
    assert history.last["params"] < history.last["dense_params"] - 3 * 16
    assert [r["phase"] for r in history.records] == ["warm-up"] * 2 + ["prune"] * 26 + [
        "settle"
    ] * 12


@pytest.mark.parametrize(("compact", "rounding"), [("never", 0.0), ("settle", 1e-6)])
def test_what_was_reported_last_is_what_the_model_does(compact, rounding):
    """To the bit, where what was tested was not the smaller network, whose sums are shorter."""
    model = gated()
    history = finetune(model, data(), epochs=5, lam="1/N", gate_lr=0.3, compact=compact, **QUIET)
    found = evaluate(model, data(), batch_size=30)
    assert {name: history.last[name] for name in found} == pytest.approx(found, rel=rounding, abs=0)
    gates = l0prune.gates(model)
    assert history.last["open"] == {axis.name: int(axis.open.sum()) for axis in gates.axes}


def test_the_model_ends_with_its_averages():
    """With β = 0 the average is the last step; with β near 1 it lies on the way there."""
    start = tensors(gated(norm=False))
    rest = {"epochs": 3, "settle": 0, "recalibrate": 0, **QUIET}
    models = {beta: gated(norm=False) for beta in (0.0, 0.5, 0.999)}
    for beta, model in models.items():
        finetune(model, data(), ema=beta, **rest)
    none, some, much = (models[beta].state_dict() for beta in models)
    name = "l0prune_gates.log_alpha"
    moved = [float((state[name] - start[name]).abs().mean()) for state in (none, some, much)]
    assert moved[0] > moved[1] > moved[2] > 0
    assert differing(none, some) == list(none)


def test_the_gates_stand_still_while_weights_settle():
    model = gated()
    seen = []

    def watch(outputs, targets):
        gates = l0prune.gates(model)
        if torch.is_grad_enabled():
            seen.append((gates.fixed, gates.log_alpha.detach().clone(), model[0].weight.clone()))
        return cross_entropy(outputs, targets)

    task = Task(clouds(), clouds(120, seed=1), loss=watch)
    finetune(model, task, epochs=4, warmup=1, settle=1.5, l2=0.1, weight_decay=0.1, **QUIET)
    fixed = [fixed for fixed, _, _ in seen]
    assert fixed == [False] * 20 + [True] * 12
    held = seen[20][1]
    assert not torch.equal(held, seen[19][1])  # settling begins from the average
    assert all(torch.equal(log_alpha, held) for _, log_alpha, _ in seen[20:])
    assert torch.equal(l0prune.gates(model).log_alpha, held)
    assert not torch.equal(seen[20][2], seen[31][2])


def test_norms_have_the_statistics_of_the_final_model():
    model = gated()
    finetune(model, data(), epochs=3, recalibrate=100, **QUIET)
    model.eval()
    with torch.no_grad():
        inputs = [model[0](part) for part, _ in order(2)]
    mean = torch.stack([part.mean(0) for part in inputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean, rtol=1e-4, atol=1e-5)


def test_everything_around_the_model_is_as_it_was():
    model = gated(dropout=0.5).eval()
    model[0].train()
    gates = l0prune.gates(model)
    gates.fixed = True
    modes = [module.training for module in model.modules()]
    state, ids = torch.get_rng_state(), [id(p) for p in model.parameters()]
    finetune(model, data(), epochs=1, **QUIET)
    assert modes == [module.training for module in model.modules()]
    assert gates.fixed
    assert torch.equal(state, torch.get_rng_state())
    assert ids == [id(p) for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_stay_and_frozen_gates_too():
    model = network()
    model[0].weight.requires_grad_(False)
    l0prune.gate(model, torch.zeros(2, FEATURES))
    l0prune.gates(model).log_alpha.requires_grad_(False)
    before = tensors(model)
    finetune(model, data(), epochs=2, **QUIET)
    changed = differing(before, tensors(model))
    assert "0.weight" not in changed
    assert "l0prune_gates.log_alpha" not in changed
    assert "4.weight" in changed
    assert not model[0].weight.requires_grad


def test_gates_alone_learn_where_all_weights_are_frozen():
    model = gated()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("log_alpha"))
    weights = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    with pytest.warns(L0pruneWarning, match="all weights of this model are frozen"):
        history = finetune(model, data(), epochs=3, budget="params=0.6", progress=False)
    assert history.last["params"] <= 0.6 * history.last["dense_params"]
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)


def test_a_loss_without_a_gradient_is_refused():
    task = Task(data().train, None, loss=lambda y, t: cross_entropy(y, t).detach())
    with pytest.raises(UsageError, match="no gradient"):
        finetune(gated(), task, epochs=1, progress=False)


def test_the_seed_decides_the_outcome():
    def outcome(seed):
        torch.manual_seed(torch.seed() % 1000)  # whatever was drawn before is of no matter
        model = gated(dropout=0.3)
        finetune(model, data(), epochs=2, seed=seed, **QUIET)
        return tensors(model)

    one = outcome(1)
    assert differing(one, outcome(1)) == []
    assert "l0prune_gates.log_alpha" in differing(one, outcome(2))


def test_clipping_bounds_the_weights_gradient_and_not_the_gates():
    model = gated(norm=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rest = {"warmup": 0, "settle": 0, "ema": 0, "lam": 1.0, "clip": 0.01}
    finetune(
        model, clouds(30), epochs=1, optimizer=torch.optim.SGD, lr=1.0, gate_lr=1.0, **rest, **QUIET
    )
    moved = {name: (p - before[name]).norm() for name, p in model.named_parameters()}
    gates = moved.pop("l0prune_gates.log_alpha")
    assert torch.stack(list(moved.values())).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert gates > 0.1


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
@pytest.mark.one_in(2)
def test_it_learns_in_half_precision(autocast):
    model = gated()
    history = finetune(model, data(), epochs=8, autocast=autocast, **QUIET)
    assert history.last["error"] < 0.15
    assert model[0].weight.dtype == torch.float32
    assert math.isfinite(history.last["train_loss"])


def test_inputs_loss_and_metric_may_be_anything():
    class Distance(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, one, other):
            return {"distance": (self.embed(one) - self.embed(other)).squeeze(1)}

    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(2, 90, FEATURES, generator=generator)
    wanted = pairs[0, :, 0] - pairs[1, :, 0]
    batches = [((*pairs[:, k : k + 30],), wanted[k : k + 30]) for k in range(0, 90, 30)]

    def squares(outputs, targets):
        return (outputs["distance"] - targets).square().mean()

    torch.manual_seed(0)
    model = l0prune.gate(Distance(), tuple(pairs[:, :2]))
    task = Task(batches, batches, loss=squares, metric=squares, metric_name="mse")
    history = finetune(model, task, epochs=30, lr=1e-2, lam=0, progress=False)
    assert history.last["mse"] < 0.2 * history.records[0]["mse"]
    assert history.last["mse"] == pytest.approx(history.last["test_loss"])


def test_what_does_not_fit_is_said_before_training():
    model = gated()
    before = tensors(model)
    wide = Data("wide", *2 * [clouds()], CLASSES + 1)
    with pytest.raises(DataError, match="4 classes, but the model has 3 outputs"):
        finetune(model, wide, **QUIET)
    images = DataLoader(TensorDataset(torch.zeros(8, 3, 4, 4), torch.zeros(8).long()))
    with pytest.raises(DataError, match=r"\(1, 3, 4, 4\) of float32, targets \(1,\) of int64"):
        finetune(model, images, **QUIET)
    beyond = [(torch.zeros(2, FEATURES), torch.tensor([0, 7]))]
    with pytest.raises(DataError, match="7 is out of bounds: class numbers go from 0 to 2"):
        finetune(model, beyond, **QUIET)
    with pytest.raises(UsageError, match="one number"):
        finetune(model, Task(clouds(), loss=lambda outputs, targets: outputs), **QUIET)
    assert differing(before, tensors(model)) == []


def test_fewer_batches_than_announced_are_an_error():
    task = Task(list(clouds().batches(60)), steps=9)
    model = gated()
    before = tensors(model)
    with pytest.raises(DataError, match="4 batches, not 9"):
        finetune(model, task, **QUIET)
    assert differing(before, tensors(model)) == []


def test_gates_where_they_belong():
    with pytest.raises(NotGated):
        finetune(network(), data(), **QUIET)
    with pytest.raises(AlreadyGated):
        train_dense(gated(), data(), **QUIET)
    with pytest.raises(UsageError, match="lam is a setting of gates"):
        train_dense(network(), data(), lam="1/N")
    with pytest.raises(UsageError, match="negative"):
        finetune(gated(), data(), lam="-1/N")


def test_progress_goes_to_stderr_one_line_an_epoch(capsys):
    finetune(gated(), data(), epochs=2, batch_size=30)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line.split() for line in captured.err.splitlines()]
    assert [words[1] for words in lines if words[0] == "epoch"] == ["1/2", "2/2"]
    assert {words[0] for words in lines} <= {"before", "epoch", "doctor:"}


def single(outputs=1):
    """Inputs with the sum of their features as targets, and a gated model for them."""
    torch.manual_seed(0)
    inputs = torch.randn(240, FEATURES)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, outputs))
    l0prune.gate(model, inputs[:2])
    return model, Tensors(inputs, inputs.sum(1, keepdim=True).expand(-1, outputs).contiguous())


def test_what_loss_and_metric_give_is_looked_at_before_training(tmp_path):
    model = gated()
    before = tensors(model)
    out = {"out": tmp_path / "run", **QUIET}
    with pytest.raises(UsageError, match="the metric must give one number"):
        finetune(model, data(), metric=lambda outputs, targets: {"f1": 0.5}, **out)
    with pytest.raises(DataError, match=r"test data, loss and metric do not.*KeyError: 'boxes'"):
        finetune(model, data(), metric=lambda outputs, targets: {}["boxes"], **out)
    with pytest.raises(UsageError, match=r"one number.*it is \(30,\) of float32"):
        finetune(model, data(), loss=lambda outputs, targets: outputs[:, 0], **out)
    rows = [{"input": clouds(30).inputs, "labels": clouds(30).targets, "idx": torch.arange(30)}]
    with pytest.raises(DataError, match="hold idx, which the forward of Sequential does not take"):
        finetune(model, rows, **out)
    with pytest.raises(UsageError, match="there is no loss 'cross_entropy'; did you mean"):
        finetune(model, data(), loss="cross_entropy", **out)
    assert differing(before, tensors(model)) == []
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_a_folder_is_refused_before_it_does_anything(tmp_path):
    model = gated()
    before = tensors(model)
    with claimed(tmp_path), pytest.raises(FileError, match="another run is going on in"):
        finetune(model, data(), out=tmp_path, resume=True, **QUIET)
    assert differing(before, tensors(model)) == []
    finetune(model, data(), out=tmp_path, resume=True, **QUIET)


def test_a_loss_of_train_mode_alone_is_learned_from():
    """As a detector's: a dict of losses in train mode, in eval mode what it finds."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x, targets=None):
            scores = self.body(x)
            if self.training:
                return {"classes": cross_entropy(scores, targets), "size": scores.square().mean()}
            return [{"label": each.argmax()} for each in scores]

    def missed(found, targets):
        labels = torch.stack([each["label"] for each in found])
        return (labels != targets).float().mean()

    batches = [((x, t), t) for x, t in clouds().batches(30)]
    model = l0prune.gate(Detector().eval(), torch.zeros(2, FEATURES))
    history = finetune(model, (batches, batches), metric=missed, epochs=6, lam=0, progress=False)
    assert "test_loss" not in history.last
    assert history.last["missed"] < history.records[0]["missed"]
    assert history.best["missed"] == min(r["missed"] for r in history.records[-2:])


def test_accuracy_is_better_the_larger_it_is():
    history = finetune(gated(), data(), metric="accuracy", epochs=4, **QUIET)
    settled = [r for r in history.records if r["phase"] == "settle"]
    assert history.best["accuracy"] == max(r["accuracy"] for r in settled)
    assert "error" not in history.last


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.one_in(2)
def test_numbers_to_be_predicted_are_not_taken_for_classes(outputs):
    model, examples = single(outputs)
    before = tensors(model)
    with pytest.raises(UsageError, match=r"For numbers give loss='mse'.*loss='bce'"):
        finetune(model, (examples, examples), **QUIET)
    assert differing(before, tensors(model)) == []


def test_a_regression_is_learned_and_reported_by_its_loss(tmp_path, capsys):
    model, examples = single()
    settings = {"epochs": 20, "batch_size": 30, "lr": 1e-2, "lam": 0, "out": tmp_path}
    history = finetune(model, (examples, examples), loss="mse", **settings)
    assert history.last["test_loss"] < 0.2
    assert not {"error", "loss"} & history.last.keys()
    settled = [r["test_loss"] for r in history.records if r["phase"] == "settle"]
    assert history.best["test_loss"] == min(settled)
    told = capsys.readouterr().err
    assert f"test loss {history.last['test_loss']:.4g}" in told
    assert "error" not in told


def test_what_was_measured_before_the_first_step_is_of_the_network_without_its_gates(tmp_path):
    model = gated()
    plain = evaluate(l0prune.ungate(copy.deepcopy(model)), data(), batch_size=30)
    l0prune.gates(model).set_open(torch.zeros(l0prune.gates(model).plan.size, dtype=torch.bool))
    history = finetune(model, data(), epochs=2, out=tmp_path, learn=False, **QUIET)
    first, second = history.records
    assert first["before"] == pytest.approx(plain, rel=1e-6)
    assert first["test_loss"] != pytest.approx(plain["test_loss"], rel=0.01)
    assert "before" not in second
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts == history.all_facts
    assert (facts["steps"], facts["settle"], facts["epochs"]) == (16, 16, 2)
    assert facts["settings"]["lr"] == "0.001"


def test_layers_that_are_wider_while_the_weights_settle_are_said(capsys):
    settings = {"epochs": 6, "batch_size": 30, "settle": 2, "gate_lr": 0.3, "ema": 0}
    model = gated()
    history = l0prune.finetune(
        model, data(), budget="params=0.6", round_to=8, report=False, **settings
    )
    before, after = history.records[3], history.records[4]
    assert (before["phase"], after["phase"]) == ("prune", "settle")
    wider = [
        f"{name} {before['open'][name]} → {count}"
        for name, count in after["open"].items()
        if count > before["open"][name]
    ]
    assert wider
    said = " ".join(capsys.readouterr().err.split())
    why = "the budget leaves room for the likeliest slots"
    assert f"slots open again, as {why}: {wider[0]}" in said
    whole = sum(parameter.numel() for parameter in network().parameters())
    shares = [each["params"] / whole for each in (before, after)]
    assert f"params {shares[0]:.1%} → {shares[1]:.1%}" in said
    l0prune.finetune(gated(), data(), lam=0.0, report=False, **settings)
    assert "open again" not in capsys.readouterr().err


def test_a_stream_of_unknown_length_needs_its_size_for_lambda_and_not_for_a_budget():
    class Stream:
        def __iter__(self):
            return order(0)

    known, unknown = ({"train": data, "steps": 8} for data in (list(order(0)), Stream()))
    settings = {"epochs": 2, "budget": "params=0.5", **QUIET}
    runs = [finetune(gated(), Task(**task), **settings) for task in (known, unknown)]
    assert runs[0].last["params"] == runs[1].last["params"]
    assert runs[0].last["train_loss"] == runs[1].last["train_loss"]
    for wrong in ({}, {"lam": "1/N"}, {"lam": 1e-4, "prior": 0.1}):
        with pytest.raises(UsageError, match=r"Task\(…, size=N\)"):
            finetune(gated(), Task(**unknown), epochs=1, **wrong, **QUIET)
    finetune(gated(), Task(**unknown), epochs=1, lam=1e-4, **QUIET)
