"""The documentation page of ``benchmarks.coverage``: our results and Torch-Pruning's."""

from __future__ import annotations

import re

from benchmarks import zoo
from benchmarks.isolation import ROOT, Row, rows

HEAD = """# Coverage of the model zoos

Printed by `python -m benchmarks.coverage --zoo ZOO` and `--page docs/coverage.md`, one process per
model, one thread, random weights, half of the gates closed at random (seed 0). *axes* counts the
axes of each kind: maps of convolutions (channel), neurons, attention heads and the dims within
them, whole groups of a grouped convolution or norm, and inputs of the model; *params* and *MACs*
are the shares that some axis can take away; *class* says whether the exported model is of its own
class at the new sizes: *yes*, with some cut *layers* in it (`CutLayerNorm`, `PickedLinear`,
`GivenSizes`), or the captured *graph*, as the survey says beforehand; *free sizes* are the
batches that its files take, and beside them the sizes that are free where they were asked for
(`--sizes`: sides of images, lengths), all of them certified; *capture* is torch.export alone,
*plan* is torch.export and the inference of axes; *float64* is the largest difference between
the gated and the exported model, *ONNX* that between the gated model and ONNX Runtime in
float32, both relative to the output's scale; *peak* is the whole process, export in float64 and
ONNX included. Of the networks of *today*, *loss* says that the gated model has been trained one
step before the cut by the loss that its library or its scripts bring, and *loaded by* what has
loaded the smaller one from its files, with the same outputs. Their weights are random as their
libraries draw them, but RT-DETR's and Depth Anything's are larger (`initializer_range=0.1`), with
which the outputs depend on the image; and ultralytics' RT-DETR has 30 queries in the place of 300,
as of the 189 positions of a small image each would be one, in an order of scores some of which
differ by less than float32 rounds: at 300 it is refused, and nothing could be shown.
"""
THEIRS = """
The columns **TP** are Torch-Pruning's ({version}) on the same models and inputs, by `python -m
benchmarks.torch_pruning --zoo ZOO`: magnitude, ratio 0.5, layers as wide as an output ignored, and
its own examples' treatment of detectors and attention. *runs*: the pruned model still runs, with
outputs of the same shapes. *exact*: it computes what the original does in which every parameter
that was cut is zero, to 1e-6 in float64, relative to how far another input moves the output.
*norms* instead says that it does so once LayerNorm and GroupNorm, too, leave out the channels that
were cut: a consistent cut, but of a network that no mask trains. *ONNX*: the file made from it
agrees with PyTorch to 1e-4. *s*: CPU seconds of its tracing and pruning; *too slow* is not done
after {limit} for everything, building the model and comparing included.
"""
EXACT, ONNX = 1e-6, 1e-4
LOADED = 1e-5  # in float32
# Of the MACs of a network in reach of some axis.
ENOUGH = 0.95


def page() -> str:
    """The whole page, of all zoos that have results."""
    ours = {which: rows(ROOT / "runs" / f"coverage-{which}.jsonl") for which in zoo.ZOOS}
    theirs = {which: rows(ROOT / "runs" / f"torch-pruning-{which}.jsonl") for which in zoo.ZOOS}
    every = [row for found in theirs.values() for row in found]
    facts = {key: next((r[key] for r in every if key in r), "?") for key in ("version", "limit")}
    head = HEAD + (THEIRS.format(**facts) if every else "")
    return "\n".join([head, *(section(z, ours[z], theirs[z]) for z in zoo.ZOOS if ours[z])])


def with_section(text: str, which: str) -> str:
    """A page whose section of one zoo is made anew, or comes last where there was none."""
    found = [
        rows(ROOT / "runs" / f"{tool}-{which}.jsonl") for tool in ("coverage", "torch-pruning")
    ]
    parts = [part.rstrip() + "\n" for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)]
    titles = [part.split("\n")[0] for part in parts]
    place = titles.index(f"## {which}") if f"## {which}" in titles else len(parts)
    parts[place : place + 1] = [section(which, *found)]
    return "\n".join(parts)


def section(which: str, ours: list[Row], theirs: list[Row]) -> str:
    """The results of a zoo, by name."""
    ours = sorted(ours, key=lambda row: row["model"])
    refused, exact = [r for r in ours if "refused" in r], [r for r in ours if is_exact(r)]
    every, rest = len(zoo.names(which)), len(ours) - len(exact) - len(refused)
    parts = [
        f"## {which}\n",
        f"{len(ours)} of {every} models measured: {len(exact)} exact and at parity with ONNX "
        f"Runtime, {len(refused)} refused with a reason, {rest} else.",
    ]
    if versions := next((row["versions"] for row in ours if "versions" in row), ""):
        parts.append(f"\nBuilt by {versions}.")
    if theirs:
        parts.append(f"\n{count(theirs)}")
    loads = any("loaded_by" in row for row in ours)
    columns = ["model", "axes", "params", "MACs", "class", "free sizes"]
    columns += [
        "capture, s",
        "plan, s",
        "float64",
        "ONNX",
        "peak MiB",
        *(("loss", "loaded by") if loads else ()),
        *(f"TP {what}" for what in ("runs", "exact", "ONNX", "s") if theirs),
    ]
    parts += ["", _line(columns), "|" + "---|" * len(columns)]
    beside = {row["model"]: row for row in theirs}
    for row in ours:
        cells = [row["model"], *_ours(row), *(_loaded(row) if loads else ())]
        parts.append(_line([*cells, *_theirs(beside.get(row["model"]))] if theirs else cells))
    low = [r for r in ours if r.get("macs_share", 1) < ENOUGH]
    if low:
        parts.append(f"\nLess than {ENOUGH:.0%} of the MACs, and what keeps the rest whole:\n")
    for r in low:
        why = (f"{reason} ({share:.1%})" for reason, share in r.get("whole", {}).items())
        parts.append(f"- {r['model']}: {r['macs_share']:.1%}. {' '.join(f'{w}.' for w in why)}")
    graphs = [r for r in ours if loads and r.get("class") == "graph"]
    if graphs:
        parts.append("\nNot of their own class, but the captured graph:\n")
    parts += [f"- {r['model']}: {_said(r['note'].splitlines()[0])}" for r in graphs]
    failed = [r for r in ours if not is_exact(r)]
    if failed:
        parts.append("\nNot exact, or not to the end:\n")
    for r in failed:
        reason = _said(r.get("refused") or r.get("crash") or "")
        parts.append(f"- {r['model']} (at {r.get('step', '?')}): {reason}")
    return "\n".join(parts) + "\n"


def _said(text: str, most: int = 300) -> str:
    """The beginning of a message, in one line."""
    return " ".join(text.split())[:most]


def is_exact(row: Row) -> bool:
    """Was the cut shown exact, and the ONNX file equal?"""
    return row.get("step") == "done" and row["float64"] <= 1e-10 and row.get("onnx") is not None


def verdict(row: Row) -> str:
    """Is Torch-Pruning's model the masked one: exact, up to norms, or off by how much?"""
    if "exact" not in row:
        return "-"
    if not row["params_removed"]:
        return "nothing cut"
    if row["exact"] <= EXACT:
        return "yes"
    return "norms" if row["norms"] <= EXACT else f"no ({row['exact']:.0e})"


def count(theirs: list[Row]) -> str:
    """Torch-Pruning's results in a line."""
    pruned, runs = (sum(bool(r.get(key)) for r in theirs) for key in ("pruned", "runs"))
    verdicts = [verdict(r) for r in theirs]
    nothing = verdicts.count("nothing cut")
    at_parity = sum(r.get("onnx", 1) <= ONNX for r in theirs)
    return (
        f"Torch-Pruning, of {len(theirs)}: {pruned} pruned without a crash ({nothing} with nothing "
        f"cut), {runs} of these still run with outputs of the same shapes, {verdicts.count('yes')} "
        f"are exact and {verdicts.count('norms')} more up to norms, {at_parity} agree with their "
        "ONNX file."
    )


def _ours(row: Row) -> list[str]:
    if "float64" not in row:
        return ["refused" if "refused" in row else "failed", *["-"] * 9]
    return [
        ", ".join(f"{count} {kind}" for kind, count in sorted(row["kinds"].items())) or "0",
        f"{row['params_share']:.1%}",
        f"{row['macs_share']:.1%}",
        row.get("class", "-"),
        sizes(row),
        f"{row.get('capture_s', 0):.1f}",
        f"{row['plan_s']:.1f}",
        f"{row['float64']:.0e}",
        f"{row['onnx']:.0e}" if row.get("onnx") is not None else "failed",
        f"{row['peak_mib']:,}",
    ]


def _loaded(row: Row) -> list[str]:
    """Was it trained by its library's loss, and what has loaded it again, with equal outputs?"""
    is_same = row.get("loaded_error", 1) <= LOADED
    return ["yes" if "loss" in row else "-", row["loaded_by"] if is_same else "-"]


def sizes(row: Row) -> str:
    """The batches that its files take, and other sizes that are free; ``-`` where nobody asked."""
    if "batches" not in row:
        return "-"
    batches = (_BATCHES.get(each, f"batch: {each}") for each in row["batches"])
    return ", ".join([*dict.fromkeys(batches), *row.get("free", ())])


_BATCHES = {"1 or more": "batch"}


def _theirs(row: Row | None) -> list[str]:
    if row is None:
        return ["-"] * 4
    if not row.get("pruned"):
        late = "not done" in row.get("crash", "")
        return ["too slow" if late else "crash", "-", "-", f"{row.get('seconds', '-')}"]
    if not row.get("runs"):
        shapes = "shapes change" if "shapes" in row else "crash in forward"
        return [shapes, "-", "-", f"{row['seconds']}"]
    onnx = "failed" if "onnx" not in row else "yes" if row["onnx"] <= ONNX else f"{row['onnx']:.0e}"
    return ["yes", verdict(row), onnx, f"{row['seconds']}"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
