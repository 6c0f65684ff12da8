"""What goes before the first step goes in the way that leaves the least loss."""

from functools import partial

import pytest
import torch
from small_task import CLASSES, FEATURES, clouds, data
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.recipes.files import FitSection
from l0prune.features.recipes.runs import _fit
from l0prune.gating.attaching import holder
from l0prune.plan.switches import switches_of
from l0prune.running.task import Task
from l0prune.selection.fit import _without_branches, blocks_for, unmet
from l0prune.selection.fitting import Movable
from l0prune.selection.oneshot import OneShot, most_trials
from l0prune.selection.score_input import ScoreInput
from l0prune.training.budget import Budget


class Blocks(nn.Module):
    """Branches of two layers."""

    def __init__(self, norm=False):
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        middle = [nn.BatchNorm1d(12)] if norm else []
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 12), *middle, nn.ReLU(), nn.Linear(12, 16))
            for _ in range(3)
        )

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


def gated(model):
    return l0prune.gate(model, (clouds().inputs[:2],), branches=True)


def subject(model, batches=1):
    return ScoreInput(*holder(model), Task.of(data()), batches, 40, "cpu", 0)


def at_once(model, wanted, scores, part=0.5):
    budget = Budget(model, wanted, steps=10)
    return OneShot(budget.bounds, budget.blocks, scores, part)


def scores_of(model):
    gates = l0prune.gates(model)
    parts = [l0prune.score(model, how, data(), batches=2) for how in ("ablation", "fisher")]
    return torch.where(switches_of(gates.plan), *parts)


def trained(**kwargs):
    torch.manual_seed(0)
    model = Blocks(**kwargs)
    l0prune.train_dense(model, data(), epochs=3, lr=1e-2, progress=False)
    return model


def test_of_all_ways_the_one_of_least_loss_is_taken():
    model = gated(trained())
    scores = scores_of(model)
    half = at_once(model, "params=0.16", scores)
    switches = switches_of(model.l0prune_gates.plan).nonzero().flatten()
    order = switches[scores[switches].argsort()]
    losses, ways = [], []
    for count in range(3):
        start = torch.ones(len(scores), dtype=torch.bool)
        start[order[:count]] = False
        ways.append(half.cut_widths(model.l0prune_gates.plan, start))
        z = ways[-1].to(model.l0prune_gates.log_alpha)
        inputs, targets = next(iter(batches()))
        with model.l0prune_gates.using(z), torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model.eval()(inputs), targets)))
    assert len(set(losses)) == 3
    found, is_settled = half.choose(subject(model))
    assert is_settled
    assert torch.equal(found, ways[losses.index(min(losses))])


def test_no_more_branches_go_than_are_as_small_as_that():
    model = gated(trained())
    half, plan = at_once(model, "params=0.5", scores_of(model)), model.l0prune_gates.plan
    ways = list(half.candidates(plan, torch.ones(plan.size, dtype=torch.bool)))
    shares = [half.wanted[0].actual_share(open_) for open_ in ways]
    switches = switches_of(plan)
    assert [int((~open_)[switches].sum()) for open_ in ways] == [0, 1]
    assert 0.6 < min(shares) <= max(shares) <= 0.5**0.5


def test_a_part_of_the_way_goes_no_further_than_all_of_it(monkeypatch):
    """Where every branch is a large part of the network, the loss has no say in that."""
    model = gated(trained())
    plan = model.l0prune_gates.plan
    half = at_once(model, "params=0.8", torch.ones(plan.size))
    ways = list(half.candidates(plan, torch.ones(plan.size, dtype=torch.bool)))
    shares = [half.wanted[0].actual_share(way) for way in ways]
    assert min(shares) < 0.8

    def smaller_is_better(_, among):
        return torch.tensor([half.wanted[0].actual_share(way) for way in among])

    monkeypatch.setattr(ScoreInput, "losses", smaller_is_better)
    found, _ = half.choose(subject(model))
    assert half.wanted[0].actual_share(found) == min(share for share in shares if share >= 0.8)


def test_a_branch_that_is_gone_already_does_not_come_back():
    model = gated(trained())
    plan, scores = model.l0prune_gates.plan, scores_of(model)
    open_ = torch.ones(plan.size, dtype=torch.bool)
    gone = switches_of(plan).nonzero().flatten()[scores[switches_of(plan)].argmax()]
    open_[gone] = False
    ways = list(at_once(model, "params=0.16", scores).candidates(plan, open_))
    assert len(ways) == 3
    assert not any(way[gone] for way in ways)


def test_without_a_loss_widths_go_alone():
    class NoLoss(Blocks):
        def forward(self, x, y=None):
            logits = super().forward(x)
            return (nn.functional.cross_entropy(logits, y) if self.training else None), logits

    model = gated(NoLoss())
    task = Task.of(
        [(part.inputs, part.targets) for part in [clouds()]], lambda outputs, y: outputs[0]
    )
    half = at_once(model, "params=0.16", torch.rand(model.l0prune_gates.plan.size))
    found, is_settled = half.choose(ScoreInput(*holder(model), task, 1, 40, "cpu", 0))
    assert not is_settled
    assert bool(found[switches_of(model.l0prune_gates.plan)].all())


def test_a_part_of_the_way_to_a_number_of_parameters():
    layers = nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)
    model = l0prune.gate(nn.Sequential(*layers), torch.zeros(2, 3), include=["0"])
    scores = torch.tensor([3.0, 1, 4, 0.5, 5, 9, 2, 6])
    half, plan = at_once(model, "params=0.4", scores), model.l0prune_gates.plan
    dense = 8 * 3 + 8 + 8 * 2 + 2
    left = int((dense * 0.4**0.5 - 2) // 6)  # slots of six parameters, beside two of the last bias
    open_ = half.cut_widths(plan, torch.ones(8, dtype=torch.bool))
    assert torch.equal(open_, scores >= scores.sort()[0][-left])


def test_so_many_ways_at_most():
    assert [most_trials(branches) for branches in (1, 9, 12, 13, 24, 100)] == [2, 10, 13, 7, 13, 12]


def batches():
    source, seed = data().train, torch.Generator().manual_seed(0)
    return source.batches(40, generator=seed, device=torch.device("cpu"), augment=False)


def test_norms_have_the_statistics_of_the_batch_and_gather_none():
    model = gated(trained(norm=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (found,) = subject(model).losses([torch.ones(model.l0prune_gates.plan.size)])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    dense = Blocks(norm=True)
    dense.load_state_dict({name: value for name, value in before.items() if "l0prune" not in name})
    inputs, targets = next(iter(batches()))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(dense.train()(inputs), targets)
    torch.testing.assert_close(found.float(), expected)


def test_fit_lets_as_many_branches_go_as_the_loss_of_some_data_says():
    wanted, model = "params=0.05", gated(trained())
    scores, switches = scores_of(model), switches_of(model.l0prune_gates.plan)
    looked = ScoreInput(*holder(model), Task.of(data()), 8, 128, "cpu", 0)
    left, is_settled = at_once(model, wanted, scores).choose(looked)
    assert is_settled
    assert int((~left)[switches].sum()) == 1
    counts = l0prune.fit(model, wanted, scores, data=data())
    open_ = model.l0prune_gates.open()
    assert torch.equal(open_[switches], left[switches])
    exported = l0prune.export(model)
    assert counts == {wanted: exported.params}
    assert exported.params <= 0.05 * exported.params_before
    by_hand = gated(trained())
    by_hand.l0prune_gates.set_open(left | ~switches)
    l0prune.fit(by_hand, wanted, scores)
    assert torch.equal(open_, by_hand.l0prune_gates.open())


def test_so_it_does_in_a_round_of_a_recipe():
    by_hand, by_recipe = gated(trained()), gated(trained())
    scores = l0prune.score(by_hand, "auto", data(), batches=3)
    l0prune.fit(by_hand, "params=0.05", scores, data=data())
    part = FitSection(budget="params=0.05", score="auto", batches=3)
    _fit(by_recipe, Task.of(data()), part, seed=0)
    open_ = by_recipe.l0prune_gates.open()
    assert torch.equal(open_, by_hand.l0prune_gates.open())
    assert not open_[switches_of(by_recipe.l0prune_gates.plan)].all()


def test_where_branches_alone_have_gates_scores_say_how_many_go():
    model = l0prune.gate(trained(), (clouds().inputs[:2],), branches=True, exclude="*")
    scores = l0prune.score(model, "auto", data())
    _, is_settled = at_once(model, "params=0.5", scores).choose(subject(model))
    assert not is_settled
    l0prune.fit(model, "params=0.5", scores, data=data())
    assert torch.equal(model.l0prune_gates.open(), scores >= scores.max())


@pytest.mark.parametrize(
    "arguments",
    [
        {"budget": "params=0.5"},
        {"scores": torch.ones(61)},
        {"budget": "params=0.5", "scores": torch.ones(61), "kinds": "branch"},
    ],
)
def test_data_is_for_scores_and_a_budget(arguments):
    model = gated(Blocks())
    before = model.l0prune_gates.log_alpha.clone()
    with pytest.raises(UsageError, match="give both and no kinds, or no data"):
        l0prune.fit(model, **arguments, data=data())
    assert torch.equal(model.l0prune_gates.log_alpha, before)


def test_auto_is_the_best_score_of_each_kind_of_axis():
    model = gated(trained())
    switches = switches_of(model.l0prune_gates.plan)
    found = l0prune.score(model, "auto", data(), batches=3, batch_size=40)
    fisher = l0prune.score(model, "fisher", data(), batches=3, batch_size=40)
    ablation = l0prune.score(model, "ablation", data(), batches=3, batch_size=32)
    torch.testing.assert_close(found, torch.where(switches, ablation, fisher))
    widths = l0prune.gate(trained(), (clouds().inputs[:2],), branches=False)
    assert torch.equal(
        l0prune.score(widths, "auto", data()), l0prune.score(widths, "fisher", data())
    )


@pytest.mark.parametrize("batch_size", [1, 40])
@pytest.mark.slow
def test_a_run_starts_so(batch_size, capsys):
    model = gated(trained(norm=batch_size > 1))
    l0prune.finetune(model, data(), budget="macs=0.3", epochs=1, batch_size=batch_size)
    assert "a part of the way to the budget: 5" in capsys.readouterr().err
    exported = l0prune.export(model)
    assert exported.macs <= 0.3 * exported.macs_before


def test_where_widths_alone_cannot_meet_a_budget_branches_go_for_the_rest():
    example = (clouds().inputs[:2],)
    few = l0prune.gate(Blocks(), example, branches=True, include=["branches.0.0*"])
    scores = l0prune.score(few, "auto", data(), batches=2)
    with pytest.raises(UsageError, match="cannot be met"):
        l0prune.fit(few, "params=0.3", scores)
    ((_, amount),) = l0prune.fit(few, "params=0.3", scores, data=data()).items()
    assert amount <= 0.3 * sum(p.numel() for p in Blocks().parameters())


def test_branches_stay_where_widths_alone_meet_a_budget_in_smaller_blocks():
    model = gated(Blocks())
    plan = l0prune.gates(model).plan
    task = Task.of([(clouds().inputs, clouds().targets)], lambda outputs, y: None)
    budget = Budget(model, "params=0.5", steps=10)
    coarse = OneShot(budget.bounds, [12] * len(plan.axes), torch.rand(plan.size))
    open_ = l0prune.gates(model).open().cpu()
    widths = Movable.of(~switches_of(plan), open_)
    blocks = partial(blocks_for, plan, budget.bounds, 1, None)
    assert unmet(plan, budget.bounds, coarse.blocks, widths) is not None
    assert unmet(plan, budget.bounds, blocks(widths), widths) is None
    start, movable = _without_branches(model, coarse, task, widths, blocks)
    assert movable is widths
    assert torch.equal(start, open_)
