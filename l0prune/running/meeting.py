"""Rendezvous of processes that torchrun started, in a fresh part of their store.

Processes that torchrun restarts find the store of the previous attempt, with addresses of
processes that have ended, and would wait for these.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from l0prune.errors import TrainingError

_OFFER = "l0prune/offer"
_PAUSE = 0.02  # seconds between two polls


def fresh_store(store: Any, rank: int, size: int) -> Any:
    """Return a part of a store into which no earlier attempt of these processes has written.

    The first process offers a name for it, to which all others answer, each with a random number;
    the name is valid once the first has repeated their numbers. So no process takes an offer, an
    answer or a repetition of an earlier attempt for one of this attempt.

    Args:
        store: that all processes share, now and in earlier attempts.
        rank: number of this process, from 0.
        size: count of the processes.

    Raises:
        TrainingError: the first process does not come within the time limit of the store.
    """
    from torch.distributed.distributed_c10d import PrefixStore  # not in every torch

    mine = secrets.token_hex(8)
    if rank == 0:
        store.set(_OFFER, mine)
        answers = [f"l0prune/{mine}/{other}" for other in range(1, size)]
        numbers = [store.get(answer).decode() for answer in answers]  # waits for each
        store.set(f"l0prune/{mine}", ",".join(numbers))
        return PrefixStore(f"l0prune/{mine}/store", store)
    end = time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < end:
        offer = store.get(_OFFER).decode()
        store.set(f"l0prune/{offer}/{rank}", mine)
        stands = f"l0prune/{offer}"
        if store.check([stands]) and mine in store.get(stands).decode():
            return PrefixStore(f"{stands}/store", store)
        time.sleep(_PAUSE)
    raise TrainingError(
        "the first process did not come: torchrun started this one, and the other has ended or "
        "waits elsewhere. Start all of them again"
    )
