"""Parts of outputs: several outputs, and what one is joined of."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.running.output_parts import apart, in_parts, in_units, numbered, units_of


class Detector(nn.Module):
    """Corners in pixels beside scores, at two levels, as ``order`` puts them."""

    def __init__(self, order=lambda y: y):
        super().__init__()
        self.body, self.order = nn.Conv1d(3, 8, 1), order
        self.corners, self.scores = nn.Conv1d(8, 4, 1), nn.Conv1d(8, 2, 1)

    def forward(self, x):
        found = []
        for each in (self.body(x), self.body(x[..., ::2])):
            parts = 300 * self.corners(each.relu()), self.scores(each.relu()).sigmoid()
            found.append(torch.cat(parts, 1))
        return self.order(torch.cat(found, 2))


ORDERS = {
    "as they are": lambda y: y,
    "permuted": lambda y: y.permute(0, 2, 1),
    "transposed": lambda y: y.transpose(-1, -2).clone(),
    "among others": lambda y: {"a": y[:, 0] * 2, "b": y, "n": 3},
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_joined_comes_apart_again(name):
    torch.manual_seed(0)
    model, x = Detector(ORDERS[name]).eval(), torch.randn(5, 3, 6)
    wanted = []
    with torch.no_grad():
        y = Detector.forward(copy_of(model), x)
        outputs, parts = model(x), in_parts(model, x)[1]
    for places in (slice(0, 6), slice(6, 9)):
        for channels in (slice(0, 4), slice(4, 6)):
            wanted.append(y[:, channels, places])
    found = apart(outputs, parts)
    if name == "among others":
        assert torch.equal(found.pop(0), 2 * y[:, 0])
    assert [part.shape[0] for part in found] == [5] * 4
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.flatten().sort().values, theirs.flatten().sort().values)
    of = numbered(outputs, parts)
    rows = torch.cat([each.flatten(1) for each in values(outputs)], 1)
    for number, part in enumerate(apart(outputs, parts)):
        assert torch.equal(rows[:, of == number].sort().values, part.flatten(1).sort().values)


def copy_of(model):
    """The model without an order."""
    plain = Detector()
    plain.load_state_dict(model.state_dict())
    return plain.eval()


def values(outputs):
    each = outputs.values() if isinstance(outputs, dict) else [outputs]
    return [value for value in each if isinstance(value, torch.Tensor)]


def test_examples_are_no_parts_nor_what_is_changed_after_it_was_joined():
    x = torch.randn(4, 3)
    joined = nn.Linear(3, 6)
    for forward in (
        lambda x: torch.cat([x, x], 0),
        lambda x: torch.cat([x, x], 1) + 1,
        lambda x: torch.cat([x, x], 1).T,
        lambda x: torch.cat([x], 1),
        joined,
    ):
        model = module_of(forward)
        assert in_parts(model, x)[1] == ((),)
        assert len(apart(model(x), in_parts(model, x)[1])) == 1
        assert numbered(model(x), in_parts(model, x)[1]) is None


def module_of(function):
    """A module of a function."""
    model = nn.Identity()
    model.forward = function
    return model


def test_an_output_of_other_sizes_is_in_parts_where_these_are_its_own():
    model = Detector().eval()
    _, parts = in_parts(model, torch.randn(2, 3, 6))
    assert len(apart(model(torch.randn(2, 3, 6)), parts)) == 4
    assert len(apart(model(torch.randn(2, 3, 8)), parts)) == 1


def test_several_parts_count_alike_whatever_their_units_and_sizes():
    torch.manual_seed(0)
    rows = torch.cat([1000 * torch.randn(50, 8) + 1, torch.randn(50, 2), torch.ones(50, 3)], 1)
    of = torch.tensor([0] * 8 + [1] * 2 + [2] * 3)
    found = in_units(rows, of, units_of(rows, of))
    shares = [part.var(0, correction=0).sum() / rows.shape[1] for part in found.split([8, 2, 3], 1)]
    torch.testing.assert_close(torch.stack(shares[:2]), torch.full((2,), 1 / 3))
    assert found[:, 10:].square().sum(1).mean() / rows.shape[1] == pytest.approx(1 / 3)  # still


@torch.no_grad()
def test_scores_beside_corners_in_pixels_are_learned_and_compared():
    torch.manual_seed(0)
    model, x = Detector().eval(), torch.randn(60, 3, 6)
    task = l0prune.with_pseudo_labels((x, x), model)
    corners, scores = (each.weight.clone() for each in (model.corners, model.scores))
    lost = []
    for layer, before in ((model.corners, corners), (model.scores, scores)):
        layer.weight.copy_(before + 0.1 * before.std() * torch.randn_like(before))
        lost.append(l0prune.evaluate(model, task)["test_loss"])
        layer.weight.copy_(before)
    assert 0.1 < lost[0] / lost[1] < 10


@torch.no_grad()
def test_answers_of_other_sizes_than_the_first_are_in_the_parts_that_they_have():
    torch.manual_seed(0)
    model = Detector(lambda y: (y, y[:, 4:])).eval()
    batches = [{"x": torch.randn(20, 3, size)} for size in (6, 6, 8)]
    task = l0prune.with_pseudo_labels(batches, model)
    inputs, answers = list(task.train)[2]
    found = model(**inputs)
    off = found[0] + 30, found[1] + 0.1
    variance = [each.var(0, correction=0).mean() for each in found]
    wanted = (30**2 / variance[0] + 0.1**2 / variance[1]) / 2
    assert task.loss(off, answers) == pytest.approx(wanted.item(), rel=1e-4)
