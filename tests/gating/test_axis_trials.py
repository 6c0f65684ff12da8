"""Axes are tried before training: one that cannot be cut has no gates, and a reason."""

import pytest
import torch
from networks import Fn
from torch import nn

import l0prune
from l0prune.gating.at_fault import at_fault
from l0prune.infer.rewrites.literals import REWRITES

X = torch.randn(2, 4)


def forward(m, x):
    x = m.b(m.a(x).relu()).reshape(2, 3, 2).sum(2)
    return m.d(m.c(x).relu())


def layers():
    return {"a": nn.Linear(4, 8), "b": nn.Linear(8, 6), "c": nn.Linear(3, 5), "d": nn.Linear(5, 2)}


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("L0PRUNE_STRICT")


def test_an_axis_that_cannot_be_cut_is_a_pin_and_no_other(lenient, monkeypatch):
    sound = l0prune.survey(Fn(forward, **layers()).eval(), X)
    assert {"a", "b", "c"} < {*sound.plan.names}
    monkeypatch.delitem(REWRITES, "aten.reshape")
    survey = l0prune.survey(Fn(forward, **layers()).eval(), X)
    gone = {*sound.plan.names} - {*survey.plan.names}
    assert gone
    assert all(name.startswith("b") for name in gone)
    pins = [pin for pin in survey.pins if "when that was tried" in pin.reason]
    assert {pin.where for pin in pins} >= {"b.weight dim 0"}
    (pin, *_) = pins
    assert pin.operator == "aten.reshape"
    assert pin.source.startswith("test_axis_trials.py:")
    assert "failed at operator aten.reshape" in pin.reason


def test_a_model_with_such_a_pin_is_exported_exactly(lenient, monkeypatch):
    monkeypatch.delitem(REWRITES, "aten.reshape")
    model = l0prune.gate(Fn(forward, **layers()).eval(), X)
    l0prune.gates(model).log_alpha.data[::2] = -9.0
    small = l0prune.export(model)
    assert small.params < small.params_before
    torch.testing.assert_close(small.module(X), model(X))


def test_a_failed_trial_is_an_error_where_that_is_asked(monkeypatch):
    monkeypatch.delitem(REWRITES, "aten.reshape")
    with pytest.raises(RuntimeError, match=r"shape .* is invalid"):
        l0prune.survey(Fn(forward, **layers()).eval(), X)


NAMES = "abcdefgh"


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ([], ""),
        (["c"], "c"),
        (["a", "f", "h"], "afh"),
        (["cg"], "g"),  # two that fail together lose the last one
        (["b", "ad"], "bd"),
        (list(NAMES), NAMES),
    ],
)
def test_those_at_fault_are_found(bad, found):
    tried = []

    def attempt(names):
        tried.append(names)
        return next((each for each in bad if {*each} <= {*names}), None)

    guilty = dict(at_fault(NAMES, attempt))
    assert sorted(guilty) == sorted(found)
    assert attempt([name for name in NAMES if name not in guilty]) is None
    assert bad or len(tried) == 2
