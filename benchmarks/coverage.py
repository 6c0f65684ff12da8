"""Coverage of the model zoos: what is captured, how much of it can be cut, and is the cut exact.

    python -m benchmarks.coverage --zoo torchvision|timm|transformers [--models resnet18 …]
    python -m benchmarks.coverage --page docs/coverage.md

One process per model, so that none can harm another, its peak memory is its own, and a run that
was stopped goes on where it was. Results are JSON lines in ``runs/coverage-ZOO.jsonl``; ``--page``
makes the documentation page from them.

For each model weights are random and nothing is trivial (see ``benchmarks.scramble``); half of
the gates are closed at random. Exactness is the largest difference between the gated and the
exported model in float64, and between the gated model and ONNX Runtime in float32, both relative
to the output's scale.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import l0prune
from benchmarks import zoo
from benchmarks.scramble import scramble
from l0prune.capture import capture
from l0prune.errors import L0pruneError

ROOT = Path(__file__).parent.parent
ZOOS = ("torchvision", "timm", "transformers")
HEAD = """# Coverage of the model zoos

Printed by `python -m benchmarks.coverage --zoo ZOO` and `--page docs/coverage.md`, one process per
model, one thread, random weights, half of the gates closed at random (seed 0). *params* and *MACs*
are the shares that some axis can take away; *capture* is torch.export alone, *plan* is torch.export
and the inference of axes; *float64* is the largest difference between the gated and the exported
model, *ONNX* that between the gated model and ONNX Runtime in float32, both relative to the
output's scale; *peak* is the whole process, export in float64 and ONNX included.
"""


def measure(which: str, name: str) -> dict[str, Any]:
    """One model, step by step; what fails is recorded with the step at which it did."""
    row: dict[str, Any] = {"model": name, "step": "build"}
    try:
        for done in _steps(which, name):
            row |= done
        row["step"] = "done"
    except L0pruneError as error:
        row["refused"] = str(error)
    except Exception as error:
        row["crash"] = f"{type(error).__name__}: {error}"[:2000]
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def _steps(which: str, name: str) -> Any:
    model, (args, kwargs) = zoo.build(which, name)
    yield {"step": "survey"}
    start = time.perf_counter()
    try:
        capture(model, args, kwargs)
        yield {"captured": True, "capture_s": round(time.perf_counter() - start, 2)}
    except L0pruneError:
        yield {"captured": False}
    start = time.perf_counter()
    survey = l0prune.survey(model, args, kwargs)
    yield {
        "plan_s": round(time.perf_counter() - start, 2),
        "axes": len(survey.axes),
        "slots": survey.plan.size,
        "params": survey.params,
        "macs": survey.macs,
        "params_share": round(survey.reachable("params"), 4),
        "macs_share": round(survey.reachable("macs"), 4),
        "unknown": sorted({p.operator for p in survey.pins if "unknown" in p.reason}),
        "step": "gate",
    }
    scramble(model, (args, kwargs))
    yield {"step": "export"}
    dense = l0prune.export(model)
    yield {
        "params_after": dense.params,
        "macs_after": dense.macs,
        "float64": dense.certificate.worst("dense", "float64"),
        "float32": dense.certificate.worst("dense", "float32"),
        "own_class": dense.rebuilt,
        "step": "onnx",
    }
    with tempfile.TemporaryDirectory() as folder:
        dense.save_onnx(Path(folder) / "model.onnx")
    yield {"onnx": dense.certificate.worst("onnx", "float32")}


def run(which: str, names: list[str] | None, limit: int) -> None:
    """Measure the models named, or all that have no line yet, each in a process of its own."""
    path = ROOT / "runs" / f"coverage-{which}.jsonl"
    path.parent.mkdir(exist_ok=True)
    known = {row["model"] for row in rows(path)}
    for name in names or [name for name in zoo.names(which) if name not in known]:
        command = [sys.executable, "-m", "benchmarks.coverage", "--one", f"{which}:{name}"]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
            )
            lines = done.stdout.strip().splitlines()
            row = json.loads(lines[-1]) if done.returncode == 0 and lines else None
            row = row or {"model": name, "crash": f"exit {done.returncode}: {done.stderr[-500:]}"}
        except subprocess.TimeoutExpired:
            row = {"model": name, "crash": f"not done after {limit} s"}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(summary(row), flush=True)


def rows(path: Path) -> list[dict[str, Any]]:
    """The results so far; of a model measured twice, the last."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return list({row["model"]: row for row in lines}.values())


def summary(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    if "crash" in row or "refused" in row:
        what = "CRASH" if "crash" in row else "refused"
        first = (row.get("crash") or row["refused"]).splitlines()[0]
        return f"{row['model']:36} {what} at {row.get('step', '?')}: {first[:160]}"
    onnx = f"{row['onnx']:.0e}" if row.get("onnx") is not None else "-"
    return (
        f"{row['model']:36} axes {row['axes']:4} params {row['params_share']:6.1%} "
        f"MACs {row['macs_share']:6.1%} float64 {row['float64']:.0e} onnx {onnx} "
        f"{row['peak_mib']:6} MiB"
    )


def page(which: str) -> str:
    """The results of a zoo as a section of the documentation."""
    found = rows(ROOT / "runs" / f"coverage-{which}.jsonl")
    exact = [r for r in found if is_exact(r)]
    refused = [r for r in found if "refused" in r]
    every, rest = len(zoo.names(which)), len(found) - len(exact) - len(refused)
    parts = [
        f"## {which}\n",
        f"{len(found)} of {every} models measured: {len(exact)} exact and at parity with ONNX "
        f"Runtime, {len(refused)} refused with a reason, {rest} else.\n",
        "| model | axes | params | MACs | capture, s | plan, s | float64 | ONNX | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        if "float64" in r:
            onnx = f"{r['onnx']:.0e}" if r.get("onnx") is not None else "failed"
            parts.append(
                f"| {r['model']} | {r['axes']} | {r['params_share']:.1%} | {r['macs_share']:.1%} | "
                f"{r.get('capture_s', 0):.1f} | {r['plan_s']:.1f} | {r['float64']:.0e} | {onnx} | "
                f"{r['peak_mib']:,} |"
            )
    failed = [r for r in found if not is_exact(r)]
    if failed:
        parts.append("\nNot exact, or not to the end:\n")
    for r in failed:
        reason = (r.get("refused") or r.get("crash") or "").splitlines()[0]
        parts.append(f"- {r['model']} (at {r.get('step', '?')}): {reason[:300]}")
    return "\n".join(parts) + "\n"


def is_exact(row: dict[str, Any]) -> bool:
    """Was the cut shown exact, and the ONNX file equal?"""
    return row.get("step") == "done" and row["float64"] <= 1e-10 and row.get("onnx") is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", choices=ZOOS)
    parser.add_argument("--models", nargs="+", help="by default all that have no result yet")
    parser.add_argument("--limit", type=int, default=900, help="seconds for one model")
    parser.add_argument("--page", type=Path, help="write the documentation page, and no more")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        which, _, name = options.one.partition(":")
        with open(os.devnull, "w") as nowhere:
            stdout, sys.stdout = sys.stdout, nowhere
            row = measure(which, name)
            sys.stdout = stdout
        print(json.dumps(row))
        return
    if options.page:
        zoos = [z for z in ZOOS if (ROOT / "runs" / f"coverage-{z}.jsonl").exists()]
        options.page.write_text("\n".join([HEAD, *map(page, zoos)]))
        return
    if not options.zoo:
        parser.error("which --zoo?")
    torch.set_num_threads(1)
    run(options.zoo, options.models, options.limit)


if __name__ == "__main__":
    main()
