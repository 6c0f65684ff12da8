"""Where gates start from: all alike, or as far open as a one-shot score says that they matter."""

from __future__ import annotations

import torch
from torch import nn

from l0prune.errors import DataError, UsageError
from l0prune.gating.attaching import gates_of
from l0prune.running.processes import World
from l0prune.running.stages import stage
from l0prune.running.task import Task
from l0prune.selection.scores import score
from l0prune.training.phases import Phases
from l0prune.training.settings import ALIKE, AUTO, Settings
from l0prune.training.wrappers import agree_on_start

USUAL = "fisher"
_PART = 0.05  # of the steps in which gates learn: a batch of a score costs about as much as one
_BATCHES = range(10, 101)


def begin(
    model: nn.Module,
    task: Task,
    settings: Settings,
    phases: Phases,
    steps: int,
    device: torch.device,
    world: World,
) -> str:
    """Let the gates start from the score that is wanted, in place; what there is to say of it.

    One process tells the score, and all have what it found.

    Args:
        model: a gated model.
        task: the data and the loss.
        settings: of the run; ``start`` is what is wanted.
        phases: of the run.
        steps: batches in a pass over the data.
        device: where to look at them.
        world: the processes that train.

    Raises:
        UsageError: the score cannot be told of this data; where none was asked for by name, the
            gates start alike then, and it is said why. So it is with a DataError.
    """
    how = _wanted(model, settings, phases)
    if how == ALIKE:
        return ""
    looks = min(steps, batches(phases.learning))

    def lean() -> str:
        try:
            found = score(
                model,
                how,
                task,
                batches=looks,
                batch_size=settings.batch_size,
                device=device,
                seed=settings.seed,
            )
        except (UsageError, DataError) as error:
            if settings.start != AUTO:
                raise
            return f"start: the gates start alike: {error}"
        gates_of(model).lean(found)
        return f"start: gates as their {how} scores say, told from {looks} batches"

    with stage(f"the score {how}, from which the gates start"):
        said = world.first_alone(lean)
    agree_on_start(model, world)
    return said or ""


def batches(learning: int) -> int:
    """Of data that a score is told from, where gates learn for so many steps."""
    return min(max(round(_PART * learning), _BATCHES[0]), _BATCHES[-1])


def _wanted(model: nn.Module, settings: Settings, phases: Phases) -> str:
    """The name of the score, or ``ALIKE``."""
    if not phases.learning:
        return ALIKE
    if settings.start != AUTO:
        return settings.start
    starts = settings.budget is not None and gates_of(model).stand_alike()
    return USUAL if starts else ALIKE
