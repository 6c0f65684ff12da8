"""One share of every layer's width, in choices at once, in training and in exports."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from plans import plan_of
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.files.plan_check import check_plan
from l0prune.plan.divisor import Divisor
from l0prune.plan.plan import Plan
from l0prune.selection.fitting import in_order


class Stack(nn.Module):
    """Blocks of one size behind a stem, with a grouped convolution and a wide head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 24, 1), nn.ReLU(), nn.Conv2d(24, 16, 1)) for _ in range(3)
        )
        self.grouped = nn.Conv2d(16, 24, 3, groups=8, padding=1)
        self.head = nn.Sequential(nn.Conv2d(24, 40, 1), nn.ReLU(), nn.Conv2d(40, 4, 1))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.grouped(x)).mean((2, 3))


X = torch.randn(2, 3, 4, 4)


def gated(**options):
    torch.manual_seed(0)
    return l0prune.gate(Stack().eval(), X, uniform=True, **options)


def widths(model):
    return {a.name: (int(a.open.sum()), a.open.numel()) for a in l0prune.gates(model).axes}


@pytest.mark.parametrize("budget", ["macs=0.5", "params=0.3", "width=0.25", "macs=0.9"])
@pytest.mark.one_in(4)
def test_all_layers_keep_one_share_of_their_slots(budget):
    model = gated(branches=False)
    counts = l0prune.fit(model, budget, l0prune.score(model, "magnitude"))
    found = widths(model)
    shares = [left / size for left, size in found.values()]
    assert max(shares) - min(shares) <= 1 / min(size for _, size in found.values())
    assert len({found[f"blocks.{n}.0"] for n in range(3)}) == 1
    bounds = l0prune.Budget(model, budget, steps=1).bounds
    assert all(0.93 * b.most < counts[str(b.limit)] <= b.most for b in bounds)


def test_of_groups_and_their_channels_the_groups_are_cut():
    names = {"stem.groups", "head.0", *(f"blocks.{n}.0" for n in range(3))}
    assert set(widths(gated(branches=False))) == names
    for given in (["stem*", "head.0"], ["stem", "head.0"]):
        first = {"stem.groups"} if "stem*" in given else {"stem"}
        assert set(widths(gated(branches=False, include=given))) == {"head.0"} | first


def test_the_slots_of_highest_score_stay():
    model = gated(branches=False)
    plan = l0prune.gates(model).plan
    scores = torch.rand(plan.size) * torch.rand(plan.size)
    l0prune.fit(model, "macs=0.5", scores)
    for axis in l0prune.gates(model).axes:
        best = scores[axis.slice].topk(int(axis.open.sum())).indices
        assert axis.open[best].all()


def test_gates_that_disagree_are_exported_at_one_width():
    """As many slots as the widest has: those that its gates closed are there, and zero."""
    model = gated(branches=False)
    gates = l0prune.gates(model)
    for number, slots in enumerate(([0], [1, 2, 3], [4, 5])):
        gates.set_open(f"blocks.{number}.0", slots)
    small = l0prune.export(model)
    assert [small.widths[f"blocks.{n}.0"][0] for n in range(3)] == [3, 3, 3]
    assert small.module.blocks[0][0].weight.shape[0] == 3


def test_training_ends_with_one_share_and_the_file_keeps_it(tmp_path):
    model = gated(branches=False)
    data = [(torch.randn(8, 3, 4, 4), torch.randint(0, 4, (8,))) for _ in range(4)]
    l0prune.finetune(model, data, budget="macs=0.5", epochs=2, seed=1)
    found = widths(model)
    assert len({found[f"blocks.{n}.0"] for n in range(3)}) == 1
    l0prune.save(model, tmp_path / "model.pt")
    loaded = l0prune.load(tmp_path / "model.pt", Stack())
    assert l0prune.gates(loaded).plan.together == l0prune.gates(model).plan.together
    assert Plan.from_json(l0prune.gates(model).plan.to_json()).groups


def test_widths_that_are_not_allowed_are_rounded_up():
    plan = replace(plan_of([8, 8, 5], ()), together=(("a0", "a1"),), allowed={"a0": (2, 6, 8)})
    open_ = torch.zeros(21, dtype=torch.bool)
    open_[[0, 3, 4, 8, 16]] = True  # three of a0, one of a1, one of a2
    counts = [int(of.sum()) for of in Plan.from_json(plan.to_json()).kept(open_).split([8, 8, 5])]
    assert counts == [6, 6, 1]
    for wrong in ([1], {"a0": ["x"]}, {"a0": [-1]}, {"a0": [1.5]}):
        text = json.dumps(json.loads(plan.to_json()) | {"allowed": wrong})
        with pytest.raises(ValueError):
            check_plan(Plan.from_json(text), nn.Linear(1, 1))


def test_a_width_may_have_to_divide_that_of_another_axis():
    """2·a0 divides a1: with a1 at 6 of 8, and a1 whole where it has no gates."""
    rule = Divisor("a0", 2, "a1", 1, 8)
    plan = replace(plan_of([4, 8], ()), allowed={"a0": (1, 2, 3, 4)}, divisors=(rule,))
    open_ = torch.ones(12, dtype=torch.bool)
    open_[[1, 2, 10, 11]] = False
    counts = [int(of.sum()) for of in Plan.from_json(plan.to_json()).kept(open_).split([4, 8])]
    assert counts == [3, 6]
    open_[10:] = True
    assert int(plan.kept(open_)[:4].sum()) == 2
    assert int(plan.select(["a0"]).kept(torch.tensor([True, True, True, False])).sum()) == 4
    for wrong in ([["a0"]], [{**asdict(rule), "each": 0}], [{**asdict(rule), "other": "\n"}]):
        text = json.dumps(json.loads(plan.to_json()) | {"divisors": wrong})
        with pytest.raises(ValueError):
            check_plan(Plan.from_json(text), nn.Linear(1, 1))


def test_a_width_of_one_block_alone_contradicts_it():
    model = gated(branches=False)
    with pytest.raises(UsageError, match=r"blocks.1.0 keeps 24 of 24 .* as many as blocks.0.0"):
        l0prune.fit(model, "blocks.1.0: width=0.5", l0prune.score(model, "magnitude"))


def test_whole_blocks_may_go_beside():
    model = gated()
    gates = l0prune.gates(model)
    gates.set_open("blocks.1", [])
    small = l0prune.export(model)
    assert small.gone == ("blocks.1",)
    assert small.widths["blocks.0.0"] == (24, 24)


def test_axes_of_one_group_are_ordered_by_rank_and_others_by_score():
    """Worth of a rank: the mean over the axes. Ranks of 2 in 4: the halves."""
    plan = plan_of([2, 4, 2], ())
    tied = replace(plan, together=(("a0", "a1"),))
    scores = torch.tensor([3.0, 1.0, 8.0, 2.0, 6.0, 4.0, 2.0, 9.0], dtype=torch.float64)
    # at shares 1/8, 1/4, 3/8, 5/8, 3/4, 7/8: (1+2)/2, (1+4)/2, (1+4)/2, (3+6)/2, (3+8)/2, …
    order = in_order(tied, scores)[0].tolist()
    assert [slot for slot in order if slot < 6] == [3, 1, 5, 4, 0, 2]
    assert order.index(7) == 7
    assert in_order(plan, scores)[0].tolist() == scores.argsort(stable=True).tolist()
