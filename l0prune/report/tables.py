"""The survey's tables, short enough to read for networks of any depth."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from l0prune.plan.layout import axes_of
from l0prune.plan.plan import Axis, Plan
from l0prune.report.layers import UNUSED, Layer, Side
from l0prune.report.name_patterns import grouped, pattern, several, together


def tables(
    plan: Plan, layers: Sequence[Layer], params: int, macs: int
) -> Iterator[Table | Text | str]:
    """Tables of a survey: what can be cut; layers, equal ones in one row; the next command."""
    if plan.axes:
        yield _axes(plan)
    if layers:
        yield _layers(layers, params, macs)
    rest = macs - sum(layer.macs for layer in layers)
    if macs and rest / macs > 0.0005:
        yield (
            f"The other {rest / macs:.1%} of the MACs multiply activations with one another, or "
            "with weights that the forward computes."
        )
    hints = [s.reason.partition("; ")[2] for x in layers for s in (x.input, x.output)]
    yield from map(Text, dict.fromkeys(hint for hint in hints if hint))


def _axes(plan: Plan) -> Table:
    """The axes, those whose names differ in counters only together."""
    table = _table("Can be cut", "axis", "slots", "gates multiply")
    sites: dict[int, list[str]] = {}
    for site in plan.sites:
        for number in axes_of(site.layout):
            sites.setdefault(number, []).append(site.tensor)

    def alike(numbered: tuple[int, Axis]) -> tuple[str, str]:
        return pattern(numbered[1].name), numbered[1].kind

    for group in grouped(enumerate(plan.axes), alike):
        sizes, kind = _range([axis.size for _, axis in group]), group[0][1].kind
        table.add_row(
            together([axis.name for _, axis in group]),
            _times(len(group), f"{sizes} {kind}s"),
            several(name for number, _ in group for name in sites.get(number, ())),
        )
    return table


def _layers(layers: Sequence[Layer], params: int, macs: int) -> Table:
    """Every layer. Its two sides name their axes, or say why they stay whole."""
    title = "Every layer: what can be cut on its two sides, or why it stays whole"
    table = _table(title, "layer", "input side", "output side")
    for column in ("params", "MACs"):
        table.add_column(column, justify="right")
    for group in grouped(layers, _alike):
        inputs, outputs = _side([x.input for x in group]), _side([x.output for x in group])
        table.add_row(
            together([x.name for x in group]) + "\n  " + _times(len(group), group[0].kind),
            inputs,
            outputs if group[0].used else "",
            _percent(sum(x.params for x in group), params),
            _percent(sum(x.macs for x in group), macs),
        )
    return table


class _PlainTable(Table):
    """A table whose cells are shown as they are: names may hold brackets, which rich reads."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(cell) for cell in cells), **options)


def _table(title: str, *columns: str) -> Table:
    table = _PlainTable(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")  # names are there to be copied: never cut short
    return table


def _alike(layer: Layer) -> tuple[Hashable, ...]:
    """Return the key that layers in one row share."""
    carries = layer.input.axes == layer.output.axes
    sides = (_short(layer.input), _short(layer.output))
    return (pattern(layer.name), layer.kind, carries, *sides)


def _short(side: Side) -> str:
    """Return the key by which sides of different rows differ."""
    return ", ".join(dict.fromkeys(map(pattern, side.axes))) + " | " + pattern(_why(side))


def _side(sides: Sequence[Side]) -> str:
    """The sides of layers that share a row, in words."""
    names = several(name for side in sides for name in side.axes)
    why = together([_why(side) for side in sides])
    if not names:
        return why if why == UNUSED else f"whole: {why}"
    if not why:
        return names
    return f"{names}; {_shares([1 - side.share for side in sides])} whole: {why}"


def _why(side: Side) -> str:
    """The reason without the hint on what to do."""
    return side.reason.partition("; ")[0]


def _shares(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _times(count: int, what: str) -> str:
    return what if count == 1 else f"{count} × {what}"


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part and whole else "-"
