"""Gates start alike, or as far open as a one-shot score says that they matter."""

from contextlib import nullcontext

import pytest
import torch
from processes import in_processes
from small_task import CLASSES, FEATURES, clouds, data, gated, network, tensors
from torch import nn
from torch.distributed import is_available
from torch.utils.data import DataLoader, TensorDataset

import l0prune
from l0prune.errors import DataError, L0pruneWarning, UsageError
from l0prune.gating.kinds.base import gate_of
from l0prune.plan.switches import switches_of
from l0prune.running.batches import Feed
from l0prune.running.processes import ALONE
from l0prune.running.task import Task
from l0prune.training.gate_run import GateRun
from l0prune.training.loop import Loop
from l0prune.training.pruner import Pruner
from l0prune.training.settings import Settings
from l0prune.training.start import init_gates


def leaned(scores, log_alpha):
    """By hand, of hard concrete gates."""
    logs = scores.log()
    return (log_alpha + ((logs - logs.mean()) / logs.std()).clamp(-2, 2)).float()


@pytest.mark.parametrize("how", ["fisher", "magnitude"])
def test_log_alpha_moves_by_the_standardised_logarithm(how):
    model = gated()
    gates, before = l0prune.gates(model), l0prune.gates(model).log_alpha.detach().clone()
    scores = l0prune.score(model, how, data())
    gates.init_from_scores(scores)
    torch.testing.assert_close(gates.log_alpha.detach(), leaned(scores, before))


def test_scores_of_0_are_the_lowest_and_equal_ones_change_nothing():
    gates = l0prune.gates(gated())
    before = gates.log_alpha.detach().clone()
    gates.init_from_scores(torch.ones(len(before)))
    torch.testing.assert_close(gates.log_alpha.detach(), before)
    scores = torch.linspace(1, 2, len(before))
    scores[3] = 0
    gates.init_from_scores(scores)
    torch.testing.assert_close(gates.log_alpha.detach()[3], before[3] - 2)


def test_what_scores_move_are_odds_whatever_the_kind_of_gate():
    kind = gate_of("continuous-sparsification", {"beta": 2.0})
    gates = l0prune.gates(gated(kind))
    before, scores = gates.log_alpha.detach().clone(), torch.linspace(0.1, 3, gates.plan.size)
    gates.init_from_scores(scores)
    expected = before + leaned(scores, torch.zeros(())) / 2
    torch.testing.assert_close(gates.log_alpha.detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scores", [torch.ones(3), -torch.ones(16), torch.full((16,), torch.nan)])
def test_what_is_no_score_moves_nothing(scores):
    gates = l0prune.gates(gated())
    before = gates.log_alpha.detach().clone()
    with pytest.raises(UsageError, match="0 or more"):
        gates.init_from_scores(scores)
    assert torch.equal(gates.log_alpha, before)


def start_of(model, monkeypatch, examples=None, **settings):
    """log α before the first step."""
    seen, run = [], Loop.run

    def watched(loop):
        seen.append(l0prune.gates(model).log_alpha.detach().clone())
        run(loop)

    monkeypatch.setattr(Loop, "run", watched)
    settings = {"epochs": 1, "batch_size": 40, "device": "cpu", **settings}
    l0prune.finetune(model, data() if examples is None else examples, **settings)
    return seen[0]


def test_under_a_budget_gates_start_from_fisher_scores(monkeypatch, capsys):
    model = gated()
    before = l0prune.gates(model).log_alpha.detach().clone()
    scores = l0prune.score(model, "fisher", data(), batches=6, batch_size=40)
    found = start_of(model, monkeypatch, budget="params=0.5", oneshot_fraction=0.0)
    assert "gates as their scores say: fisher of 6 batches" in capsys.readouterr().err
    torch.testing.assert_close(found, leaned(scores, before))


def test_of_own_answers_whose_loss_says_nothing_they_start_from_outputs(monkeypatch, capsys):
    model = gated()
    before = l0prune.gates(model).log_alpha.detach().clone()
    own = l0prune.with_pseudo_labels(data(), network())
    assert l0prune.evaluate(network(), own)["test_loss"] < 1e-12
    scores = l0prune.score(model, "outputs", own, batches=6, batch_size=40)
    auto = l0prune.score(model, "auto", own, batches=6, batch_size=40)
    torch.testing.assert_close(auto, scores)
    found = start_of(model, monkeypatch, own, budget="params=0.5", oneshot_fraction=0.0)
    assert "gates as their scores say: outputs of 6 batches" in capsys.readouterr().err
    torch.testing.assert_close(found, leaned(scores, before))


def test_half_of_the_way_the_scores_go_at_once(monkeypatch, capsys):
    model = gated()
    gates, before = l0prune.gates(model), l0prune.gates(model).log_alpha.detach().clone()
    scores = l0prune.score(model, "fisher", data(), batches=6, batch_size=40)
    found = start_of(model, monkeypatch, budget="params=0.25")
    closed = found < gates.gate.initial(0.01)
    by_score = gated()
    l0prune.fit(by_score, "params=0.5", scores, fill=False)
    assert torch.equal(~closed, l0prune.gates(by_score).open())
    torch.testing.assert_close(found[~closed], leaned(scores, before)[~closed])
    left = l0prune.export(by_score)
    share = left.params / left.params_before
    assert 0.3 < share <= 0.5
    assert f"to the budget: {share:.0%} stay where params=0.25 is asked" in capsys.readouterr().err


def test_what_is_cut_at_once_is_not_trained():
    def work(part):
        history = l0prune.finetune(
            gated(),
            data(),
            budget="macs=0.25",
            epochs=8,
            oneshot_fraction=part,
            progress=False,
            device="cpu",
        )
        assert history.last["budget"]["macs=0.25"]["share"] <= 0.25
        return history.last["training_macs"]

    assert work(0.5) < 0.8 * work(0.0)


def test_no_step_is_of_what_was_cut_at_once(monkeypatch):
    found, advance = [], GateRun.advance

    def watched(pruner):
        found.append(pruner.compaction.share)
        advance(pruner)

    monkeypatch.setattr(GateRun, "advance", watched)
    l0prune.finetune(gated(), data(), budget="macs=0.25", epochs=8, progress=False, device="cpu")
    assert max(found) <= 0.5


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x.relu())
        return self.head(x)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.one_in(2)
def test_branches_start_from_what_the_outputs_do_without_them(only, monkeypatch, capsys):
    settings = {"branches": True, **({"exclude": "*"} if only else {})}
    model = l0prune.gate(Residual(), (clouds().inputs[:2],), **settings)
    gates, looks = l0prune.gates(model), {"batch_size": 8, "batches": 1}
    before, switches = gates.log_alpha.detach().clone(), switches_of(gates.plan)
    scores = l0prune.score(model, "ablation", data(), **looks)
    if not only:
        others = l0prune.score(model, "fisher", data(), batch_size=40, batches=6)
        scores = torch.where(switches, scores, others)
    found = start_of(model, monkeypatch, budget="params=0.7", oneshot_fraction=0.0)
    torch.testing.assert_close(found, leaned(scores, before))
    told = "ablation of 1 batch" if only else "fisher of 6 batches, ablation of 1 batch"
    assert f"gates as their scores say: {told}" in capsys.readouterr().err


def test_branches_are_told_from_a_few_examples_of_each_batch_of_a_loader():
    model = l0prune.gate(Residual(), (clouds().inputs[:2],), branches=True)
    loader = DataLoader(TensorDataset(clouds().inputs, clouds().targets), batch_size=48)
    seen = []
    handle = model.stem.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    found = l0prune.score(model, "ablation", loader, batch_size=8, batches=2)
    handle.remove()
    switches = switches_of(l0prune.gates(model).plan)
    tried = [length for length in seen if length != 48]  # slots are told from whole batches
    assert set(tried) == {8}
    few = [(clouds().inputs[start : start + 8], clouds().targets[:8]) for start in (0, 48)]
    torch.testing.assert_close(
        found[switches], l0prune.score(model, "ablation", few, batch_size=8)[switches]
    )


def chances(monkeypatch, **settings):
    """P(z ≠ 0) of branches after each step, and of which kind each gate is."""
    torch.manual_seed(0)
    only = {"exclude": "*"} if settings.pop("only", False) else {}
    model = l0prune.gate(Residual(), (clouds().inputs[:2],), branches=True, **only)
    gates, seen, advance = l0prune.gates(model), [], GateRun.advance
    switches = switches_of(gates.plan)

    def watched(pruner):
        advance(pruner)
        if pruner.phase != "settle":
            seen.append(gates.open_probability().detach()[switches])

    monkeypatch.setattr(GateRun, "advance", watched)
    settings = {"epochs": 3, "batch_size": 40, "compact": "never", "device": "cpu"} | settings
    l0prune.finetune(model, data(), **settings)
    return torch.stack(seen), model


def stand(p):
    """Of which branches a run has decided."""
    return torch.minimum(p, 1 - p).isclose(torch.tensor(1e-3), rtol=1e-3)


def test_what_is_cut_at_once_decides_the_branches(monkeypatch, capsys):
    seen, model = chances(monkeypatch, budget="params=0.5")
    assert torch.equal(seen, seen[:1].expand_as(seen))
    assert bool(stand(seen).all())
    gone = int((seen[0] < 0.5).sum())
    assert 0 < gone < 3
    assert f", without {gone} branch" in capsys.readouterr().err
    open_ = l0prune.gates(model).open()[switches_of(l0prune.gates(model).plan)]
    assert torch.equal(open_, seen[-1] > 0.5)


@pytest.mark.parametrize(
    "settings", [{"branch_freeze_fraction": 0.7}, {"oneshot_fraction": 0.0}, {"only": True}]
)
@pytest.mark.one_in(3)
def test_branches_learn_on_where_that_is_asked_or_widths_cannot_go_the_rest(settings, monkeypatch):
    seen, model = chances(monkeypatch, budget="params=0.5", **settings)
    assert not stand(seen[0]).all()
    exported = l0prune.export(model)
    assert exported.params <= 0.5 * exported.params_before


@pytest.mark.parametrize("settings", [{"lam": 0.1}, {"budget": "params=0.5", "start": "alike"}])
def test_else_they_start_as_they_are(settings, monkeypatch):
    model = gated()
    before = l0prune.gates(model).log_alpha.detach().clone()
    assert torch.equal(start_of(model, monkeypatch, **settings), before)


def test_gates_that_have_moved_start_where_they_are(monkeypatch):
    model = gated()
    l0prune.finetune(model, data(), budget="params=0.5", epochs=2, progress=False)
    before = l0prune.gates(model).log_alpha.detach().clone()
    assert torch.equal(start_of(model, monkeypatch, budget="params=0.5"), before)


def test_a_loss_that_says_nothing_of_the_gates_is_said(monkeypatch):
    class OwnLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x, wanted=None):
            scores = self.body(x)
            if wanted is None or not self.training:
                return {"logits": scores}
            return {"loss": nn.functional.cross_entropy(scores, wanted), "logits": scores}

    cloud = clouds()
    parts = zip(cloud.inputs.split(40), cloud.targets.split(40), strict=True)
    batches = [{"x": x, "wanted": y} for x, y in parts]
    model = l0prune.gate(OwnLoss(), (cloud.inputs[:2],))
    before = l0prune.gates(model).log_alpha.detach().clone()
    settings = {"budget": "params=0.5", "loss": lambda outputs, targets: outputs.get("loss")}
    nothing = "gates start alike, without scores: in eval mode the model gives no loss"
    with pytest.warns(L0pruneWarning, match=nothing):
        assert torch.equal(start_of(model, monkeypatch, batches, **settings), before)
    pruner = Pruner(l0prune.gate(OwnLoss(), (cloud.inputs[:2],)), steps=6, budget="params=0.5")
    with pytest.warns(L0pruneWarning, match=nothing):
        assert pruner.start_from(batches, loss=settings["loss"]) == ""


@pytest.mark.parametrize("freeze", [False, True])
def test_a_score_that_is_named_and_has_no_effect_is_refused(freeze):
    model = gated()
    l0prune.gates(model).log_alpha.requires_grad_(not freeze)
    settings = {"learn": True, "budget": "params=0.5"} if freeze else {"learn": False}
    for start, expected in (
        ("fisher", pytest.raises(UsageError, match="start='fisher' moves")),
        ("alike", nullcontext()),
    ):
        with expected:
            l0prune.finetune(model, data(), start=start, epochs=1, progress=False, **settings)


def test_an_unknown_score_leaves_the_model_as_it_was():
    model = gated()
    before = tensors(model)
    with pytest.raises(
        UsageError, match=r"start must be one of auto, alike, ablation, bn-scale, .*, not 'best'"
    ):
        l0prune.finetune(model, data(), budget="params=0.5", start="best", progress=False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def residual():
    torch.manual_seed(0)
    return l0prune.gate(Residual(), (clouds().inputs[:2],), branches=True)


BUDGET = {"steps": 6, "budget": "params=0.5"}  # an epoch of 40 examples a step


def test_a_loop_of_ones_own_starts_from_what_finetune_does(monkeypatch):
    expected = start_of(residual(), monkeypatch, budget="params=0.5")
    model = residual()
    pruner = Pruner(model, **BUDGET)
    params = list(pruner.param_groups())
    said = pruner.start_from(data(), batch_size=40, device="cpu")
    gates = l0prune.gates(model)
    assert torch.equal(gates.log_alpha, expected)
    assert "ablation of 1 batch; cut at once, a part of the way to the budget: " in said
    p = gates.open_probability().detach()[switches_of(gates.plan)]
    assert bool(stand(p).all())
    assert [group["name"] for group in params] == ["weights"]
    record = pruner.record()["budget"]["params=0.5"]
    assert record["target"] == pytest.approx(record["share"])  # it falls from what is left


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"steps": 6, "lam": 0.1}, {}), (BUDGET, {"start": "alike"})],
)
@pytest.mark.one_in(2)
def test_in_a_loop_of_ones_own_they_may_stay_as_they_are(settings, asked):
    model = residual()
    pruner = Pruner(model, **settings)
    before = tensors(model)
    assert pruner.start_from(data(), **asked) == ""
    assert all(torch.equal(before[name], value) for name, value in tensors(model).items())


@pytest.mark.parametrize(
    ("given", "settings", "kind", "message"),
    [
        (data(), {"start": "best"}, UsageError, "start must be one of auto, alike"),
        (
            data(),
            {"oneshot_fraction": 2.0},
            UsageError,
            "oneshot_fraction must be a number from 0 to 1, not 2",
        ),
        (data(), {"loss": "sorcery"}, UsageError, "sorcery"),
        (5, {}, DataError, "nothing to train on"),
        ([], {}, DataError, "empty"),
    ],
)
def test_what_a_start_of_ones_own_cannot_be(given, settings, kind, message):
    model = residual()
    pruner = Pruner(model, **BUDGET)
    before = tensors(model)
    with pytest.raises(kind, match=message):
        pruner.start_from(given, **settings)
    assert all(torch.equal(before[name], value) for name, value in tensors(model).items())


def test_a_run_that_has_begun_does_not_start():
    pruner = Pruner(residual(), **BUDGET)
    pruner.advance()
    with pytest.raises(UsageError, match="gates start before the first step"):
        pruner.start_from(data())


def start_of_own(rank):
    """Each process has examples of its own."""
    model = residual()
    Pruner(model, **BUDGET).start_from(clouds(seed=rank), batch_size=40)
    return l0prune.gates(model).log_alpha.detach()


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="torch without torch.distributed")
def test_processes_that_train_together_start_from_the_same(tmp_path):
    first, second = in_processes(start_of_own, folder=tmp_path)
    assert torch.equal(first, second)
    assert torch.equal(first, start_of_own(0))


@pytest.mark.parametrize(("autocast", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float32)])
def test_gradients_of_scores_are_taken_under_autocast_where_they_need_no_scale(autocast, dtype):
    seen = set()

    def watched(outputs, targets):
        if torch.is_grad_enabled():
            seen.add(outputs.dtype)
        return torch.nn.functional.cross_entropy(outputs.float(), targets)

    task = Task.of(data(), watched)
    settings = Settings(start="fisher", autocast=autocast, batch_size=30)
    feed = Feed(task, 30, seed=0, augment=False)
    begun = init_gates(gated(), settings, 100, None, feed, "cpu", ALONE)
    assert begun.said.startswith("start: gates as their scores say: fisher")
    assert seen == {dtype}
