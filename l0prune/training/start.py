"""Where gates start from: all alike, or as far open as a one-shot score says that they matter.

By default those of slots by a first-order score; those of branches, of which that says little, by
what the outputs do without them.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from l0prune.errors import DataError, UsageError
from l0prune.gating.attaching import gates_of, holder
from l0prune.objective.budget import Budget
from l0prune.plan.switches import switches_of
from l0prune.running.processes import World
from l0prune.running.stages import stage
from l0prune.running.task import Task
from l0prune.selection.scores import score
from l0prune.selection.subject import Subject
from l0prune.training import at_once
from l0prune.training.pruner import Pruner
from l0prune.training.settings import ALIKE, AUTO, Settings
from l0prune.training.wrappers import agree_on_start

USUAL, OF_BRANCHES = "fisher", "removal"
_PART = 0.05  # of the steps in which gates learn: a batch of a score costs about as much as one
_BATCHES = range(10, 101)
FORWARDS = 5  # that a branch takes on a batch, each
_FORWARD = 1 / 3  # of a step
_EXAMPLES = range(8, 33)  # of a batch on which branches are tried: few tell them apart


def begin(
    model: nn.Module,
    task: Task,
    settings: Settings,
    pruner: Pruner,
    steps: int,
    device: torch.device,
    world: World,
) -> str:
    """Let the gates start from the score that is wanted, in place; what there is to say of it.

    One process tells the score, and all have what it found.

    Args:
        model: a gated model.
        task: the data and the loss.
        settings: of the run; ``start`` and ``at_once`` are what is wanted.
        pruner: of the run; its budget says what is closed at once.
        steps: batches in a pass over the data.
        device: where to look at them.
        world: the processes that train.

    Raises:
        UsageError: the score cannot be told of this data; where none was asked for by name, the
            gates start alike then, and it is said why. So it is with a DataError.
    """
    learning = pruner.phases.learning
    how = _wanted(model, settings, learning)
    if how == ALIKE:
        return ""
    gates = gates_of(model)
    switches = switches_of(gates.plan)
    size = settings.batch_size
    looks = {how: (min(steps, batches(learning)), size)}
    if settings.start == AUTO and switches.any():
        tries, few = tried_on(learning, size, int(switches.sum()))
        most = math.ceil(steps * size / few)
        looks = ({} if switches.all() else looks) | {OF_BRANCHES: (min(most, tries), few)}
    tell = partial(score, model, data=task, device=device, seed=settings.seed)

    def lean() -> str:
        try:
            found = [tell(name, batches=n, batch_size=each) for name, (n, each) in looks.items()]
        except (UsageError, DataError) as error:
            if settings.start != AUTO:
                raise
            return f"start: the gates start alike: {error}"
        scores = torch.where(switches, found[-1], found[0])
        gates.lean(scores)
        told = (f"{name} of {n} batch{'es' * (n > 1)}" for name, (n, _) in looks.items())
        said = f"start: gates as their scores say: {', '.join(told)}"
        if pruner.budget is None or not settings.at_once:
            return said
        subject = Subject(*holder(model), task, 1, size, device, settings.seed)
        return f"{said}; {_cut(subject, pruner.budget, settings.at_once, scores)}"

    with stage(f"the score {', '.join(looks)}, from which the gates start"):
        said = world.from_first(world.first_alone(lean))
    agree_on_start(model, world)
    return said or ""


def _cut(subject: Subject, budget: Budget, part: float, scores: Tensor) -> str:
    """Close what goes at once, in place; what there is to say of it."""
    try:
        open_ = at_once.left(subject, budget, part, scores)
    except UsageError as error:
        return f"nothing is cut at once: {error}"
    subject.gates.put(open_)
    shares = (f"{text}: {share:.0%}" for text, share in budget.shares(open_).items())
    return f"cut at once: {', '.join(shares)} stays"


def batches(learning: int) -> int:
    """Of data that a score is told from, where gates learn for so many steps."""
    return min(max(round(_PART * learning), _BATCHES[0]), _BATCHES[-1])


def tried_on(learning: int, size: int, branches: int) -> tuple[int, int]:
    """Batches on which branches are tried, each by some forwards, for as much work again.

    Args:
        learning: steps in which gates learn.
        size: of their batches.
        branches: how many there are.

    Returns:
        How many batches, and of how many examples.
    """
    bear = _PART * learning * size / (FORWARDS * _FORWARD * max(branches, 1))
    few = min(size, max(_EXAMPLES[0], min(round(bear), _EXAMPLES[-1])))
    return max(1, round(bear / few)), few


def _wanted(model: nn.Module, settings: Settings, learning: int) -> str:
    """The name of the score, or ``ALIKE``."""
    if not learning:
        return ALIKE
    if settings.start != AUTO:
        return settings.start
    starts = settings.budget is not None and gates_of(model).stand_alike()
    return USUAL if starts else ALIKE
