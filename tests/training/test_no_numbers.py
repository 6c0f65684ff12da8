"""NaN and inf in whatever a function of the user's returns: a null in the records, or one error."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from small_task import FEATURES, data, differing, network, tensors
from torch.nn import functional as F

import l0prune
from l0prune.errors import L0pruneError
from l0prune.gating.kinds.hard_concrete import HardConcrete

NO_NUMBERS = [math.nan, math.inf, -math.inf]
COMMON = {"epochs": 3, "batch_size": 40, "progress": False}


def train(out, bad, **settings):
    model = settings.pop("model", None) or l0prune.gate(network(), torch.zeros(2, FEATURES))
    before = {name: tensor.clone() for name, tensor in tensors(model).items()}
    settings = {"budget": "params=0.5", **COMMON, **settings}
    try:
        history = l0prune.finetune(model, data(), out=out, **settings)
    except L0pruneError:
        assert differing(before, tensors(model)) == []
        return None
    assert all(bool(torch.isfinite(t).all()) for t in tensors(model).values())
    l0prune.export(model)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(history) == 3
    return [json.loads(line) for line in lines]


def metric(out, bad):
    records = train(out, bad, metric=lambda outputs, targets: bad)
    assert [record["metric"] for record in records] == [None] * 3
    assert records[0]["before"]["metric"] is None


def on_test_data(out, bad):
    def loss(outputs, targets):
        found = F.cross_entropy(outputs, targets)
        return found if torch.is_grad_enabled() else found * 0 + bad

    records = train(out, bad, loss=loss, start="alike")
    assert [record["test_loss"] for record in records] == [None] * 3


def loss(out, bad):
    assert train(out, bad, loss=lambda o, t: F.cross_entropy(o, t) * bad) is None


def slope(out, bad):
    """The loss is a number, and its gradient none."""

    def odd(outputs, targets):
        found = F.cross_entropy(outputs, targets)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient * bad)
        return found

    assert train(out, bad, loss=odd, start="alike") is None


def measured(which):
    def draw(out, bad):
        class Bad(l0prune.Measure):
            name, label, suffixes = "odd", "odd things", {"": 1.0}

            def expected(self, p, dtype=None, through=None):
                return p.sum().to(dtype or p.dtype) * (bad if which == "expected" else 1.0)

            def actual(self, open_, through=None):
                found = float(open_.sum())
                everything = which == "dense" and bool(open_.all())
                return bad if which == "actual" or everything else found

        l0prune.measures.register(Bad)
        assert train(out, bad, budget="odd=0.5") is None

    return draw


def kind(which):
    def draw(out, bad):
        @dataclass(frozen=True)
        class Odd(HardConcrete):
            def sample(self, log_alpha, noise):
                found = super().sample(log_alpha, noise)
                return found * bad if which == "sample" else found

            def open_probability(self, log_alpha):
                found = super().open_probability(log_alpha)
                return found * bad if which == "probability" else found

        model = network()
        try:
            l0prune.gate(model, torch.zeros(2, FEATURES), gate=Odd())
        except L0pruneError:
            return
        assert train(out, bad, model=model) is None

    return draw


def priced(out, bad):
    assert train(out, bad, budget=None, lam=bad) is None


def scored(out, bad):
    model = l0prune.gate(network(), torch.zeros(2, FEATURES))
    scores = torch.full((l0prune.gates(model).plan.size,), bad)
    before = tensors(model)
    for act in (lambda: l0prune.fit(model, "params=0.5", scores), lambda: lean(model, scores)):
        with pytest.raises(L0pruneError, match="finite numbers"):
            act()
    assert differing(before, tensors(model)) == []


def lean(model, scores):
    l0prune.gates(model).init_from_scores(scores)


DRAWN = {
    "metric": metric,
    "test loss": on_test_data,
    "loss": loss,
    "slope": slope,
    **{f"measure: {which}": measured(which) for which in ("expected", "actual", "dense")},
    **{f"gate: {which}": kind(which) for which in ("sample", "probability")},
    "λ": priced,
    "score": scored,
}


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize("where", DRAWN)
@pytest.mark.one_in(6)
def test_what_is_no_number_ends_in_a_null_or_an_error(where, bad, tmp_path):
    DRAWN[where](Path(tmp_path), bad)
