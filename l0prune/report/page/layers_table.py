"""Foot of the table of layers: sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l0prune.report.content import Content, Pair

REST, TOTAL = "outside these layers", "total"


@dataclass(frozen=True)
class Sum:
    """A row at the foot of the table."""

    name: str
    params: Pair
    macs: Pair


def sums(content: Content) -> list[Sum]:
    """All of the network, and what of it belongs to none of the layers, if anything does."""
    params, macs = content.gain.params, content.gain.macs
    if params is None or macs is None:
        return []
    total = Sum(TOTAL, params, macs)
    rest = Sum(
        REST,
        _without(params, [layer.params for layer in content.layers]),
        _without(macs, [layer.macs for layer in content.layers]),
    )
    amounts = [rest.params.before or 0, rest.params.after, rest.macs.before or 0, rest.macs.after]
    return [rest, total] if max(amounts) > 0 and min(amounts) >= 0 else [total]


def _without(all_: Pair, parts: Sequence[Pair]) -> Pair:
    before = (all_.before or 0) - sum(part.before or 0 for part in parts)
    return Pair(before=round(before), after=round(all_.after - sum(part.after for part in parts)))
