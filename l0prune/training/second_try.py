"""What fails at the sizes that a cut has left is done again on the whole network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from l0prune.errors import L0pruneError
from l0prune.training.pruner import Pruner

T = TypeVar("T")


def tried(
    pruner: Pruner | None, action: Callable[[], T], undo: Callable[[], None] | None = None
) -> T:
    """What ``action`` gives; where it fails, what it gives once the network is whole, as it stays.

    A loss, a metric or a forward of the user's may know the network as it was. Which error that is
    depends on what they do with it.

    Args:
        pruner: of the run, whose network may be cut; None where it is not to be made whole.
        action: raises what is wrong at any size, too.
        undo: undoes what it did before it failed; None where that is nothing.
    """
    try:
        return action()
    except L0pruneError:
        raise
    except Exception as error:
        if pruner is None or pruner.compaction.cut is None:
            raise
        if undo is not None:
            undo()
        pruner.make_whole()
        result = action()  # or it fails for another reason
        pruner.keep_whole(f"what knows its own sizes fails at those that are left: {error}")
        return result
