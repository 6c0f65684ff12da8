"""Results of a fit, for those who watch it.

with watched(print):
    l0prune.fit(model, "latency=0.5", latency=table)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from l0prune.running.stages import Happenings


@dataclass(frozen=True)
class Look:
    """Observation of one choice of widths, for one budget; amounts in its measure's unit.

    Attributes:
        budget: its text.
        dense: the dense network's amount.
        allowed: the largest amount that the budget allows.
        predicted: of this choice.
        observed: of its export.
        chosen: whether this choice is the one that was taken.
    """

    budget: str
    dense: float
    allowed: float
    predicted: float
    observed: float
    chosen: bool


@dataclass(frozen=True)
class Fitted:
    """A choice of slots.

    Attributes:
        filling: by axis, how many slots stay only since its slots come in whole blocks; axes
            without any are left out.
        looks: in their order, at each choice that was looked at; empty where nothing was observed.
    """

    filling: dict[str, int]
    looks: tuple[Look, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"filling": self.filling, "looks": [asdict(look) for look in self.looks]}


_fits: Happenings[Fitted] = Happenings("fits")
watched, done = _fits.watched, _fits.tell
