"""Widths as a wish on the model zoos: is every width as asked, and if not, why not.

    python -m benchmarks.widths --zoo torchvision|timm|transformers|small [--models resnet18 …]
    python -m benchmarks.widths --zoo torchvision --width 0.25 --shard 0/2 --export

Gates on every axis, then ``fit`` with ``width=0.5``. A row says how many axes have just the slots
that were asked for (that share, rounded down, at least one), and for each other axis how many it
has and the reason that was given: an axis that is otherwise without one counts as a miss. What
is pinned has its reason in the survey; its share of the MACs is in ``benchmarks.coverage``. With
``--export`` the cut model is also written and compared with the gated one in float64. One process
per model (``benchmarks.isolation``); rows are in ``runs/widths-ZOO.jsonl``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from math import floor

import torch

import l0prune
from benchmarks import isolation, zoo
from benchmarks.isolation import ROOT, Row
from l0prune.exporting.certify.certificate import MODEL


def steps(which: str, name: str, width: float, is_exported: bool) -> Iterator[Row]:
    """One model, step by step."""
    model, (args, kwargs) = zoo.build(which, name)
    yield {"step": "gate"}
    survey = l0prune.survey(model, args, kwargs, own_class=is_exported)
    l0prune.gate(model, args, kwargs, survey=survey, branches=False)
    scores = l0prune.score(model, "magnitude")
    yield {"step": "fit"}
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        l0prune.fit(model, f"width={width:g}", scores)
    said = " ".join(str(each.message) for each in caught)
    axes = l0prune.gates(model).axes
    other = {
        axis.name: [int(axis.open.sum()), axis.size]
        for axis in axes
        if int(axis.open.sum()) != max(1, floor(width * axis.size + 1e-9))
    }
    yield {
        "fit_s": round(time.perf_counter() - start, 2),
        "axes": len(axes),
        "asked": len(axes) - len(other),
        "other": other,
        "missed": [] if "not every width can be as asked" in said else list(other),
        "said": said,
        "step": "export",
    }
    if is_exported:
        dense = l0prune.export(model)
        yield {
            "float64": dense.certificate.worst(MODEL, "float64"),
            "widths": all(dense.widths[axis.name][0] == int(axis.open.sum()) for axis in axes),
        }


def summary(row: Row) -> str:
    """One line for the terminal."""
    if "crash" in row or "refused" in row:
        what = "CRASH" if "crash" in row else "refused"
        first = (row.get("crash") or row["refused"]).splitlines()[0]
        return f"{row['model']:36} {what} at {row.get('step', '?')}: {first[:160]}"
    reason = f" with a reason {len(row['other']) - len(row['missed'])}" * bool(row["other"])
    missed = f" MISSED {len(row['missed'])}" * bool(row["missed"])
    exact = f" float64 {row['float64']:.0e}" if "float64" in row else ""
    found = f"axes {row['axes']:4} as asked {row['asked']:4}"
    return f"{row['model']:36} {found}{reason}{missed}{exact}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", choices=zoo.ZOOS, default="torchvision")
    parser.add_argument("--models", nargs="+", help="by default all that have no result yet")
    parser.add_argument("--width", type=float, default=0.5, help="share of each axis, at most 1")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th model, from the i-th on")
    parser.add_argument("--export", action="store_true", help="compare what is cut, too")
    parser.add_argument("--limit", type=int, default=900, help="CPU seconds for one model")
    parser.add_argument("--total", action="store_true", help="count the rows, and no more")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        which, _, name = options.one.partition(":")
        isolation.measure(name, steps(which, name, options.width, options.export))
        return
    path = ROOT / "runs" / f"widths-{options.zoo}.jsonl"
    if not options.total:
        first, _, every = options.shard.partition("/")
        names = zoo.names(options.zoo)[int(first) :: int(every)]
        also = ["--width", f"{options.width:g}", *(["--export"] if options.export else [])]
        wanted = options.models or isolation.missing(path, names)
        limit = options.limit
        isolation.run("benchmarks.widths", path, options.zoo, wanted, limit, summary, also)
    found = isolation.rows(path)
    good = [row for row in found if "asked" in row and "crash" not in row and "refused" not in row]
    axes, asked = (sum(row[name] for row in good) for name in ("axes", "asked"))
    missed = sum(len(row["missed"]) for row in good)
    print(
        f"{len(good)} of {len(found)} models: {asked:,} of {axes:,} axes as asked, "
        f"{axes - asked - missed} with a reason, {missed} missed"
    )


if __name__ == "__main__":
    main()
