"""The state of a ``Pruner``: which one belongs to which run."""

from __future__ import annotations

from typing import Any

from l0prune.errors import UsageError
from l0prune.training.phases import Phases

FORMAT = 1
_KEYS = {"format", "axes", "phases", "step", "begun", "budget", "own", "doctor", "work", "cut"}


def check(
    state: dict[str, Any], axes: list[list[Any]], phases: Phases, *, has_budget: bool
) -> None:
    """Refuse a state that is not of such a run.

    Args:
        state: what ``Pruner.state_dict`` gave.
        axes: name and size of each axis of the model that it is for.
        phases: of the run.
        has_budget: does the run have one?

    Raises:
        UsageError: it is of another version, model or run.
    """
    if not isinstance(state, dict) or not state.keys() >= _KEYS or state["format"] != FORMAT:
        raise UsageError("this is no state of a Pruner of this version of l0prune")
    if state["axes"] != axes:
        raise UsageError(
            "this state is of a Pruner for another model: its gates are on other axes. Load "
            "it into the Pruner of a model that was gated in the same way"
        )
    mine = [phases.total, phases.warmup, phases.settle]
    if list(state["phases"]) != mine:
        raise UsageError(
            f"this state is of a run of {state['phases'][0]} steps ({state['phases'][1]} of "
            f"warm-up, {state['phases'][2]} of settling), and this Pruner is for {mine[0]} "
            f"({mine[1]}, {mine[2]}): make it with the same steps, warmup and settle"
        )
    if bool(state["budget"]) != has_budget:
        raise UsageError("this state is of a run with another budget: give the same")
