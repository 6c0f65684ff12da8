"""What goes before the first step: the part of the way to a budget of which scores are sure.

A score tells slots from each other, and another branches; how many branches are worth as much as
which widths, neither says. So the same part is cut in several ways, from widths alone to branches
alone, and what the loss is then decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.objective.budget import Budget
from l0prune.plan.switches import switches_of, without_idle
from l0prune.selection.subject import Subject

TRIED = 12  # that are tried beside widths alone, at most: each costs a forward


def left(subject: Subject, budget: Budget, part: float, scores: Tensor) -> Tensor:
    """The gates that are open once a part of the way is gone; bool, flat, on the CPU.

    Args:
        subject: the gated network, and a batch or more of data.
        budget: where the way leads.
        part: of it, see ``Budget.after``.
        scores: of slots and of branches, shape ``(plan.size,)``.

    Raises:
        UsageError: nothing is as small as that.
    """
    ways = list(_ways(subject, budget, part, scores))
    if not ways:
        return budget.after(part, scores, subject.gates.open().cpu() & ~switches_of(subject.plan))
    losses = subject.losses(ways) if len(ways) > 1 else None
    return ways[0] if losses is None else ways[int(losses.nan_to_num(torch.inf).argmin())]


def _ways(subject: Subject, budget: Budget, part: float, scores: Tensor) -> Iterator[Tensor]:
    """Open gates with ever more branches gone, those of lowest score first, and so fewer slots."""
    switches = switches_of(subject.plan).nonzero().flatten()
    order = switches[scores[switches].argsort(stable=True)]
    open_now = subject.gates.open().cpu()
    for count in range(0, len(order) + 1, max(1, ceil(len(order) / TRIED))):
        start = open_now.index_fill(0, order[:count], False)
        try:
            open_ = budget.after(part, scores, start)
        except UsageError:  # more of the branches have to go
            continue
        yield open_
        if torch.equal(open_, without_idle(subject.plan, start)):  # no slot closes any more
            return
