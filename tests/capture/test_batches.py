"""Sizes of a batch."""

import pytest

from l0prune.capture.sizes import ANY, Batches


@pytest.mark.parametrize(
    ("batches", "text", "some"),
    [
        (ANY, "1 or more", (2, 3, 1)),
        (ANY.several(), "2 or more", (2, 3)),
        (Batches(4, 4), "multiples of 4", (8, 12, 4)),
        (Batches(4, 4).several(), "multiples of 4, from 8", (8, 12)),
    ],
)
def test_which_they_are(batches, text, some):
    assert str(batches) == text
    assert batches.first((2, 3, 1)) == some
    assert all(size in batches for size in some)
    assert 0 not in batches
    assert batches.multiple == 1 or 10 not in batches
