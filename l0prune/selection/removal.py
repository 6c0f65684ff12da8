"""Score of a branch: the change of the outputs without it, in the order in which branches may go.

Where a network can spare either of two, it may need one: so they go in rounds, and those that are
left are tried again without what is gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from l0prune.plan.switches import switches_of
from l0prune.selection.subject import Subject, mean_over_examples

FORWARDS = 5  # of a branch on each batch: in so many rounds, about, all have gone
_ROUND = 0.25  # of the branches that are left go in a round


def in_turns(of: Subject) -> Tensor:
    """Return each switch's mean over the examples of ‖o − o'‖², o' the outputs without it.

    They are given to switches in the order in which these may go, smallest first.

    Shape: ``(plan.size,)``, float64; 0 but for switches.
    """
    switches = switches_of(of.plan)
    result = torch.zeros_like(switches, dtype=torch.float64)
    left: list[int] = switches.nonzero().flatten().tolist()
    gone: list[int] = []
    alone = _moved(of, gone, left)
    moved = alone
    while left:
        left.sort(key=moved.__getitem__)
        count = math.ceil(_ROUND * len(left))
        gone, left = gone + left[:count], left[count:]
        moved = _moved(of, gone, left) if len(left) > 1 else moved
    result[gone] = alone[switches].sort().values
    return result


def _moved(of: Subject, gone: Sequence[int], switches: Sequence[int]) -> Tensor:
    """‖o − o'‖² of each of these switches, o' without it and those that are gone.

    Shape: ``(plan.size,)``, float64; 0 but for these switches.
    """
    open_ = torch.ones_like(of.gates.log_alpha)

    def found() -> Iterator[tuple[Tensor, int]]:
        for run, length in of.answers():
            whole, values = run(open_), torch.zeros(of.plan.size, dtype=torch.float64)
            for number in switches:
                closed = torch.tensor([*gone, number], device=open_.device)
                without = run(open_.index_fill(0, closed, 0))
                values[number] = float((without - whole).square().sum()) / length
            yield values, length

    return mean_over_examples(found())
