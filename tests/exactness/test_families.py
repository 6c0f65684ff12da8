"""Exactness over torchvision's families: half of the gates closed at random, none trivial."""

from __future__ import annotations

import pytest
from exact_families import FAMILIES, measure

from benchmarks.scramble import SIGNAL

EVERY = [model for family in FAMILIES.values() for model in family]


def check(name: str, side: int) -> None:
    result = measure(name, side)
    print(result)
    assert result.signal > SIGNAL / 10  # an output that hardly depends on the input proves nothing
    assert result.float64 <= 1e-10
    # 1e-5; or twice the model's own rounding, where a random network rounds by more by itself.
    assert max(result.float32, result.onnx) <= result.allowed
    assert result.found == result.predicted < 0.8 * result.before
    # Of parameters and buffers the cut ones, and a few constants of operators.
    assert result.in_file <= result.stored + 64


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), EVERY)
def test_every_network(name, side):
    check(name, side)
