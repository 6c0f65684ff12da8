"""Exactness over torchvision's families: half of the gates closed at random, none trivial."""

from __future__ import annotations

import pytest

from benchmarks.exactness import FAMILIES, measure

SMALL = ["resnet18", "shufflenet_v2_x0_5"]
EVERY = [model for family in FAMILIES.values() for model in family]


def check(name: str, side: int) -> None:
    result = measure(name, side)
    assert result.signal > 1e-3  # an output that hardly depends on the input proves nothing
    assert result.float64 <= 1e-10
    # A deep network with random weights may round by more than 1e-5 all by itself.
    assert max(result.float32, result.onnx) <= min(result.allowed, 2e-5)
    assert result.found == result.predicted < 0.8 * result.before
    # The file stores weights, what BatchNorm statistics are not folded away, and a few scalars.
    assert result.in_file <= result.predicted + result.buffers + 64


@pytest.mark.parametrize(("name", "side"), [m for m in EVERY if m[0] in SMALL])
def test_small(name, side):
    check(name, side)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), [m for m in EVERY if m[0] not in SMALL])
def test_every_other(name, side):
    check(name, side)
