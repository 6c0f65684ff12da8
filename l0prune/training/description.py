"""Records of a run for people: one in a line, all in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from l0prune.cost.measures import kind_of
from l0prune.running.amounts import Amount, amounts, keys
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
        parts += [f"{_label(name)} {share(name, of)}" for name, of in amounts(record).items()]
        parts.append(_widths(record["open"]))
    if "seconds" in record:
        parts.append(f"{record['seconds']:.1f} s")
    if record.get("dead"):
        parts.append(f"no open gate left in {', '.join(record['dead'])}")
    return "  ".join(parts)


def measured(record: dict[str, Any]) -> list[str]:
    """The metric on the test data, or the loss where there is no metric; nothing without either."""
    taken = TAKEN.union(*map(keys, amounts(record)))
    metrics = [n for n, v in record.items() if n not in taken and isinstance(v, float)]
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
    measures = dict.fromkeys(name for record in shown for name in amounts(record))
    columns = ("epoch", "phase", "loss", "on the test data", *map(_label, measures))
    result = Table(*columns, title=title)
    for record in shown:
        found = amounts(record) if "open" in record else {}
        result.add_row(
            str(record["epoch"]),
            record["phase"],
            f"{record['train_loss']:.4f}",
            Text(", ".join(measured(record))),
            *(share(name, found[name]) if name in found else "" for name in measures),
        )
    return result


def share(name: str, amount: Amount) -> str:
    """The amount of this measure that an export would have, and its share of the dense one."""
    if not amount.dense:
        return "0"
    return f"{kind_of(name).brief(amount.actual)} ({100 * amount.actual / amount.dense:.1f} %)"


def _label(name: str) -> str:
    return kind_of(name).label


def _widths(counts: dict[str, int]) -> str:
    if len(counts) <= _FEW:
        return "-".join(map(str, counts.values()))
    return f"{sum(counts.values())} open"
