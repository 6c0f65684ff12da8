"""Divisor: a number of a configuration that has to divide another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Divisor:
    """Number of a configuration that has to divide another, as heads do the hidden size.

    Attributes:
        axis: name of the axis that the first number follows, with ``each`` for a slot.
        each: see ``axis``.
        other: name of the axis that the second number follows, with ``of_other`` for a slot.
        of_other: see ``other``.
        whole: slots of the other axis where none is cut.
    """

    axis: str
    each: int
    other: str
    of_other: int
    whole: int

    def among(self, widths: Iterable[int], other: int) -> tuple[int, ...]:
        """Return the widths of the axis whose number divides that of ``other`` slots."""
        return tuple(w for w in widths if w and self.of_other * other % (self.each * w) == 0)
