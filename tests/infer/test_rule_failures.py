"""Errors in rules and passes: pins and CaptureErrors with the operator, or raised if strict."""

from __future__ import annotations

import re

import pytest
import torch
from deadness import relative_effect_of_dead_slots
from networks import Fn
from torch import nn

import l0prune
from l0prune.errors import CaptureError
from l0prune.infer import build
from l0prune.infer.registry import RULES, ZEROS, NotFollowed


def network():
    """Two layers around an operator whose rule a test breaks, and two beside it."""

    def forward(m, x):
        h = m.a(x)
        h = torch.flip(h, (1,))
        return m.b(h * h.sum(1, keepdim=True)) + m.d(m.c(x).relu())

    layers = {"a": nn.Linear(10, 8), "b": nn.Linear(8, 3), "c": nn.Linear(10, 6)}
    return Fn(forward, **layers, d=nn.Linear(6, 3)).eval()


X = torch.randn(2, 10)
LINE = network.__code__.co_firstlineno + 5


def fail(*args):
    raise ValueError("no such dim\nand more")


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("L0PRUNE_STRICT")


def is_pinned_by(text):
    """Is the stream through the broken operator pinned with this, and all else cut exactly?"""
    plan, error = relative_effect_of_dead_slots(network(), (X,))
    assert error <= 1e-12
    assert {axis.name.removeprefix("run."): axis.size for axis in plan.axes} == {
        "c": 6, "a.in": 10, "c.in": 10,
    }  # fmt: skip
    reasons = {pin.where: (pin.reason, pin.source) for pin in plan.pins}
    reason, source = reasons["a.weight dim 0"]
    assert text in reason
    assert f"aten.flip at test_rule_failures.py:{LINE}" in reason
    assert source == f"test_rule_failures.py:{LINE}"
    return True


@pytest.mark.parametrize("table", [RULES, ZEROS], ids=["rule", "zero rule"])
def test_an_error_in_a_rule_is_a_pin_at_its_operator(table, lenient, monkeypatch):
    monkeypatch.setitem(table, "aten.flip", fail)
    kind = "rule" if table is RULES else "zero rule"
    assert is_pinned_by(f"l0prune's {kind} for aten.flip")
    assert is_pinned_by("failed (ValueError: no such dim); please report")


@pytest.mark.parametrize("table", [RULES, ZEROS], ids=["rule", "zero rule"])
def test_it_is_raised_where_that_is_asked_for(table, monkeypatch):
    monkeypatch.setitem(table, "aten.flip", fail)
    with pytest.raises(ValueError, match="no such dim"):
        l0prune.survey(network(), (X,))


def test_a_use_that_a_rule_does_not_cover_is_a_pin_in_either_case(monkeypatch):
    def refuse(infer, node):
        raise NotFollowed("its dims are turned around")

    monkeypatch.setitem(RULES, "aten.flip", refuse)
    assert is_pinned_by("cannot be followed here: its dims are turned around")


def look_at_all(infer, layout):
    for node in infer.captured.graph.nodes:
        if "flip" in str(node.target):
            fail(node.name)
        yield from ()


def test_an_error_in_a_pass_is_a_capture_error_with_operator_and_line(lenient, monkeypatch):
    monkeypatch.setattr(build, "activations", look_at_all)
    place = re.escape(f"aten.flip at test_rule_failures.py:{LINE}")
    with pytest.raises(CaptureError, match=rf"{place} while.*ValueError: no such dim"):
        l0prune.survey(network(), (X,))


def test_an_error_in_a_pass_is_raised_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(build, "activations", look_at_all)
    with pytest.raises(ValueError, match="no such dim"):
        l0prune.gate(network(), (X,))
