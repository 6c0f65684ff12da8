"""Processes that are started again meet at a new place, whatever the attempt before has left."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from l0prune.errors import TrainingError
from l0prune.running.meeting import fresh_store

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def met(store, ranks, first_waits=0.0):
    """The stores that processes of one attempt come to, by rank."""
    found = {}

    def come(rank):
        found[rank] = fresh_store(store, rank, len(ranks))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        thread.join(first_waits)
    for thread in threads:
        thread.join(10)
    return found


def test_each_attempt_has_a_store_of_its_own_in_which_all_see_the_same():
    shared = dist.HashStore()
    for attempt in ("first", "second", "third"):
        # Those of the later attempts come before the first process does, and find what is old.
        found = met(shared, [1, 2, 0] if attempt != "first" else [0, 1, 2], first_waits=0.1)
        assert sorted(found) == [0, 1, 2]
        assert not found[2].check(["at"])
        found[0].set("at", attempt)
        assert found[1].get("at") == found[2].get("at") == attempt.encode()


def test_a_first_process_that_does_not_come_is_said():
    shared = dist.HashStore()
    shared.set("l0prune/offer", "of an attempt before")
    shared.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(TrainingError, match="the first process did not come"):
        fresh_store(shared, 1, 2)
