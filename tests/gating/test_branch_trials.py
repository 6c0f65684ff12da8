"""Branches are tried before training: one that cannot go has no gate, and a reason."""

from __future__ import annotations

import pytest
import torch
from networks import Fn
from torch import nn
from with_branches import Dense, Net, X, branches_of, randomised

import l0prune
from l0prune.errors import UsageError
from l0prune.gating import branch_trials
from l0prune.gating.branch_trials import REFUSED
from l0prune.infer.rewrites import resized
from l0prune.infer.rewrites.literals import REWRITES

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("L0PRUNE_STRICT")


@pytest.fixture
def broken(monkeypatch):
    """Break the pass that leaves branches out: ``how(graph, gone)`` says which are left in."""

    def install(how):
        sound = resized.leave_out

        def leave_out(graph, branches, gone):
            stays = how(graph, gone)
            return sound(graph, branches, [name for name in gone if name not in stays])

        monkeypatch.setattr(resized, "leave_out", leave_out)

    return install


def raises_at_the_convolution(name):
    def how(graph, gone):
        for node in graph.nodes:
            path = str(node.meta.get("nn_module_stack"))
            if name in gone and "conv2d" in node.name and f"{name}.conv2" in path:
                raise ValueError("no such dim\nand more")
        return ()

    return how


def leaves_in(*names):
    return lambda graph, gone: names if {*names} <= {*gone} else ()


def refused(survey):
    return {p.where.removeprefix(REFUSED): p for p in survey.pins if p.where.startswith(REFUSED)}


def offered(survey):
    return [branch.name for branch in survey.branches]


def test_a_branch_whose_trial_fails_is_a_pin_with_operator_and_line(lenient, broken):
    broken(raises_at_the_convolution("blocks.1"))
    survey = l0prune.survey(randomised(Net()), X, own_class=False)
    assert offered(survey) == ["blocks.0", "blocks.2"]
    (pin,) = refused(survey).values()
    assert pin.where == "branch blocks.1"
    assert pin.operator == "aten.conv2d"
    assert pin.source.startswith("with_branches.py:")
    assert f"failed at operator aten.conv2d at {pin.source} when that was tried" in pin.reason
    assert "(ValueError: no such dim); please report this" in pin.reason
    assert "branch blocks.1: it has no gate of its own" in " ".join(str(survey).split())


def test_a_branch_that_is_left_in_the_graph_has_no_gate(lenient, broken):
    broken(leaves_in("blocks.1"))
    model = l0prune.gate(randomised(Net()), X)
    assert branches_of(model) == ["blocks.0", "blocks.2"]
    (pin,) = refused(l0prune.survey(randomised(Net()), X, own_class=False)).values()
    assert "_WrongGraph: blocks.1.conv1.weight is left, which the plan counts as gone" in pin.reason
    with pytest.raises(UsageError, match=r"blocks\.1"):
        l0prune.gate(randomised(Net()), X, branches="blocks.1")


@pytest.mark.parametrize("make", [raises_at_the_convolution, leaves_in])
def test_it_is_raised_where_that_is_asked_for(make, broken):
    broken(make("blocks.1"))
    with pytest.raises(Exception, match=r"no such dim|blocks\.1\.conv1\.weight is left"):
        l0prune.gate(randomised(Net()), X)


def test_branches_that_fail_together_are_not_offered_together(lenient, broken):
    broken(leaves_in("blocks.0", "blocks.2"))
    survey = l0prune.survey(randomised(Net()), X, own_class=False)
    assert offered(survey) == ["blocks.0", "blocks.1"]
    assert (
        "leaving it out together with blocks.0, blocks.1 failed at"
        in refused(survey)["blocks.2"].reason
    )


class Flattened(nn.Module):
    """Two paths side by side, which are reshaped before a Linear reads them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.a, self.b = nn.Conv2d(4, 5, 1), nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(11, 3)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat((self.a(x), self.b(x).relu()), 1)
        return self.head(x.view(2, 11, 64).mean(2))


def test_a_size_that_stays_in_the_graph_is_found(lenient, monkeypatch):
    sound = l0prune.survey(randomised(Flattened()), X, own_class=False)
    assert offered(sound)
    monkeypatch.delitem(REWRITES, "aten.view")
    survey = l0prune.survey(randomised(Flattened()), X, own_class=False)
    assert offered(survey) == []
    assert {pin.operator for pin in refused(survey).values()} == {"aten.view"}


class InParts(nn.Module):
    """What torch.export cannot follow as a whole: the body is a part of it."""

    def __init__(self):
        super().__init__()
        self.body = Net()

    def forward(self, x):
        y = self.body(x)
        return y if y.sum() > -1e9 else -y


def test_branches_of_a_part_are_tried(lenient, broken):
    broken(leaves_in("body.blocks.1"))
    survey = l0prune.survey(randomised(InParts()), X, own_class=False)
    assert offered(survey) == ["body.blocks.0", "body.blocks.2"]
    assert [*refused(survey)] == ["body.blocks.1"]


@pytest.mark.parametrize(("network", "trials"), [(Net, 4), (Dense, 5)])
def test_sound_branches_are_all_offered(network, trials, monkeypatch):
    tried = []
    try_ = branch_trials.Trials._try
    monkeypatch.setattr(
        branch_trials.Trials,
        "_try",
        lambda self, is_open, gone: (tried.append(gone), try_(self, is_open, gone)),
    )
    survey = l0prune.survey(randomised(network()), X, own_class=False)
    assert refused(survey) == {}
    *tried, of_axes = tried
    assert of_axes == ()
    assert tried[-1] == max(tried, key=len)
    assert {name for gone in tried for name in gone} == set(offered(survey))
    assert len(tried) <= trials


def test_branches_that_are_built_alike_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(branch_trials.Trials, "_try", lambda self, _, gone: tried.append(gone))

    def forward(m, x):
        for number in range(6):
            a, b = getattr(m, f"a{number}"), getattr(m, f"b{number}")
            x = x + (b(a(x).relu()) if number != 2 else b(a(x).tanh()))
        return x

    layers = {f"{name}{number}": nn.Linear(6, 6) for number in range(6) for name in "ab"}
    survey = l0prune.survey(Fn(forward, **layers).eval(), torch.randn(2, 6), own_class=False)
    names = offered(survey)
    assert len(names) == 6
    # of the last one nobody adds to the result
    assert tried == [[names[4]], [names[2]], [names[5]], names, ()]  # the last one is of the axes


def test_an_input_may_have_the_name_of_a_builtin():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), Residual(), nn.Conv2d(6, 3, 1))  # forward(input)
    survey = l0prune.survey(model, (torch.randn(2, 3, 4, 4),))
    assert len(survey.branches) == 1
    assert not refused(survey)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return x + self.inner(torch.relu(x))


def test_inputs_that_are_no_tensors_stay_what_they_are():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x, n, mask=None):
            x = self.a(x) * n
            x = x + self.b(torch.relu(x))
            return self.c(x if mask is None else x * mask)

    survey = l0prune.survey(Scaled(), (torch.randn(2, 6), 3, None))
    assert [branch.name for branch in survey.branches] == ["b"]
    assert not refused(survey)


def test_branches_before_tokens_that_data_choose_may_go():
    """The same mask chooses twice: equally many, which no shape of the graph says."""

    def forward(m, x):
        y, mask = m.a(x), x[..., 0] > 0
        y = y + m.c(m.b(y).relu())
        rows = torch.arange(x.shape[0])[:, None].expand(mask.shape)[mask]
        return m.d(torch.zeros_like(y[:, 0]).index_add(0, rows, y[mask] * 2))

    layers = {
        "a": nn.Linear(4, 8),
        "b": nn.Linear(8, 6),
        "c": nn.Linear(6, 8),
        "d": nn.Linear(8, 3),
    }
    torch.manual_seed(0)
    model, given = Fn(forward, **layers).eval(), torch.randn(2, 5, 4)
    bank = l0prune.gates(l0prune.gate(model, (given,)))
    assert "c" in bank.plan.names
    bank.set_open("c", [])
    small = l0prune.export(model)
    assert small.gone == ("c",)
    for chosen in (torch.randn(3, 5, 4), -torch.rand(3, 5, 4)):  # some tokens; none
        torch.testing.assert_close(small.module(chosen), model(chosen))
