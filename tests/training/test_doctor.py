"""Each complaint is provoked, and a healthy run has none."""

import pytest
import torch
from small_task import FEATURES, data, gated, network

import l0prune
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.training.doctor import _longest_step, closes_below, parted

QUIET = {"progress": False, "batch_size": 30}


def complaints(**settings):
    model = settings.pop("model", None) or gated()
    return l0prune.finetune(model, data(), **{**QUIET, **settings}).complaints


def test_a_healthy_run_has_no_complaints():
    assert complaints(epochs=40, budget="params=0.5") == {}


def test_gates_that_cannot_get_there(capsys):
    l0prune.finetune(gated(), data(), epochs=4, gate_lr=1e-3, batch_size=30)
    text = capsys.readouterr().err
    assert "doctor: no gate can close in this run" in text
    assert "gate_lr=0.001" in text


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.5, 0.9)])
@pytest.mark.parametrize("growth", [1.0, 1.1, 1.5, 1e6])
def test_no_step_of_adam_is_longer_than_the_longest(betas, growth):
    """Gradients that grow give steps that are longer than the rate."""
    at = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([at], lr=1.0, betas=betas, eps=0)
    lengths = []
    for step in range(30):
        before, at.grad = at.detach().clone(), torch.ones_like(at) * growth**step
        optimizer.step()
        lengths.append(float((at.detach() - before).abs()))
        assert max(lengths) <= _longest_step({"betas": betas}, step + 1) * (1 + 1e-9)
    if growth == pytest.approx(betas[1] / betas[0], rel=0.02):
        assert lengths[-1] > 0.99 * _longest_step({"betas": betas}, 30)


def test_gates_that_plain_descent_cannot_move(capsys):
    def plain(groups):
        return torch.optim.SGD(groups)

    l0prune.finetune(gated(), data(), epochs=4, gate_lr=0.1, optimizer=plain, batch_size=30)
    assert "Adam for the gates" in capsys.readouterr().err


def test_gates_that_have_not_moved():
    found = complaints(epochs=10, gate_lr=1e-5)
    assert "hardly moved" in found["stuck"]


@pytest.mark.slow
def test_a_lambda_that_closes_nothing():
    """Of the hidden units alone, since the loss itself closes inputs that are noise."""
    model = l0prune.gate(network(), torch.zeros(2, FEATURES), exclude=["*.in"])
    found = complaints(model=model, epochs=40, lam=0, gate_lr=0.05)
    assert "larger λ" in found["nothing closes"]


def test_a_layer_about_to_die():
    found = complaints(epochs=10, lam=1.0, gate_lr=0.3)
    axis = l0prune.gates(gated()).plan.names[-1]
    assert any(about.startswith("dying: ") for about in found)
    assert any(f"'{axis}': 0" in text for text in found.values())


@pytest.mark.slow
def test_a_task_that_is_overwhelmed():
    model = network()
    l0prune.train_dense(model, data(), epochs=40, lr=1e-2, **QUIET)
    l0prune.gate(model, torch.zeros(2, FEATURES))
    found = complaints(
        model=model, epochs=12, lam=0.5, gate_lr=0.05, settle=0, warmup=6, lr=1e-4, ema=0
    )
    assert "smaller λ" in found["overwhelmed"]


def test_gates_that_have_not_decided():
    model = gated()
    with torch.no_grad():  # P(z ≠ 0) = 0.35 each: expected to be mostly gone, and all open
        l0prune.gates(model).log_alpha.fill_(HardConcrete().initial(0.35))
    found = complaints(model=model, epochs=4, gate_lr=1e-5, lam=0)
    assert "have not decided" in found["undecided"]


def test_each_complaint_is_made_once(capsys):
    l0prune.finetune(gated(), data(), epochs=20, gate_lr=1e-5, batch_size=30)
    assert capsys.readouterr().err.count("hardly moved") == 1


@pytest.mark.parametrize("estimator", ["paper", "median"])
def test_where_a_gate_closes(estimator):
    gate = HardConcrete(estimator=estimator)
    at = closes_below(gate)
    either_side = torch.tensor([at - 1e-3, at + 1e-3])
    assert (gate.estimate(either_side) > 0).tolist() == [False, True]
    assert at == pytest.approx({"paper": -2.398, "median": -1.599}[estimator], abs=1e-3)


def test_what_was_said_before_a_stop_is_not_said_again():
    """What was wrong before the first step is in no record."""
    model = gated()
    pruner = l0prune.Pruner(model, lam=0.1, steps=20, gate_lr=1e-5)
    optimizers = [torch.optim.SGD(pruner.param_groups(lr=0.1))]
    assert pruner.doctor.before(optimizers)
    again = l0prune.Pruner(model, lam=0.1, steps=20, gate_lr=1e-5)
    again.load_state_dict(pruner.state_dict())
    again.doctor.go_on_from([])
    assert not again.doctor.before(optimizers)


def faster(text):
    return any(advice in text for advice in ("larger gate_lr", "larger λ"))


def slower(text):
    return any(advice in text for advice in ("smaller λ", "larger budget"))


@pytest.mark.parametrize("first", [1.0, 3.0])
@pytest.mark.parametrize("moves", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("growth", [0.0, 5.0])
def test_no_advice_takes_back_another(first, moves, growth):
    """Records of any run: gates that move or do not, and a loss that grows or does not."""
    model = gated()
    pruner = l0prune.Pruner(model, lam=0.1, steps=20, settle=0, say=lambda text: None)
    doctor, log_alpha = pruner.doctor, l0prune.gates(model).log_alpha
    texts, start = [], log_alpha.detach().clone()
    for epoch in range(1, 11):
        with torch.no_grad():
            log_alpha.copy_(start - moves * epoch * torch.linspace(0.1, 1, len(start)))
        loss = first + growth * epoch
        record = {"epoch": epoch, "step": 2 * epoch, "phase": "prune", "train_loss": loss}
        texts += doctor.after(record | pruner.record()).values()
    assert not (any(map(faster, texts)) and any(map(slower, texts)))
    assert bool(texts) or moves


@pytest.mark.parametrize("chance", [0.35, 0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("steps", [4, 20])
def test_gates_on_their_way_are_not_said_to_need_a_larger_price(chance, steps):
    """Of one run there is one cause: gates that are slow, or a λ that is too small."""
    model = gated()
    pruner = l0prune.Pruner(model, lam=0.1, steps=steps, settle=0, say=lambda text: None)
    log_alpha, target = l0prune.gates(model).log_alpha, HardConcrete().initial(chance)
    start, found = log_alpha.detach().clone(), {}
    for step in range(1, steps + 1):
        with torch.no_grad():
            log_alpha.copy_(start + (target - start) * min(1.0, 1.5 * step / steps))
        record = {"epoch": step, "step": step, "phase": "prune"} | pruner.record()
        found |= pruner.doctor.after(record)
    assert {"nothing closes", "undecided", "stuck"} & found.keys()
    assert not {"nothing closes", "undecided"} <= found.keys()
    assert ("nothing closes" in found) == (chance == 0.95)
    assert ("stuck" in found) == (chance == 0.99)


def test_a_multiplier_that_runs_away_is_said_with_its_cause():
    model = gated()
    pruner = l0prune.Pruner(model, budget="params=0.3", steps=20, settle=5, say=lambda text: None)
    pruner.budget.multipliers.fill_(1e6)
    pruner.budget.done = 15
    record = {"epoch": 15, "step": 15, "phase": "prune"} | pruner.record()
    found = pruner.doctor.after(record)
    assert "1e+06" in found["runs away"]
    assert "100% is left where 30% is wanted" in found["runs away"]


def _epochs(*losses, **more):
    keys = ("train_loss", "test_loss")
    return [dict(zip(keys, each, strict=True), epoch=n, **more) for n, each in enumerate(losses, 1)]


def test_training_and_test_loss_that_part_are_said_once():
    records = _epochs((0.9, 1.6), (0.5, 1.55), (0.2, 1.9), (0.065, 2.35))
    assert parted(records[:2], augment=False) == {}
    text = parted(records, augment=False)["overfits"]
    assert "since epoch 2 the training loss has fallen from 0.5 to 0.065" in text
    assert "the test loss has risen from 1.55 to 2.35" in text
    assert "augment=True" in text
    assert "augment" not in parted(records, augment=True)["overfits"]
    records[-2]["doctor"] = {"overfits": text}
    assert parted(records, augment=False) == {}


@pytest.mark.parametrize(
    "losses",
    [
        [(0.9, 1.0), (0.3, 0.5)],  # both fall
        [(0.3, 0.4), (0.9, 1.2)],  # both rise, as where gates close
        [(0.3, 0.4), (0.1, 0.45)],  # the test loss hardly rises
        [(0.3, 0.4), (0.29, 0.9)],  # the training loss hardly falls
    ],
)
def test_losses_that_do_not_part(losses):
    assert parted(_epochs(*losses), augment=False) == {}


@pytest.mark.parametrize("has_gates", [False, True])
def test_a_network_that_learns_noise_by_heart_overfits(capsys, has_gates):
    generator = torch.Generator().manual_seed(0)

    def noise():
        inputs = torch.randn(24, FEATURES, generator=generator)
        return [(inputs, torch.randint(0, 2, (24,), generator=generator))]

    quiet = {"epochs": 60, "lr": 3e-2, "ema": 0.0}
    pair = noise(), noise()
    if has_gates:
        history = l0prune.finetune(gated(), pair, budget="params=0.9", **quiet)
    else:
        history = l0prune.train_dense(network(), pair, **quiet)
    assert "overfits" in history.complaints
    assert capsys.readouterr().err.count("the network overfits") == 1
