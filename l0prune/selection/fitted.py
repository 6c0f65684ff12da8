"""Result of a fit, as plain data and as an event for callbacks::

with watched(print):
    l0prune.fit(model, "latency=0.5", latency=table)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from l0prune.files.checked_json import Strict
from l0prune.progress.stages import Events


class Observation(Strict):
    """Observation of one choice of widths, for one budget; amounts in its measure's unit.

    Attributes:
        budget: its text.
        dense: the dense network's amount.
        allowed: the largest amount that the budget allows.
        predicted: of this choice.
        observed: of its export.
        chosen: whether this choice is the one that was taken.
    """

    model_config = ConfigDict(allow_inf_nan=False)

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
        filling: by axis, how many slots stay only to complete whole blocks; axes
            without any are left out.
        looks: observations of each choice, in their order; empty where nothing was observed.
    """

    filling: dict[str, int]
    looks: tuple[Observation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return both attributes as plain data."""
        return {"filling": self.filling, "looks": [look.model_dump() for look in self.looks]}


_fits: Events[Fitted] = Events("fits")
watched, done = _fits.watched, _fits.emit
