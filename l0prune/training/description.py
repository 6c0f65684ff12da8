"""Records of a run for people: one in a line, all in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from l0prune.running.task import LOSS, TAKEN

_FEW = 8  # so many axes are shown one by one
_ROWS = 20
IN_PERCENT = ("error", "accuracy", "label-error")


def describe(record: dict[str, Any], epochs: int) -> str:
    """A record in one line."""
    parts = [f"epoch {record['epoch']}/{epochs}", f"{record['phase']:7}"]
    parts.append(f"loss {record['train_loss']:.4f}")
    parts += measured(record)
    if "open" in record:
        parts += [share("params", record), share("MACs", record), _widths(record["open"])]
    if "seconds" in record:
        parts.append(f"{record['seconds']:.1f} s")
    if record.get("dead"):
        parts.append(f"no open gate left in {', '.join(record['dead'])}")
    return "  ".join(parts)


def measured(record: dict[str, Any]) -> list[str]:
    """The metric on the test data, or the loss where there is no metric; nothing without either."""
    metrics = [n for n, v in record.items() if n not in TAKEN and isinstance(v, float)]
    if not metrics and LOSS in record:
        return [f"test loss {record[LOSS]:.4g}"]
    return [
        f"{name} {100 * record[name]:.2f} %" if name in IN_PERCENT else f"{name} {record[name]:.4g}"
        for name in metrics
    ]


def table(records: Sequence[dict[str, Any]]) -> Table:
    """The records, one in a row; of many epochs some, the last among them."""
    every = max(1, math.ceil(len(records) / _ROWS))
    shown = records[::-every][::-1]
    title = f"{len(records)} epochs" + (f", one in {every}" if every > 1 else "")
    result = Table("epoch", "phase", "loss", "on the test data", "params", "MACs", title=title)
    for record in shown:
        counts = [share(unit, record) if "open" in record else "" for unit in ("params", "MACs")]
        result.add_row(
            str(record["epoch"]),
            record["phase"],
            f"{record['train_loss']:.4f}",
            Text(", ".join(measured(record))),
            *(count.partition(" ")[2] for count in counts),
        )
    return result


def share(label: str, record: dict[str, Any]) -> str:
    """The count of this unit that an export would have, and its share of the dense one."""
    now, dense = record[label.lower()], record[f"dense_{label.lower()}"]
    return f"{label} {_short(now)} ({100 * now / dense:.1f} %)" if dense else f"{label} 0"


def _widths(counts: dict[str, int]) -> str:
    if len(counts) <= _FEW:
        return "-".join(map(str, counts.values()))
    return f"{sum(counts.values())} open"


def _short(count: int) -> str:
    """A count in three digits: 77.3 k, 1.82 G."""
    value, units = float(count), ["", " k", " M", " G", " T"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g}{units[0]}"
