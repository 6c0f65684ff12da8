"""The plan as data: what stays after closing, selection, JSON."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from l0prune.plan.layout import Const, Gated, Prod, Slots
from l0prune.plan.plan import Axis, Cost, Pin, Plan, Site


def lenet_head() -> Plan:
    """Two maps of three positions, flattened into a Linear of four neurons, read by another."""
    maps, fine, hidden = Slots(0, 0, 2), Slots(1, 0, 6), Slots(2, 0, 4)
    columns = Gated(Prod((maps, Const(3))), fine)
    return Plan(
        axes=(
            Axis("conv", "channel", 2, 0, 9),
            Axis("fc1.in", "input", 6, 2, 4),
            Axis("fc1", "neuron", 4, 8, 5),
        ),
        pins=(Pin("fc2.weight dim 0", "it feeds the model's output"),),
        tensors={
            "conv.weight": (maps, Const(1), Const(3), Const(3)),
            "fc1.weight": (hidden, columns),
            "fc2.weight": (Const(5), hidden),
        },
        sites=(
            Site("fc1.weight", 1, columns, "read"),
            Site("fc2.weight", 1, hidden, "read"),
        ),
        costs=(Cost("fc1", "params", 1.0, (hidden, columns)),),
    )


def bits(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text.replace(" ", "")])


WRITTEN = Site("conv.weight", 0, Slots(0, 0, 2), "write")


@pytest.mark.parametrize(
    ("more", "open_", "kept"),
    [
        # an open map that nobody reads
        ((), "11 111000 1010", "10 111000 1010"),
        # its gates act where it is written, too: a mean or a norm may read it
        ((WRITTEN,), "11 111000 1010", "11 111000 1010"),
        # a dead axis keeps one slot
        ((), "11 111111 0000", "11 111111 1000"),
    ],
)
def test_what_is_kept(more, open_, kept):
    plan = lenet_head()
    plan = replace(plan, sites=(*plan.sites, *more))
    assert plan.kept(bits(open_)).tolist() == bits(kept).tolist()


def test_fine_columns_of_a_closed_map_do_not_count_as_alive():
    plan = lenet_head()
    mask = plan.mask(plan.tensors["fc1.weight"][1], bits("10 111111 1111"))
    assert mask.tolist() == bits("111000").tolist()


def test_selection_makes_the_rest_constant():
    plan = lenet_head().select(["fc1"])
    assert [axis.name for axis in plan.axes] == ["fc1"]
    assert plan.axes[0].start == 0
    assert plan.tensors["fc1.weight"] == (Slots(0, 0, 4), Prod((Const(2), Const(3))))
    assert [site.tensor for site in plan.sites] == ["fc2.weight"]


def test_selection_without_fine_gates_keeps_the_map():
    plan = lenet_head()
    plan = plan.select([name for name in plan.names if not name.endswith(".in")])
    assert plan.tensors["fc1.weight"][1] == Prod((Slots(0, 0, 2), Const(3)))


def test_copies_of_a_model_share_its_plan():
    plan = lenet_head()
    assert copy.deepcopy(plan) is plan


def test_json_reads_back():
    plan = lenet_head()
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["", "[]", '{"axes": 3}', "{}"])
def test_other_text_is_no_plan(text):
    with pytest.raises(ValueError, match="no plan"):
        Plan.from_json(text)


def test_an_axis_that_has_to_stay_wider_keeps_closed_slots():
    wide, narrow = Slots(0, 0, 6), Slots(1, 0, 4)
    plan = Plan(
        axes=(Axis("cells", "neuron", 6, 0, 1), Axis("outputs", "neuron", 4, 6, 1)),
        pins=(),
        tensors={},
        sites=(),
        costs=(),
        wider=((wide, narrow),),
    )
    assert torch.equal(plan.kept(bits("000001 0110")), bits("110001 0110"))
    assert torch.equal(plan.kept(bits("001111 0110")), bits("001111 0110"))
    assert torch.equal(plan.kept(bits("000000 1111")), bits("111110 1111"))
    assert Plan.from_json(plan.to_json()) == plan
    alone = plan.select(["cells"])
    assert alone.wider == ((wide, Const(4)),)
    assert torch.equal(alone.kept(bits("000001")), bits("111101"))
