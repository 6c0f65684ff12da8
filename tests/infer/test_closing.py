"""Axes that may close completely, and the branch that is gone then."""

import pytest
import torch
from deadness import close_some, randomise
from differences import difference, graph_difference
from torch import nn

import l0prune

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double()


class Stream(nn.Module):
    """A branch whose last layer has a bias or not, and one that is put beside the stream."""

    def __init__(self, bias: bool):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(11, 4)
        self.up, self.down = nn.Linear(8, 5), nn.Linear(5, 8, bias=bias)
        self.beside = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(torch.cat([x, self.beside(x)], 1))


def gated(bias=False, **kwargs):
    torch.manual_seed(0)
    model = randomise(Stream(bias).double())
    return l0prune.gate(model, (X,), **{"branches": True, **kwargs})


def without(model, name):
    """Every gate is open, some in part, but for those of this axis."""
    bank = l0prune.gates(close_some(model, closed=0.0))
    (axis,) = (axis for axis in bank.axes if axis.name == name)
    with torch.no_grad():
        bank.log_alpha[axis.slice] = -5.0
    return model


def closing(model):
    plan = l0prune.gates(model).plan
    return {plan.axes[a].name: plan.axes[b].name for a, b in plan.closing.items()}


@pytest.mark.slow
def test_what_may_close_is_all_that_a_branch_gives_and_for_it_alone():
    assert closing(gated()) == {"up": "down", "beside": "beside.branch"}
    # a bias is added without any input, too; the stream and the head's inputs are others' as well
    assert closing(gated(bias=True)) == {"beside": "beside.branch"}


@pytest.mark.slow
def test_the_survey_names_them():
    found = l0prune.survey(randomise(Stream(False).double()), X)
    assert found.to_dict()["closing"] == closing(gated())
    assert "2 axes may close completely, and a branch with each" in " ".join(str(found).split())
    assert "close completely" not in str(l0prune.survey(nn.Sequential(nn.Linear(6, 4).double()), X))


def test_a_run_does_not_warn_of_them_and_counts_nothing_of_the_branch():
    model = without(gated(), "up")
    pruner = l0prune.Pruner(model, steps=10, lam=0.0)
    record = pruner.record()
    assert record["dead"] == []
    assert record["open"]["down"] == 0
    whole = sum(p.numel() for p in Stream(False).parameters())
    assert record["params"] == whole - 8 * 5 - 5 - 5 * 8
    said = pruner.doctor.after({"step": 1, "epoch": 1, "phase": "prune"} | record)
    assert not [name for name in said if name.startswith("dying")]


def test_without_a_switch_one_slot_stays():
    model = gated(branches=False)
    assert closing(model) == {}
    (up,) = (axis for axis in l0prune.gates(without(model, "up")).axes if axis.name == "up")
    assert int(up.open.sum()) == 1


@pytest.mark.parametrize("axis", ["up", "beside"])
@pytest.mark.one_in(2)
def test_what_is_left_is_exact_without_the_branch(axis):
    model = without(gated(), axis)
    small = l0prune.export(model)
    gone = {"up": "down", "beside": "beside.branch"}[axis]
    assert small.gone == (gone,)
    assert not any(axis in n for n, p in small.module.named_parameters() if p.numel())
    assert difference(model, small, X) <= 1e-10
    assert graph_difference(model, small, X) <= 1e-10
    assert small.params == sum(p.numel() for p in small.module.parameters())


@pytest.mark.slow
def test_fit_closes_the_last_slot_of_what_matters_least():
    model = gated()
    plan = l0prune.gates(model).plan
    scores = torch.ones(plan.size)
    (up,) = (axis for axis in plan.axes if axis.name == "up")
    scores[up.slice] = 0.1
    l0prune.fit(model, "params=0.6", scores, kinds=("branch", "neuron"))
    assert l0prune.export(model).gone == ("down",)
    assert not l0prune.gates(model).open()[up.slice].any()


def test_fit_of_the_widths_alone_takes_no_branch():
    model = gated()
    plan = l0prune.gates(model).plan
    (up,) = (axis for axis in plan.axes if axis.name == "up")
    scores = torch.ones(plan.size)
    scores[up.slice] = 0.1
    l0prune.fit(model, "params=0.6", scores, kinds="neuron", fill=False)
    assert l0prune.export(model).gone == ()
    assert int(l0prune.gates(model).open()[up.slice].sum()) == 1
