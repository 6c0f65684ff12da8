"""When a run trains the network that its gates leave, and when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from l0prune.errors import L0pruneError
from l0prune.training.compaction import Compaction
from l0prune.training.gate_settings import Compact


class Shrinking:
    """Cuts a run's model when its setting says so; where that fails, says why, and never again.

    Args:
        compaction: of the model.
        when: see ``GateSettings.compact``.
        say: what is called with the text of a warning.
    """

    def __init__(self, compaction: Compaction, when: Compact, say: Callable[[str], None]) -> None:
        self._compaction, self._when, self._say = compaction, when, say
        self._has_failed = False

    def look_ahead(self, hindrance: str) -> None:
        """Before the first step: is it known that the network cannot be cut?"""
        if hindrance and self._when != "never":
            self._keep_whole(hindrance)

    def to_what_stands(self) -> None:
        """From the step on at which all gates stand."""
        if self._when != "never":
            self._attempt(self._compaction.begin)

    def to_what_is_open(self, *, begins: bool = False) -> None:
        """While gates learn: what was closed for long enough goes, or before they begin to."""
        if self._when == "auto":
            self._attempt(partial(self._compaction.look, begins=begins))

    def state_dict(self) -> dict[str, Any]:
        """How the model is cut, and whether that has failed."""
        return {**self._compaction.state_dict(), "failed": self._has_failed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be cut as a run was that goes on."""
        self._has_failed = state["failed"]
        if self._has_failed:
            self.stop()
        if self._when == "never":
            state = {**state, "kept": None}
        self._attempt(partial(self._compaction.load_state_dict, state))

    def stop(self) -> None:
        """Cut nothing from here on."""
        self._when = "never"

    def _attempt(self, cut: Callable[[], None]) -> None:
        try:
            cut()
        except L0pruneError as error:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """The model cannot be cut after all: nothing is, from here on, also after a stop."""
        self._has_failed = True
        self._keep_whole(reason)

    def _keep_whole(self, reason: str) -> None:
        self.stop()
        self._say(f"compact: the network keeps its size while it trains: {reason}")
