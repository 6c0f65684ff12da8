"""Caches of functions give no constants to a capture, and keep no tensor without values."""

import functools

import torch
from networks import Fn
from torch import nn

import l0prune
from l0prune.capture.capture import capture

X = torch.randn(2, 6)


@functools.lru_cache(maxsize=4)
def slope(size, dtype):
    return torch.linspace(0, 1, size, dtype=dtype).exp()


@functools.cache
def several(size):
    return {"of": (torch.arange(size).sin(), size)}


@functools.cache
def plain(size):
    return size * 2


def forward(m, x):
    return m.a(x * slope(x.shape[1], x.dtype) + several(6)["of"][0]) * plain(3)


def test_a_warm_cache_is_no_constant_and_keeps_no_fake_tensor():
    model = Fn(forward, a=nn.Linear(6, 3)).eval()
    wanted = model(X)
    for warm in (True, False):
        captured = capture(model, (X,))
        assert not captured.program.constants
        assert slope.cache_info().currsize == several.cache_info().currsize == 0
        assert plain.cache_info().currsize == 1
        if warm:
            torch.testing.assert_close(model(X), wanted)  # fills it again


def test_a_model_with_a_cache_is_exported_exactly():
    torch.manual_seed(0)
    model = nn.Sequential(Fn(forward, a=nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)).eval()
    model(X)
    l0prune.gate(model, X)
    l0prune.gates(model).log_alpha.data[::2] = -9.0
    small = l0prune.export(model)
    assert small.params < small.params_before
    torch.testing.assert_close(small.module(X), model(X))
