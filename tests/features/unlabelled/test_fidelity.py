from types import SimpleNamespace

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import L0pruneWarning, UsageError
from l0prune.features.unlabelled.compensate import Compensation
from l0prune.features.unlabelled.fidelity import Classes, Fidelity, classes_of, fidelity

SCORES = torch.randn(4, 5, 7)


@pytest.mark.parametrize(
    ("outputs", "targets", "asked", "dim", "known", "scores"),
    [
        (SCORES, None, None, None, False, False),  # (examples, classes, places), or the last two
        (SCORES, torch.zeros(4, 7).long(), None, 1, True, True),
        (SCORES, torch.zeros(4, 5).long(), None, 2, True, True),
        (SCORES, torch.zeros(4).long(), None, None, False, False),
        (SCORES, None, -1, 2, True, True),
        (SCORES.softmax(2), None, None, 2, True, False),
        (SCORES.softmax(1), None, None, 1, True, False),
        (SimpleNamespace(logits=SCORES), None, None, 2, True, True),
        (SCORES[..., 0], None, None, 1, False, False),
        (SCORES[..., 0], torch.zeros(4).long(), None, 1, True, True),
        (torch.randn(2, 3, 4, 4), None, None, 1, False, False),
        (torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4).long(), None, 1, True, True),
        (torch.randn(4, 1), None, None, None, False, False),
    ],
)
def test_the_dim_of_classes_is_known_from_what_is_there(
    outputs, targets, asked, dim, known, scores
):
    found = classes_of(outputs, targets, asked)
    assert found == Classes(dim, are_known=known, are_scores=scores)


def test_a_dim_that_the_outputs_do_not_have_is_refused():
    for asked in (0, 3, -3, -4):
        with pytest.raises(UsageError, match=f"class_dim={asked}"):
            classes_of(SCORES, None, asked)
    with pytest.raises(UsageError, match="one tensor with two dims"):
        classes_of((SCORES, SCORES), None, 1)


class Given(nn.Module):
    """A network that answers with what a function makes of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_whole_numbers_are_left_out_of_the_error():
    x = torch.randn(30, 3)
    dense = Given(lambda x: {"a": [x, x[:, :1]], "b": (x[:, 0] > 0).long() * 1000})
    other = Given(lambda x: {"a": [x + 0.1, x[:, :1]], "b": (x[:, 0] > 5).long() * 1000})
    expected = 3 * 0.01 / x.var(0, correction=0).sum() / 2  # of two outputs, one without an error
    assert fidelity(dense, other, [x]).error == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(UsageError, match="without its last step"):
        fidelity(Given(lambda x: x.argmax(1)), Given(lambda x: x.argmax(1)), [x])


@pytest.mark.slow
def test_agreement_is_over_the_dim_that_was_asked_for():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 9)).eval(), None
    x = torch.randn(60, 4, 6)  # four places of nine classes
    assert l0prune.shrink(model, x, "macs=0.6").fidelity.agreement is None
    small = l0prune.shrink(model, x, "macs=0.6", class_dim=-1)
    with torch.no_grad():
        same = model(x).argmax(2) == small.module(x).argmax(2)
    assert small.fidelity.agreement == pytest.approx(float(same.float().mean()), abs=0.15)


@pytest.mark.parametrize("error", [1.5, float("nan")])
def test_outputs_that_say_less_than_a_constant_are_warned_of(error):
    before, near = Fidelity(2.0, None), Fidelity(0.9, None)
    Compensation(before, near, {}).warn_if_useless()
    with pytest.warns(L0pruneWarning, match="say less than a constant"):
        Compensation(before, Fidelity(error, None), {}).warn_if_useless()


class Apart(nn.Module):
    """Returns scores, corners in pixels, zeros and a constant, each with its errors."""

    def __init__(self, by=(0.0, 0.0, 0.0)):
        super().__init__()
        self.by = by

    def forward(self, x):
        scores, corners, still = self.by
        wrong = torch.tensor([1.0, -1.0]).repeat(len(x) // 2)[:, None]
        far = 500 * x.repeat(1, 10) + corners * wrong
        return x / 100 + scores * wrong, far, 0 * x, torch.full_like(x, 3.0) + still


def test_each_of_several_outputs_counts_alike():
    torch.manual_seed(0)
    batches = list(torch.randn(40, 2).split(10))
    variance = torch.cat(batches).var(0, correction=0).mean().item()
    for by, wanted in (
        ((0.005, 0, 0), 0.005**2 / (variance * 1e-4)),
        ((0, 250, 0), 250**2 / (variance * 500**2)),
        ((0, 0, 0.3), 0.3**2 / 3**2),
    ):
        error = fidelity(Apart(), Apart(by), batches).error
        assert error == pytest.approx(wanted / 3, rel=1e-4)  # what is always zero does not count


def test_outputs_of_many_numbers_are_compared_in_parts(monkeypatch):
    torch.manual_seed(0)
    batches = list(torch.randn(40, 70).split(20))
    other = nn.Linear(70, 70, bias=False).eval()
    with torch.no_grad():
        other.weight.copy_(torch.eye(70) + 0.1 * torch.randn(70, 70))
    wanted = fidelity(nn.Identity(), other, batches, lambda _: None).error
    monkeypatch.setattr("l0prune.features.unlabelled.fidelity._PART", 100)
    found = fidelity(nn.Identity(), other, batches, lambda _: None).error
    assert found == pytest.approx(wanted)


class Levels(nn.Module):
    """Numbers that differ much from place to place, and little from example to example."""

    def __init__(self, *shape, wrong=0.0):
        super().__init__()
        self.level, self.wrong = 100 * torch.randn(shape, generator=torch.manual_seed(1)), wrong

    def forward(self, x):
        sign = torch.tensor([1.0, -1.0]).repeat(len(x))[: len(x)]
        across = x + self.wrong * sign[:, None]
        return self.level + across.reshape(len(x), *[1] * (self.level.dim() - 1), -1)


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7), (7, 5)])
@pytest.mark.parametrize("classes", [lambda _: None, lambda _: 1])
def test_a_level_of_each_number_is_no_variance(shape, classes):
    torch.manual_seed(0)
    batches = list(torch.randn(90, shape[-1]).split(40))
    variance = torch.cat(batches).var(0, correction=0).mean().item()
    found = fidelity(Levels(*shape), Levels(*shape, wrong=0.5), batches, classes)
    assert found.error == pytest.approx(0.25 / variance, rel=1e-3)


def test_examples_of_unlike_sizes_are_compared_by_the_means_of_their_channels():
    torch.manual_seed(0)
    batches, level = [torch.randn(9, n, 4) for n in (5, 6, 7)], torch.tensor([0.0, 90, -9, 30])
    dense = Level(level)
    found = fidelity(dense, Level(level + 0.5), batches, lambda _: None)
    places = torch.cat([batch.flatten(0, 1) for batch in batches])
    assert found.error == pytest.approx(0.25 / places.var(0, correction=0).mean().item(), rel=1e-3)


class Level(nn.Module):
    """A sum with one number for each channel."""

    def __init__(self, level):
        super().__init__()
        self.level = level

    def forward(self, x):
        return x + self.level
