"""The page of what ``benchmarks.real`` found."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.isolation import Row

TOLERANCES = {"3%": 0.03, "1%": 0.01}
_HEAD = """# Real networks

Printed by `python -m benchmarks.real --page docs/real.md`: trained networks that lie in packages, cut without a label. *shrink* trains
nothing: `l0prune.shrink(model, inputs, tolerance="1%", judge=…, measure="latency")`. *recover* is the same with `recover={"epochs": …}`:
from the smallest of these on networks are cut step by step, and each learns the network's own answers before it is judged. *finetune* learns weights and gates together from these answers,
under the smallest of three budgets in time that stays within. *int8* are the same networks' files in eight bits: layers stay in float32 until the measure is within the tolerance (in rows of earlier runs it may leave it).

- **Measure**: what a network is judged by, on inputs that nothing was learned from; before the arrow that of the network as its package has it. The same
  inputs decided which network is within, so that the measure is a little optimistic.
- **ms**: one call of one example in ONNX Runtime, one thread, in turns with the file before (the package's own, else what torch's exporter writes).
- **×**: in parentheses that of the run before, if there was one: of an earlier state of l0prune, so that both differ by what was changed, and by chance; 1.00 stands for no file within.
- **CPU s**: of all of the way, the table of times, all networks that were tried and their judgement included.
- Inputs are few and made by rule (rendered text, tones, espeak-ng's speech, reactions, crystals, parts of three photographs), so that all can be repeated on two cores. Where they
  are far easier than those of use, as steady tones are for a network of singing voices (fcpe), much of a network can go that other inputs need.
- Rows of a network whose way is not listed were not run. In the first table *untrained* is the way shrink, *trained* the better of recover and finetune, *eight bits* the
  best file in eight bits of all ways and of the uncut network; 1.00 stands for no faster file within the tolerance, – for what was not run.
"""  # noqa: E501
_MADE = {
    "untrained": (("shrink",), "float32"),
    "trained": (("recover", "finetune"), "float32"),
    "eight bits": (("shrink", "recover", "finetune", "whole"), "int8"),
}
_COLUMNS = ("network", "way", "measure", "ms", "×", "int8: measure", "×", "MACs", "params")


def page(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    parts = [_HEAD, "", "## The fastest of each network", "", *_fastest(rows)]
    for name, tolerance in TOLERANCES.items():
        parts += ["", f"## Within {name.replace('%', ' %')}", "", *_table(rows, name, tolerance)]
    parts += ["", "## Files that others make", "", *_rivals(rows)]
    processors = sorted({row["processor"] for row in rows if "processor" in row})
    return "\n".join([*parts, "", f"Processor: {', '.join(processors)}.", ""])


def _fastest(rows: Sequence[Row]) -> Iterator[str]:
    """How many times as fast the fastest file within each tolerance is, by how it was made."""
    kinds = [(how, name) for how in _MADE for name in reversed(TOLERANCES)]
    yield from _header(("network", "judged by", *(f"{how}, within {at}" for how, at in kinds)))
    gains: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    of = {row["model"]: [each for each in rows if each["model"] == row["model"]] for row in rows}
    for model, its in of.items():
        cells = []
        for how, name in kinds:
            ways, bits = _MADE[how]
            run = [row for row in its if row["way"] in ways and "measure" in row]
            found = [
                _gain(row[key].get(bits, {}), row["measure"], TOLERANCES[name])
                for row in run
                for key in (*TOLERANCES, "whole")
                if key in row
            ]
            if run:
                gains[how, name].append(max([1.0, *found]))
            cells.append(f"{gains[how, name][-1]:.2f}" if run else "–")
        judged = next((row["judged_by"] for row in its if "judged_by" in row), "–")
        yield f"| {model} | {judged} | {' | '.join(cells)} |"
    medians = (f"{statistics.median(all_):.2f} of {len(all_)}" for all_ in gains.values() if all_)
    yield f"| **median** | | {' | '.join(medians)} |"


def _table(rows: Sequence[Row], name: str, tolerance: float) -> Iterator[str]:
    yield from _header((*_COLUMNS, "CPU s", "peak MiB"))
    gains: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["way"] not in ("shrink", "recover", "finetune"):
            continue
        found, about = row.get(name), f"| {row['model']} | {row['way']} "
        for bits in ("float32", "int8"):
            gain = 1.0 if found is None else _gain(found.get(bits, {}), row["measure"], tolerance)
            gains.setdefault((row["way"], bits), []).append(gain)
        if found is None or "ms" not in found["float32"]:
            said = _said(row, name) if found is None else found["float32"]["refused"]
            yield (
                f"{about}| {row.get('measure', '–')} | {' '.join(said.split())[:200]} |" + " |" * 7
            )
            continue
        own, small = found["float32"], found.get("int8", {"refused": "–"})
        earlier = row.get("run_before", {})
        cells = (
            f"{row['measure']:.3f} → {own['measure']:.3f}",
            f"{own['before']:.3g} → {own['ms']:.3g}",
            _times(own, earlier.get(f"{name} float32")),
            f"{small['measure']:.3f}" if "ms" in small else small["refused"][:60],
            _times(small, earlier.get(f"{name} int8")),
            f"{found['macs'] / found['macs_before']:.0%}",
            f"{found['params'] / found['params_before']:.0%}", str(row.get("cpu_seconds", "–")),
            str(row["peak_mib"]),
        )  # fmt: skip
        yield f"{about}| {' | '.join(cells)} |"
    yield ""
    for (way, bits), all_ in gains.items():
        yield (
            f"{way}, {bits}: median {statistics.median(all_):.2f} × over {len(all_)} networks, "
            "those without a network within counted as 1."
        )


def _rivals(rows: Iterable[Row]) -> Iterator[str]:
    kinds = {"whole": "l0prune, uncut", "onnxsim": "onnxsim", "static": "ORT, static int8",
             "dynamic": "ORT, dynamic int8",
             "torch-pruning": "Torch-Pruning, within 1%"}  # fmt: skip
    yield from _header(("network", "file", "measure", "ms", "×"))
    for row in rows:
        for key, name in kinds.items():
            found = row.get(key)
            each = {name: found} if key != "whole" else {
                f"{name}, {bits}": (found or {}).get(bits) for bits in ("float32", "int8")
            }  # fmt: skip
            for label, own in each.items():
                if own:
                    yield f"| {row['model']} | {label} | {_file(row, own)} |"


def _file(row: Row, own: Row) -> str:
    if "ms" not in own:
        return f"{own['refused'][:120]} | | "
    measures = f"{row['measure']:.3f} → {own['measure']:.3f}"
    return f"{measures} | {own['before']:.3g} → {own['ms']:.3g} | {_times(own)}"


def _header(columns: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"


def _times(own: Row, earlier: float | None = None) -> str:
    found = f"{own['before'] / own['ms']:.2f}" if "ms" in own else "–"
    return found if earlier is None else f"{found} ({earlier:.2f})"


def _gain(own: Row, whole: float, tolerance: float) -> float:
    """How many times as fast a file is; 1 if it is not within the tolerance."""
    is_within = "ms" in own and 1 - own["measure"] / whole <= tolerance + 1e-3
    return float(own["before"] / own["ms"]) if is_within else 1.0


def _said(row: Row, name: str) -> str:
    tried = row.get("tried") or []
    nearest = f"; {tried[-1][0]:.0%} of the time loses {tried[-1][1]:.1%}" if tried else ""
    none = f"none that was tried is within {name}{nearest}"
    is_none = f"none within {name}" in row
    said = none if is_none else str(row.get("refused") or row.get("crash") or none)
    return re.sub(r"/\S+/", "", said)  # of folders nothing is said
