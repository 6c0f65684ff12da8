"""The amounts in a record: of each measure what is expected, what an export has, the dense one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EXPECTED, _DENSE = "expected_", "dense_"


@dataclass(frozen=True)
class Amount:
    """Amounts of one measure of a network.

    Attributes:
        expected: over the gates' noise.
        actual: of an export with the gates as they are.
        dense: with all gates open.
    """

    expected: float
    actual: float
    dense: float

    def share(self, amount: float) -> float:
        """An amount as a share of the dense one."""
        return amount / self.dense if self.dense else 0.0

    def entries(self, name: str) -> dict[str, float]:
        """Return the amounts as in a record, for the measure of this name."""
        values = (self.expected, self.actual, self.dense)
        return dict(zip(keys(name), values, strict=True))


def keys(name: str) -> tuple[str, str, str]:
    """Return the names of a measure's amounts in records."""
    return f"{_EXPECTED}{name}", name, f"{_DENSE}{name}"


def amounts(record: Mapping[str, Any]) -> dict[str, Amount]:
    """The amounts in a record, by the names of the measures."""
    names = [key.removeprefix(_DENSE) for key in record if key.startswith(_DENSE)]
    return {
        name: Amount(record.get(f"{_EXPECTED}{name}", record[name]), record[name], record[dense])
        for name in names
        if (dense := f"{_DENSE}{name}") and name in record
    }
