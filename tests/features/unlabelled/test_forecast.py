"""Memory that ``shrink`` is foreseen to take, beside what it takes."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.features.unlabelled.forecast import foresee
from tests.held import Held


def network():
    torch.manual_seed(0)
    pairs = [(64, 256), (256, 64)] * 6
    layers = [part for pair in pairs for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 4)).eval()


@pytest.mark.slow
def test_a_model_without_values_has_the_same_bytes_and_times_by_its_products():
    model, x = network(), torch.randn(80, 64)
    real = foresee(model, x, "params=0.5", samples=60, batch_size=10)
    empty = foresee(network().to("meta"), x, "params=0.5", samples=60, batch_size=10)
    assert [(each.name, each.bytes) for each in empty.steps[1:]] == [
        (each.name, each.bytes) for each in real.steps[1:]
    ]
    for one, other in zip(real.steps, empty.steps, strict=True):
        assert one.seconds / 50 < other.seconds < 50 * one.seconds
    assert "minutes" in str(real)
    assert "minutes" in str(empty)
    assert real.examples == empty.examples == 60
    less = foresee(model, x, "params=0.2", samples=60, batch_size=10)
    saved = real.steps[-1].bytes - less.steps[-1].bytes
    assert saved == pytest.approx(0.3 * real.weights, abs=2)


@pytest.mark.slow
def test_what_is_foreseen_is_about_what_is_held():
    model, x = network(), torch.randn(600, 64)
    options = {"samples": 480, "batch_size": 40}
    found = foresee(model, x, "params=0.5", **options)
    with Held(model) as held:
        l0prune.shrink(model, x, "params=0.5", **options, allow_worse_than_mean=True, round_to=1)
    assert 0.5 < (held.most - held.weights) / found.peak < 1.2
