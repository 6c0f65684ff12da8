"""States of all random generators that training draws from."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def capture(device: torch.device, own: Iterable[torch.Generator] = ()) -> State:
    """Return the state of all global and ``own`` generators as plain data."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    inner = numpy["state"]
    state: State = {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**inner, "key": torch.from_numpy(inner["key"].astype("i8"))}},
        "torch": torch.get_rng_state(),
        "own": [generator.get_state() for generator in own],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: State, device: torch.device, own: Iterable[torch.Generator] = ()) -> None:
    """Restore what ``capture`` returned; the device's state only if it is of a GPU as well."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    inner = state["numpy"]["state"]
    key = inner["key"].numpy().astype("u4")
    np.random.set_state({**state["numpy"], "state": {**inner, "key": key}})
    torch.set_rng_state(state["torch"])
    for generator, own_state in zip(own, state["own"], strict=True):
        generator.set_state(own_state)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed all generators but ``own`` ones, differently in each process."""
    seed += rank * 7_368_787
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def preserved(device: torch.device, own: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restore the random generators' states after the context."""
    own = list(own)
    before = capture(device, own)
    try:
        yield
    finally:
        restore(before, device, own)
