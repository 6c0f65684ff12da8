"""Which values a captured graph makes, how large they are, and when each is needed."""

import pytest
import torch
from models import Broken, small
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.plan.cost import Amounts


class Net(nn.Module):
    """Two layers with what is given between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def values(model, *inputs):
    """Bytes of an example, first and last step, of all values in their order."""
    plan = l0prune.survey(model.eval(), inputs).plan
    sizes = Amounts(plan, plan.activations).expected(torch.ones(plan.size))
    times = [(each.made, each.last) for each in plan.activations]
    return [(round(float(s)), *t) for s, t in zip(sizes, times, strict=True)]


X = torch.randn(2, 4)
INPUT, FIRST, LAST = 4 * 4, 6 * 4, 3 * 4


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (torch.relu, [(INPUT, 0, 0), (FIRST, 0, 1), (FIRST, 1, 2), (LAST, 2, 2)]),
        # A value and its views are one; what is written in place is another name for it.
        (torch.relu_, [(INPUT, 0, 0), (FIRST, 0, 2), (LAST, 2, 2)]),
        (lambda x: x.view(-1, 2, 3).flatten(1), [(INPUT, 0, 0), (FIRST, 0, 3), (LAST, 3, 3)]),
        (lambda x: x + x.chunk(2, 1)[1].sum(1, keepdim=True),
         [(INPUT, 0, 0), (FIRST, 0, 4), (4, 3, 4), (FIRST, 4, 5), (LAST, 5, 5)]),
        # Of two results one is never read: it is there while it is made.
        (lambda x: x.sort(1)[0],
         [(INPUT, 0, 0), (FIRST, 0, 1), (FIRST, 1, 3), (2 * FIRST, 1, 2), (LAST, 3, 3)]),
        # What is made of constants is as large for one example as for two.
        (lambda x: x + torch.arange(6.0),
         [(INPUT, 0, 0), (FIRST, 0, 2), (FIRST, 1, 2), (FIRST, 2, 3), (LAST, 3, 3)]),
    ],
)  # fmt: skip
def test_values_of_a_graph(between, expected):
    assert values(Net(between), X) == expected


def test_a_computed_weight_is_no_part_of_the_batch():
    plan = l0prune.survey(Net(lambda x: x + torch.arange(6.0)), X).plan
    assert [each.is_fixed for each in plan.activations] == [False, False, True, False, False]


def test_bytes_are_those_of_the_dtype():
    doubles = values(Net(torch.relu).double(), X.double())
    assert [size for size, _, _ in doubles] == [2 * INPUT, 2 * FIRST, 2 * FIRST, 2 * LAST]


@pytest.mark.slow
def test_parts_of_a_model_run_one_after_the_other():
    class Two(Broken):
        def __init__(self):
            super().__init__()
            self.a, self.b = small(), small()

        def layers(self):
            yield self.a
            yield lambda x: torch.cat([x, x])  # b gets twice the examples
            yield self.b

    plan = l0prune.survey(Two(), (torch.randn(3, 4),)).plan
    assert plan.parts == ("a", "b")
    a, b = ([each for each in plan.activations if low <= each.made < low + 3] for low in (0, 3))
    assert len(a) == len(b) == len(plan.activations) / 2
    assert [each.later(3).of_examples(2).made for each in a] == [each.made for each in b]
    assert [2 * each.scale for each in a] == [each.scale for each in b]


def test_a_model_that_was_saved_before_says_so():
    plan = l0prune.survey(Net(torch.relu), X).plan
    with pytest.raises(UsageError, match="Gate the model anew"):
        Amounts(plan, ())
