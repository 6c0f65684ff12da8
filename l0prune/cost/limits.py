"""Limits: what a network may cost at most, in all or through some of its axes.

macs=0.5                        half of the multiply-accumulates
params=10k                      ten thousand parameters
macs=50%, params=0.1            both at once
layer3.*: params=0.3            axes named layer3.…: what goes through them, to 30 %
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from l0prune.cost.model import UNITS, CostModel, Unit
from l0prune.errors import UsageError
from l0prune.plan.globs import matching

_NUMBER = re.compile(r"(?P<value>\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(?P<suffix>[%kKMGT]?)")
_FACTORS = {"": 1.0, "%": 0.01, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_FEWEST = 10  # no network is smaller
_HELP = "write macs=0.5, params=10k, 'macs=50%, params=0.1' or 'layer3.*: params=0.3'"


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a network may cost.

    Attributes:
        unit: ``"params"`` or ``"macs"`` (of one example).
        amount: a share of the dense count if at most 1, else the count itself.
        glob: names of the axes that are meant: only what some of their slots can take away is
            counted, and only they are closed for it. ``"*"`` is the whole network, with the
            part that no gate can remove.
    """

    unit: Unit
    amount: float
    glob: str = "*"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UsageError(f"a budget is one of {' or '.join(UNITS)}, not {self.unit!r}; {_HELP}")
        if not 0 < self.amount < float("inf"):
            raise UsageError(f"a budget must be more than 0, not {self.amount:g}; {_HELP}")
        if 1 < self.amount < _FEWEST:
            raise UsageError(
                f"a budget of {self.amount:g} is neither a share, which is at most 1 (100 %), nor "
                f"a count that a network could have; {_HELP}"
            )

    def __str__(self) -> str:
        amount = f"{self.amount:g}" if self.amount <= 1 else f"{self.amount:.15g}"
        where = "" if self.glob == "*" else f"{self.glob}: "
        return f"{where}{self.unit}={amount}"

    def share(self, dense: int) -> float:
        """The limit as a share of the ``dense`` count."""
        return self.amount if self.amount <= 1 else self.amount / dense

    def axes(self, cost: CostModel) -> frozenset[int] | None:
        """Numbers of the axes that are meant; None for the whole network.

        Raises:
            UsageError: no gated axis has such a name.
        """
        if self.glob == "*":
            return None
        return frozenset(matching(cost.plan.names, self.glob, f"the budget {self}"))


LimitsLike = str | Limit | Mapping[str, float | str] | Iterable[str | Limit]


def limits(given: LimitsLike) -> tuple[Limit, ...]:
    """Limits from a text, a mapping such as ``{"macs": 0.5}``, or a list of those texts.

    Raises:
        UsageError: it cannot be read, or names the same thing twice.
    """
    found = tuple(_limits(given))
    keys = [(limit.unit, limit.glob) for limit in found]
    if not found:
        raise UsageError(f"an empty budget limits nothing; {_HELP}")
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"the budget limits {key[0]} of {key[1]!r} twice; give one limit")
    return found


def _limits(given: LimitsLike) -> Iterable[Limit]:
    if isinstance(given, Limit):
        yield given
    elif isinstance(given, str):
        for part in given.split(","):
            yield _parse(part)
    elif isinstance(given, Mapping):
        for name, amount in given.items():
            yield _parse(f"{name}={amount}")
    elif isinstance(given, Iterable):
        for each in given:
            yield from _limits(each)
    else:
        raise UsageError(f"a {type(given).__name__} is no budget; {_HELP}")


def _parse(text: str) -> Limit:
    head, equals, amount = text.rpartition("=")
    glob, colon, unit = head.rpartition(":")
    if not equals or (colon and not glob.strip()):
        raise UsageError(f"cannot read the budget {text.strip()!r}; {_HELP}")
    number = _NUMBER.fullmatch(amount.strip())
    if number is None:
        raise UsageError(f"cannot read {amount.strip()!r} in the budget {text.strip()!r}; {_HELP}")
    value = float(number["value"]) * _FACTORS[number["suffix"]]
    if number["suffix"] == "%" and value > 1:
        raise UsageError(f"the budget {text.strip()!r} is more than the whole network; {_HELP}")
    return Limit(unit.strip(), value, glob.strip() or "*")  # type: ignore[arg-type]
