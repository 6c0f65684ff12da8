"""Widths as a wish on the model zoos: is every width as asked, and if not, why not.

    python -m benchmarks.widths --zoo torchvision|timm|transformers|small [--models resnet18 …]
    python -m benchmarks.widths --zoo torchvision --width 0.25 --export
    python -m benchmarks.widths --zoo transformers --loadable [--uniform] [--models bert …]

Gates on every axis, then ``fit`` with ``width=0.5``. A row says how many axes have just the slots
that were asked for (that share, rounded down, at least one), and for each other axis how many it
has and the reason that was given: an axis that is otherwise without one counts as a miss. What
is pinned has its reason in the survey; its share of the MACs is in ``benchmarks.coverage``. With
``--export`` the cut model is also written and compared with the gated one in float64.

With ``--loadable`` gates are on what transformers loads by itself (``loadable_by``), and half of
the MACs that widths reach is cut, and the first layer where it can go. The folder is loaded by
transformers alone, and its outputs are compared with the small module's in float32. One process
per model (``benchmarks.isolation``); rows are in ``runs/widths-ZOO.jsonl`` and
``runs/loadable-ZOO.jsonl``.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from math import floor

import torch

import l0prune
from benchmarks import isolation, zoo
from benchmarks.isolation import ROOT, Row
from benchmarks.runner import ALONE, One, alone, options
from l0prune.exporting.certify.certificate import MODEL
from l0prune.exporting.certify.difference import difference
from l0prune.plan.branch import KIND
from l0prune.plan.switches import switches_of


def steps(which: str, name: str, *, width: float, is_exported: bool) -> Iterator[Row]:
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
        small = l0prune.export(model)
        yield {
            "float64": small.certificate.worst(MODEL, "float64"),
            "widths": all(small.widths[axis.name][0] == int(axis.open.sum()) for axis in axes),
        }


def loading_steps(which: str, name: str, *, uniform: bool) -> Iterator[Row]:
    """One model of transformers that is cut so that transformers loads it by itself."""
    import transformers

    model, (args, kwargs) = zoo.build(which, name)
    yield {"step": "gate"}
    start = time.perf_counter()
    l0prune.gate(model, args, kwargs, loadable_by="transformers", uniform=uniform)
    seconds, plan = round(time.perf_counter() - start, 2), l0prune.gates(model).plan
    yield {"axes": len(plan.axes), "groups": plan.together, "gate_s": seconds, "step": "fit"}
    macs = l0prune.measures.measure_of(plan, "macs")
    least = macs.actual(switches_of(plan)) / macs.dense()
    l0prune.fit(model, f"macs={(1 + least) / 2:.3f}", l0prune.score(model, "magnitude"))
    kinds = {axis.name: axis.kind for axis in plan.axes}
    layer = next((group for group in plan.together if kinds[group[0]] == KIND), ())
    for name_of_branch in layer:
        l0prune.gates(model).set_open(name_of_branch, [])
    yield {"reach": round(macs.reachable(), 3), "gone": layer, "step": "export"}
    small = l0prune.export(model)
    with tempfile.TemporaryDirectory() as folder:
        said = small.save_pretrained(folder).splitlines()[-1]
        yield {"macs": small.macs / small.macs_before, "said": said, "step": "load"}
        loaded = getattr(transformers, type(model).__name__).from_pretrained(folder).eval()
    with torch.no_grad():
        outputs = (each(*args, **kwargs) for each in (small.module, loaded))
        yield {"loaded": difference(*outputs)}


def loading_summary(row: Row) -> str:
    """One line for the terminal."""
    if "loaded" not in row:
        return isolation.failure(row) or f"{row['model']:36} no"
    return (
        f"{row['model']:24} gates reach {row['reach']:6.1%} of the MACs, {row['macs']:6.1%} left, "
        f"{len(row['gone'])} branches gone, loaded by transformers alone, error {row['loaded']:.0e}"
    )


def summary(row: Row) -> str:
    """One line for the terminal."""
    if failed := isolation.failure(row):
        return failed
    reason = f" with a reason {len(row['other']) - len(row['missed'])}" * bool(row["other"])
    missed = f" MISSED {len(row['missed'])}" * bool(row["missed"])
    exact = f" float64 {row['float64']:.0e}" if "float64" in row else ""
    found = f"axes {row['axes']:4} as asked {row['asked']:4}"
    return f"{row['model']:36} {found}{reason}{missed}{exact}"


def main() -> None:
    given = options(
        __doc__, zoo=One(zoo.ZOOS), width=(0.5, "share of each axis, at most 1"), **ALONE,
        export=(False, "compare what is cut, too"), loadable=(False, "see above"),
        uniform=(False, "with --loadable: one share"),
    )  # fmt: skip
    kind = "loadable" if given.loadable else "widths"
    end = "-uniform" * (given.loadable and given.uniform)
    path = ROOT / "runs" / f"{kind}-{given.zoo}{end}.jsonl"
    also = [f"--{name}" for name in ("loadable", "uniform", "export") if getattr(given, name)]
    also += ["--width", f"{given.width:g}"]
    if given.loadable:
        measured, said = partial(loading_steps, uniform=given.uniform), loading_summary
    else:
        measured, said = partial(steps, width=given.width, is_exported=given.export), summary
    found = alone(given, "widths", path, measured, said, also)
    if given.loadable:
        print(f"{sum('loaded' in row for row in found)} of {len(found)} models loaded")
        return
    good = [row for row in found if "asked" in row and "crash" not in row and "refused" not in row]
    axes, asked = (sum(row[name] for row in good) for name in ("axes", "asked"))
    missed = sum(len(row["missed"]) for row in good)
    print(
        f"{len(good)} of {len(found)} models: {asked:,} of {axes:,} axes as asked, "
        f"{axes - asked - missed} with a reason, {missed} missed"
    )


if __name__ == "__main__":
    main()
