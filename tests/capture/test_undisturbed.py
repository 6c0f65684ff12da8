"""What a forward keeps while l0prune traces or runs a copy is gone afterwards, wherever it is."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from typing import ClassVar

import pytest
import torch
from torch import nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.capture.undisturbed import undisturbed
from l0prune.errors import L0pruneError
from tests.disturbances import answer, changes, state_of

TABLES = {}
LAST = None


@functools.lru_cache
def ramp(size):
    return torch.arange(size).float()


class Recent(OrderedDict):
    """A cache of the user's own, which keeps a few of its last values."""


class Notes:
    def __init__(self):
        self.mean, self.lines = None, []


class Keeping(nn.Module):
    """Keeps something in every place that Python has for it."""

    of_class: ClassVar[dict] = {}
    newest = None

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)
        self.notes, self.deep = Notes(), {"x": [[]]}
        self.queue, self.recent, self.names = deque(maxlen=2), Recent(), set()

    def forward(self, x):
        global LAST
        h = self.a(x).relu()
        size = h.shape[1]
        if size not in TABLES:
            TABLES[size] = torch.ones(size)
        if size not in self.of_class:
            self.of_class[size] = torch.ones(size)
        if self.notes.mean is None:
            self.notes.mean = torch.ones(size)
        type(self).newest = LAST = self.recent["h"] = h
        self.deep["x"][0].append(h)
        self.queue.append(h)
        self.notes.lines.append(h)
        self.names.add(size)
        known = TABLES[size] * self.of_class[size] * self.notes.mean
        return self.b(h) * known * ramp(size)


def of_code():
    return dict(TABLES), LAST, dict(Keeping.of_class), Keeping.newest, ramp.cache_info().currsize


@pytest.fixture
def nothing_kept():
    yield
    TABLES.clear()
    Keeping.of_class.clear()
    ramp.cache_clear()


@pytest.mark.usefixtures("nothing_kept")
def test_nothing_is_kept_anywhere():
    model, x = Keeping().eval(), torch.randn(2, 4)
    before, code = state_of(model), of_code()
    l0prune.survey(model, (x,))
    assert changes(before, state_of(model)) == []
    assert of_code() == code == ({}, None, {}, None, 0)
    found = model(x)
    assert found.dtype == torch.float32


@pytest.mark.usefixtures("nothing_kept")
def test_what_was_kept_before_stays():
    model, x = Keeping().eval(), torch.randn(2, 4)
    model(x)
    other = torch.randn(3, 4)
    before, code, last = state_of(model), of_code(), LAST
    capture(model, (other,))
    assert changes(before, state_of(model)) == []
    *kept, in_cache = of_code()
    assert tuple(kept) == code[:-1]
    assert in_cache == 0  # what a cache of functools held is computed again
    assert LAST is last
    assert Keeping.newest is last


def test_the_order_of_a_dict_is_restored():
    model = nn.Module()
    model.kept = OrderedDict(a=1, b=2)
    with undisturbed(model):
        model.kept.move_to_end("a")
    assert list(model.kept) == ["a", "b"]


class Lazy(nn.Module):
    """Installs hooks on its layers at the first call, remembers it, and adds up what they see."""

    def __init__(self, fails=False):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.fails = fails

    def forward(self, x):
        seen = []
        if not getattr(self, "installed", False):
            for layer in (self.a, self.b):
                layer.register_forward_hook(lambda _, args, out: self.seen.append(out))
            self.installed = True
        self.seen = seen
        h = self.b(self.a(x).relu()).relu()
        if self.fails and h.sum() > 0:
            raise ValueError("not today")
        return self.o(h * sum(each.tanh().mean(1, keepdim=True) for each in seen))


CALLS = {
    "survey": lambda model, x: l0prune.survey(model, (x,)),
    "gate": lambda model, x: l0prune.ungate(l0prune.gate(model, (x,))),
    "shrink": lambda model, x: l0prune.shrink(model, x, budget="macs=0.7"),
    "no such axis": lambda model, x: l0prune.gate(model, (x,), include="none*"),
    "no such shape": lambda model, x: l0prune.survey(model, (x[:, :2],)),
    "no such budget": lambda model, x: l0prune.shrink(model, x, budget="macs=-1"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.one_in(3)
def test_a_model_that_installs_hooks_at_its_first_call_is_as_it_was(call, has_run):
    torch.manual_seed(0)
    model, x = Lazy(), torch.randn(64, 4)
    model.b.eval()  # a mode of its own
    model(x).sum().backward()
    expected = answer(model, ((x,), {}))
    if not has_run:
        fresh = Lazy()
        fresh.load_state_dict(model.state_dict())
        model = fresh
    before = state_of(model)
    try:
        CALLS[call](model, x)
    except L0pruneError:
        assert call.startswith("no such")
    assert changes(before, state_of(model)) == []
    for found, right in zip(answer(model, ((x,), {})), expected, strict=True):
        assert torch.equal(found, right)


def test_gates_and_export_of_such_a_model_compute_what_it_does():
    torch.manual_seed(0)
    model, x = Lazy().eval(), torch.randn(4, 4)
    l0prune.gate(model, (x,))
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 3 > 0)
    before = state_of(model)
    small = l0prune.export(model)
    assert changes(before, state_of(model)) == []
    assert small.params < small.params_before
    torch.testing.assert_close(small.module(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_model_whose_forward_fails_is_as_it_was():
    model, x = Lazy(fails=True), torch.ones(4, 4)
    before = state_of(model)
    with pytest.raises(L0pruneError):
        l0prune.survey(model, (x,))
    assert changes(before, state_of(model)) == []
