"""A task that a laptop learns in a second: three clouds of points, and networks for it."""

import copy
import functools
import itertools
import os
import signal
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import l0prune
from l0prune.data import Data, Tensors
from l0prune.errors import Interrupted

FEATURES, CLASSES = 6, 3


def clouds(examples=240, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(examples) % CLASSES
    centres = 2 * torch.eye(CLASSES, FEATURES)
    inputs = centres[targets] + 0.7 * torch.randn(examples, FEATURES, generator=generator)
    return Tensors(inputs, targets)


def data(examples=240):
    return Data("clouds", clouds(examples), clouds(120, seed=1), CLASSES)


def network(*, norm=True, dropout=0.0):
    torch.manual_seed(7)
    layers = [nn.Linear(FEATURES, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(16, CLASSES))


def gated(kind=None, **kwargs):
    """A gated network; random numbers go on as after its making."""
    model, state = made(kind, **kwargs)
    torch.set_rng_state(state)
    return copy.deepcopy(model)


@functools.cache
def made(kind, **kwargs):
    """One of which all are copies: to capture it takes longer than to train it for an epoch."""
    model = l0prune.gate(network(**kwargs), torch.zeros(2, FEATURES), gate=kind)
    return model, torch.get_rng_state()


@contextmanager
def stopped_at(model, number):
    """Within the context Ctrl-C stops training, at the forward of the model with this number."""
    calls = itertools.count()

    def stop(*_):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)

    hook = model.register_forward_pre_hook(stop)
    with pytest.raises(Interrupted):
        yield
    hook.remove()


def tensors(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def differing(one, other):
    """Names of tensors that are not the same to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
