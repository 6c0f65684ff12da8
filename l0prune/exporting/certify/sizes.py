"""Which other sizes a model takes where its inputs are of any size: the certificate tries them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from l0prune.capture.free_sizes import FreeSizes, Inputs
from l0prune.exporting.certify.answers import is_valid
from l0prune.exporting.certify.inputs import fresh_inputs
from l0prune.running.stages import stage

Sizes = tuple[Mapping[str, int], ...]

_OTHERS = 2  # beside the example's


@stage("looking for input sizes that the model takes")
def sizes_taken(gated: nn.Module, example: Inputs, free: FreeSizes) -> Sizes:
    """Sizes of all free dims for each of several inputs, the example's last.

    An image may have to be a multiple of something, a text no longer than its positions. So a few
    are tried for each name, one alone first.
    """
    own = free.sizes(example)
    others = {name: _others(gated, example, free, name) for name in own}
    every = [
        {name: found[number] for name, found in others.items() if len(found) > number}
        for number in range(_OTHERS)
    ]
    return (*({**own, **sizes} for sizes in every if sizes), own)


def _others(gated: nn.Module, example: Inputs, free: FreeSizes, name: str) -> list[int]:
    own = free.sizes(example)
    size, found = own[name], list[int]()
    for other in dict.fromkeys((1, 2 * size, size + 1, size + size // 2, size // 2)):
        if len(found) < _OTHERS and other not in (size, 0):
            given = fresh_inputs(example, None, 0, free, {**own, name: other})
            found += [other] if is_valid(gated, given) else []
    return found
