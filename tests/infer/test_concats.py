"""Which parts of a concatenation are branches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l0prune.infer.parts import inferred

X = torch.randn(2, 4, 6, 6)


class Side(nn.Module):
    """A stem, layers whose results are put side by side somehow, and a head."""

    def __init__(self, join, reads, **layers):
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(reads, 2, 1)
        self.block = nn.ModuleDict(layers)
        self.join = join

    def forward(self, x):
        return self.head(self.join(self.stem(x), **self.block))


def conv(inputs=4, outputs=4):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def found(model):
    """Of each branch: its name, the axes that it is made of, and the parameters only it has."""
    plan = inferred(model.eval(), (X,), None).plan
    return [(branch.name, branch.axes, branch.size) for branch in plan.branches]


def names(join, reads=12, **layers):
    return [name for name, *_ in found(Side(join, reads, **layers))]


def cat(*parts):
    return torch.cat(parts, 1)


def test_all_but_the_one_with_least_work():
    model = Side(
        lambda x, a, b, c: cat(a(x).relu(), b(x), c(x)), 14,
        a=conv(4, 6), b=nn.Conv2d(4, 4, 1), c=conv(),
    )  # fmt: skip
    assert found(model) == [
        ("block.a.branch", ("block.a",), 6 * 4 * 9 + 6),
        ("block.c.branch", ("block.c",), 4 * 4 * 9 + 4),
    ]


def test_a_path_of_several_layers_goes_as_a_whole():
    model = Side(
        lambda x, a, b, c: cat(b(a(x).relu()), c(x)), 10,
        a=conv(4, 6), b=conv(6, 6), c=nn.Conv2d(4, 4, 1),
    )  # fmt: skip
    assert found(model) == [("block", ("block.b",), 6 * 4 * 9 + 6 + 6 * 6 * 9 + 6)]


def test_what_is_read_again_and_again_beside_others():
    """As in a DenseNet: each layer reads the stem and all layers before it."""

    def join(x, a, b, c):
        parts = [x]
        for layer in (a, b, c):
            parts.append(layer(cat(*parts)))
        return cat(*parts)

    model = Side(join, 13, a=conv(4, 3), b=conv(7, 3), c=conv(10, 3))
    assert sorted(axes for _, axes, _ in found(model)) == [("block.a",), ("block.b",), ("block.c",)]
    plan = inferred(model, (X,), None).plan
    needed = {cost.tensor: cost.needed for cost in plan.costs if cost.unit == "macs"}
    assert needed["block.a.weight"] == (("block.a.branch",),)
    assert needed["stem.weight"] == needed["head.weight"] == ((),)


def test_a_concatenation_that_is_part_of_another():
    model = Side(
        lambda x, a, b, c, d: cat(cat(b(y := a(x)), c(y)), d(x)), 12,
        a=conv(), b=conv(), c=nn.Conv2d(4, 4, 1), d=nn.Conv2d(4, 4, 1),
    )  # fmt: skip
    made_of = {axes for _, axes, _ in found(model)}
    assert made_of == {("block.b", "block.c"), ("block.b",)}


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (lambda x, a: cat(y := a(x), y), "both parts are the same"),
        (lambda x, a: cat(y := a(x), x) + y.mean(), "something else reads it"),
        (lambda x, a: cat(a(x), x).split(4, 1)[0].repeat(1, 2, 1, 1), "it is on its own later"),
        (lambda x, a: cat(a(x), x).flip(1)[:, ::2].repeat(1, 2, 1, 1), "single slots are picked"),
        (lambda x, a: cat(a(x) + x, x), "its slots are those of the stream"),
        (lambda x, a: cat(x.relu(), x), "nothing is computed for it"),
        (lambda x, a: cat(x.half(), a(x)), "what is left has another dtype"),
        (lambda x, a: torch.stack([a(x), x], 1).flatten(1, 2), "it is no concatenation"),
        (lambda x, a: cat(a(x)).repeat(1, 2, 1, 1), "there is nothing beside it"),
        (lambda x, a: torch.cat([a(x), x], 2).repeat(1, 2, 1, 1), "no axis is put side by side"),
    ],
)
def test_what_is_no_branch(join, why):
    assert [axes for _, axes, _ in found(Side(join, 8, a=conv())) if axes] == [], why


def test_a_path_that_cannot_be_cut_is_none():
    """Whatever reads the maps by number keeps them all."""
    assert names(lambda x, a, b: cat(b(a(x)), x), 8, a=conv(), b=conv())
    assert names(lambda x, a, b: cat(b(a(x)).sort(1)[0], x), 8, a=conv(), b=conv()) == []
