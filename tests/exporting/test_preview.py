"""Why a class is lost is said before any gate learns, and an export then says the same."""

import math

import pytest
import torch
import torch.nn.functional as F
from deadness import close_some, randomise
from networks import CASES, Fn
from torch import nn

import l0prune

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Heads by hand; ``scores`` says what else goes into them."""

    def __init__(self, scores):
        super().__init__()
        self.num_heads, self.head_dim = 4, 6
        self.qkv, self.proj = nn.Linear(12, 72), nn.Linear(24, 12)
        self.scores = scores

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.scores(self, q, q @ k.transpose(-2, -1))
        x = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.proj(x.reshape(batch, length, self.num_heads * self.head_dim))


def as_stored(module, q, scores):
    return scores


def over_what_is_left_of_a_head(module, q, scores):
    return scores / torch.sqrt(torch.tensor(q.size(-1), dtype=scores.dtype))


def with_a_slope_for_each_head(module, q, scores):
    slopes = 2.0 ** -torch.arange(1, module.num_heads + 1, dtype=scores.dtype)
    return scores + slopes[:, None, None] * torch.arange(scores.size(-1), dtype=scores.dtype)


class Standardised(nn.Conv1d):
    def forward(self, x):
        rows = F.batch_norm(self.weight.reshape(1, 8, -1), None, None, training=True)
        return F.conv1d(x, rows.reshape_as(self.weight), self.bias)


def checks_its_width(module, x):
    h = module.up(x)
    if h.size(-1) != 16:
        raise ValueError("not my width")
    return module.down(h.relu())


def attention(scores):
    return nn.Sequential(nn.Linear(12, 12), Attention(scores), nn.Linear(12, 3))


LOST = {
    "a scale of the code": (
        lambda: attention(over_what_is_left_of_a_head),
        "its forward computes something else at these sizes (from 2 on)",
    ),
    "numbers of the code": (
        lambda: attention(with_a_slope_for_each_head),
        "its forward computes something else at these sizes (from 2 on)",
    ),
    "a weight's own mean": (
        lambda: nn.Sequential(nn.Conv1d(5, 8, 1), Standardised(8, 8, 1), nn.Conv1d(8, 3, 1)),
        "its forward computes something else at these sizes (from 2 on; 1.weight is standardised "
        "over its inputs in each forward, and some are gone)",
    ),
    "a check": (
        lambda: Fn(checks_its_width, up=nn.Linear(12, 16), down=nn.Linear(16, 4)),
        "its forward does not allow these sizes at test_preview.py:57, "
        '"raise ValueError("not my width")": ValueError: not my width',
    ),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.one_in(6)
def test_a_class_that_will_be_lost_is_said_beforehand(name):
    make, reason = LOST[name]
    torch.manual_seed(0)
    model = randomise(make()).eval()
    survey = l0prune.survey(model, X)
    assert survey.no_class == survey.to_dict()["no_class"] == reason
    assert survey.to_dict()["own_class"] is False
    assert f"is the captured graph, not of the model's own class: {reason}" in " ".join(
        str(survey).split()
    )
    small = l0prune.export(close_some(l0prune.gate(model, X, survey=survey), seed=2))
    assert not small.rebuilt
    assert reason in small.note


@pytest.mark.parametrize("name", ["concat", "multi_head_attention", "encoder_layer"])
def test_a_class_that_is_kept_is_not_mentioned(name):
    module, shape, _ = CASES[name]
    survey = l0prune.survey(module, torch.randn(shape))
    assert survey.no_class == ""
    assert survey.to_dict()["own_class"] is True
    assert "own class" not in str(survey)


def test_weights_that_start_at_zero_hide_nothing():
    model = attention(over_what_is_left_of_a_head)
    nn.init.zeros_(model[1].proj.weight)
    assert l0prune.survey(model, X).no_class
    assert not model[1].proj.weight.any()


def test_a_scale_that_an_attribute_has_stays():
    model = attention(lambda module, q, scores: scores / math.sqrt(24))
    assert l0prune.survey(model, X).no_class == ""


@pytest.mark.slow
def test_it_is_not_tried_where_it_cannot_be_or_is_not_asked():
    model = attention(as_stored)
    assert l0prune.survey(model, X, own_class=False).no_class is None
    on_meta = attention(as_stored).to("meta")
    assert l0prune.survey(on_meta, X.to("meta")).to_dict()["own_class"] is None
