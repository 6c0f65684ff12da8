"""Processes that go away without a word are noticed; those that leave, or take long, are not."""

import threading
import time

import pytest
import torch.distributed as dist

from l0prune.errors import UsageError
from l0prune.running.heartbeat import Heartbeat, lost_after

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
AFTER = 0.5


class Process:
    """One of several that share a store: what it said, and whether it was ended."""

    def __init__(self, store, rank, size=3):
        self.said, self.ended, self.store = [], threading.Event(), store
        self.beat = Heartbeat(store, "key", rank, size, AFTER, self.said.append, self.ended.set)


class Store:
    """A store over a connection of one's own, which may be cut."""

    def __init__(self, shared):
        self.shared, self.is_cut = shared, threading.Event()

    def set(self, key, value):
        self._wait()
        self.shared.set(key, value)

    def multi_get(self, keys):
        self._wait()
        return self.shared.multi_get(keys)

    def _wait(self):
        while self.is_cut.is_set():  # as a connection to a machine that has gone
            time.sleep(0.01)


@pytest.fixture
def three():
    shared = dist.HashStore()
    processes = [Process(Store(shared), rank) for rank in range(3)]
    for each in processes:
        each.beat.start()
    yield processes
    for each in processes:
        each.store.is_cut.clear()
        each.beat.stop()


def test_one_that_is_silent_ends_the_others_and_one_of_them_says_so(three):
    three[1].store.is_cut.set()
    assert three[0].ended.wait(10 * AFTER)
    assert three[2].ended.wait(10 * AFTER)
    (said,) = three[0].said
    assert said.startswith("contact with process 1 was lost: there was no sign of life for 0.5 s")
    assert three[2].said == []
    assert three[1].ended.wait(10 * AFTER)  # which sees that it is alone
    assert "contact with the other machines was lost" in three[1].said[0]


@pytest.mark.slow
def test_those_that_leave_and_those_that_beat_are_not_lost(three):
    three[2].beat.stop()
    time.sleep(3 * AFTER)
    assert not any(each.ended.is_set() or each.said for each in three)


def test_the_seconds_are_a_number(monkeypatch):
    assert lost_after() == 120
    monkeypatch.setenv("L0PRUNE_LOST_AFTER", "7.5")
    assert lost_after() == 7.5
    for text in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("L0PRUNE_LOST_AFTER", text)
        with pytest.raises(UsageError, match=f"L0PRUNE_LOST_AFTER={text} is no number of seconds"):
            lost_after()
