"""Coverage of the model zoos: what is captured, how much of it can be cut, and is the cut exact.

    python -m benchmarks.coverage --zoo ZOO [--models resnet18 …]
    python -m benchmarks.coverage --zoo transformers --sizes
    python -m benchmarks.coverage --zoo transformers --branches
    python -m benchmarks.coverage --page docs/coverage.md [--zoo ZOO: its section alone]
    python -m benchmarks.coverage --zoo threads [--page docs/threads.md]
    python -m benchmarks.coverage --zoo reports [--page docs/threads.md: their section alone]

One process per model, so that none can harm another, its peak memory is its own, and a run that
was stopped goes on where it was. Results are JSON lines in ``runs/coverage-ZOO.jsonl``; ``--page``
makes the documentation page from them.

For each model weights are random and nothing is trivial (see ``benchmarks.scramble``); half of
the gates are closed at random. Exactness is the largest difference between the gated and the
exported model in float64, and between the gated model and ONNX Runtime in float32, both relative
to the output's scale. With ``--sizes`` sides of images and lengths of texts are to be free beside
the batch, too, where the model's code allows it; that takes about twice the time. With
``--branches`` half of the branches are closed beside half of the slots (rows in
``runs/coverage-ZOO-branches.jsonl``); models without any are passed over.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import l0prune
from benchmarks import (
    isolation,
    report_steps,
    reports,
    reports_page,
    thread_steps,
    threads,
    today,
    zoo,
)
from benchmarks.coverage_page import page, with_section
from benchmarks.free_dims import possible
from benchmarks.isolation import ROOT, Row, parser_of
from benchmarks.reloading import kept_class, loaded_again
from benchmarks.scramble import scramble
from benchmarks.threads_page import page as threads_page
from benchmarks.threads_page import summary as threads_summary
from l0prune.capture.capture import capture
from l0prune.errors import L0pruneError
from l0prune.exporting.certify.certificate import MODEL

# Networks of threads in trackers, the line of each for the terminal, and what is done with one.
OF_USERS = {
    "threads": (threads.MODELS, threads_summary, thread_steps.steps),
    "reports": (reports.REPORTS, reports_page.summary, report_steps.steps),
}


def steps(
    which: str, name: str, with_sizes: bool = False, with_branches: bool = False
) -> Iterator[Row]:
    """One model, step by step; ``with_sizes`` other sizes than the batch are to be free."""
    if which in OF_USERS:
        yield from OF_USERS[which][-1](name)
        return
    model, (args, kwargs), loss = zoo.build_with_loss(which, name)
    yield {"step": "survey"} | ({"versions": today.versions()} if which == "today" else {})
    start = time.perf_counter()
    try:
        capture(model, args, kwargs)
        yield {"captured": True, "capture_s": round(time.perf_counter() - start, 2)}
    except L0pruneError:
        yield {"captured": False}
    start = time.perf_counter()
    survey = l0prune.survey(model, args, kwargs, own_class=False)
    yield {
        "plan_s": round(time.perf_counter() - start, 2),
        "axes": len(survey.axes),
        "kinds": Counter(axis.kind for axis in survey.axes),
        "slots": survey.plan.size,
        "params": survey.params,
        "macs": survey.macs,
        "params_share": round(survey.reachable("params"), 4),
        "macs_share": round(survey.reachable("macs"), 4),
        "whole": whole(survey),
        "branches": len(survey.branches),
        "unknown": sorted({p.operator for p in survey.pins if "unknown" in p.reason}),
        "step": "gate",
    }
    if with_branches and not survey.branches:
        return
    shapes = possible(model, args, kwargs) if with_sizes and survey.plan.parts == ("",) else None
    scramble(model, (args, kwargs), dynamic_shapes=shapes, branches=with_branches)
    if loss is not None:
        yield {"step": "loss"}
        yield {"loss": trained(model, loss)}
    yield {"step": "export"}
    small = l0prune.export(model)
    yield {
        "params_after": small.params,
        "macs_after": small.macs,
        "float64": small.certificate.worst(MODEL, "float64"),
        "float32": small.certificate.worst(MODEL, "float32"),
        "class": kept_class(small),
        "gone": len(small.gone),
        "note": small.note,
        "step": "onnx",
    }
    with tempfile.TemporaryDirectory() as folder:
        small.save_onnx(Path(folder) / "model.onnx", time=False)
        yield {
            "onnx": small.certificate.worst("onnx", "float32"),
            **free_sizes(small, shapes is not None),
        }
        if which == "today":
            yield {"step": "reload"}
            build = partial(zoo.build, "today", name)
            how, error, _ = loaded_again(build, small, Path(folder), (args, kwargs))
            yield {"loaded_by": how, "loaded_error": error}


def trained(model: nn.Module, loss: today.Loss) -> float:
    """The loss of one step of the gated model in train mode, weights and gates together."""
    value = loss(model.train())
    value.backward()
    assert l0prune.gates(model).log_alpha.grad.any(), "no gradient has reached the gates"
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    model.zero_grad()
    model.eval()
    return value.item()


def free_sizes(dense: l0prune.Export, is_asked: bool) -> Row:
    """Which batches its files take, and which other sizes are free there, if they were to be."""
    names = dict.fromkeys(name for piece in dense.pieces for name in piece.free.names)
    return {"batches": dense.to_dict()["batches"]} | ({"free": list(names)} if is_asked else {})


def whole(survey: l0prune.Survey, most: int = 3) -> dict[str, float]:
    """The reasons why MACs stay whole, with their shares of all MACs; the largest ones."""
    lost: Counter[str] = Counter()
    for layer in survey.layers:
        reasons = dict.fromkeys(side.reason for side in (layer.input, layer.output) if side.reason)
        lost["; ".join(reasons)] += layer.macs * (1 - layer.macs_reachable) / survey.macs
    return {why: round(share, 4) for why, share in lost.most_common(most) if share > 0.0005}


def summary(row: Row) -> str:
    """One line for the terminal."""
    if failed := isolation.failure(row):
        return failed
    if "float64" not in row:
        return f"{row['model']:36} axes {row['axes']:4} no branches"
    onnx = f"{row['onnx']:.0e}" if row.get("onnx") is not None else "-"
    gone = f" branches gone {row['gone']} of {row['branches']}, {row['class']}" * bool(row["gone"])
    return (
        f"{row['model']:36} axes {row['axes']:4} params {row['params_share']:6.1%} "
        f"MACs {row['macs_share']:6.1%} float64 {row['float64']:.0e} onnx {onnx} "
        f"{row['peak_mib']:6} MiB{gone}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--zoo", choices=(*zoo.ZOOS, *OF_USERS))
    parser.add_argument("--models", nargs="+", help="by default all that have no result yet")
    parser.add_argument("--sizes", action="store_true", help="free sizes beside the batch, too")
    parser.add_argument("--branches", action="store_true", help="close half of them, too")
    parser.add_argument("--limit", type=int, default=900, help="CPU seconds for one model")
    parser.add_argument("--page", type=Path, help="write the documentation page, and no more")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        which, _, name = options.one.partition(":")
        isolation.measure(name, steps(which, name, options.sizes, options.branches))
        return
    if options.page:
        if options.zoo == "threads":
            text = threads_page()
        elif options.zoo == "reports":
            text = reports_page.with_reports(options.page.read_text(encoding="utf-8"))
        elif options.zoo:
            text = with_section(options.page.read_text(encoding="utf-8"), options.zoo)
        else:
            text = page()
        options.page.write_text(text, encoding="utf-8")
        return
    if not options.zoo:
        parser.error("which --zoo?")
    kind = f"{options.zoo}-branches" if options.branches else options.zoo
    path = ROOT / "runs" / f"coverage-{kind}.jsonl"
    every, line, *_ = OF_USERS.get(options.zoo) or (zoo.names(options.zoo), summary)
    names = options.models or isolation.missing(path, every)
    also = [f"--{name}" for name in ("sizes", "branches") if getattr(options, name)]
    isolation.run("benchmarks.coverage", path, options.zoo, names, options.limit, line, also)


if __name__ == "__main__":
    main()
