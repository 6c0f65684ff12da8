"""What goes before the first step goes in the way that leaves the least loss."""

import pytest
import torch
from small_task import CLASSES, FEATURES, clouds, data
from torch import nn

import l0prune
from l0prune.gating.attaching import holder
from l0prune.objective.budget import Budget
from l0prune.plan.switches import switches_of
from l0prune.running.task import Task
from l0prune.selection.subject import Subject
from l0prune.training import at_once


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
    return Subject(*holder(model), Task.of(data()), batches, 40, "cpu", 0)


def scores_of(model):
    gates = l0prune.gates(model)
    parts = [l0prune.score(model, how, data(), batches=2) for how in ("removal", "fisher")]
    return torch.where(switches_of(gates.plan), *parts)


def trained(**kwargs):
    torch.manual_seed(0)
    model = Blocks(**kwargs)
    l0prune.train_dense(model, data(), epochs=3, lr=1e-2, progress=False)
    return model


def test_of_all_ways_the_one_of_least_loss_is_taken():
    model = gated(trained())
    scores, budget = scores_of(model), Budget(model, "params=0.16", steps=10)
    switches = switches_of(model.l0prune_gates.plan).nonzero().flatten()
    order = switches[scores[switches].argsort()]
    losses, ways = [], []
    for count in range(3):
        start = torch.ones(len(scores), dtype=torch.bool)
        start[order[:count]] = False
        ways.append(budget.after(0.5, scores, start))
        z = ways[-1].to(model.l0prune_gates.log_alpha)
        inputs, targets = next(iter(batches()))
        with model.l0prune_gates.using(z), torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model.eval()(inputs), targets)))
    assert len(set(losses)) == 3
    found = at_once.left(subject(model), budget, 0.5, scores)
    assert torch.equal(found, ways[losses.index(min(losses))])


def test_no_more_branches_go_than_are_as_small_as_that():
    model = gated(trained())
    budget = Budget(model, "params=0.5", steps=10)
    ways = list(at_once._ways(subject(model), budget, 0.5, scores_of(model)))
    shares = [budget.shares(open_)["params=0.5"] for open_ in ways]
    switches = switches_of(model.l0prune_gates.plan)
    assert [int((~open_)[switches].sum()) for open_ in ways] == [0, 1]
    assert 0.6 < min(shares) <= max(shares) <= 0.5**0.5


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


@pytest.mark.parametrize("batch_size", [1, 40])
def test_a_run_starts_so(batch_size, capsys):
    model = gated(trained(norm=batch_size > 1))
    l0prune.finetune(model, data(), budget="macs=0.3", epochs=1, batch_size=batch_size)
    assert "cut at once: macs=0.3: 5" in capsys.readouterr().err
    exported = l0prune.export(model)
    assert exported.macs <= 0.3 * exported.macs_before
