"""The documentation page of ``benchmarks.threads``: its words are kept, its tables made anew."""

from __future__ import annotations

from benchmarks import reports_page
from benchmarks.isolation import ROOT, Row, rows
from benchmarks.runner import lines
from benchmarks.threads import CASES, Case

EXACT, SAME = 1e-10, 1e-6
COLUMNS = (
    "network | can be cut | params | MACs | float64 | class | ONNX | loaded by | "
    "times as fast: ORT | eager"
)


def page() -> str:
    """The whole page."""
    found = {row["model"]: row for row in rows(ROOT / "runs" / "coverage-threads.jsonl")}
    passed = sum(all(passes(found.get(name, {})) for name in case.models) for case in CASES)
    cases = (_case(number, case, found) for number, case in enumerate(CASES, start=1))
    verdict = f"**{passed} of {len(CASES)} cases pass.**\n"
    return "\n".join([reports_page.words(), verdict, *cases, reports_page.section()])


def _case(number: int, case: Case, found: dict[str, Row]) -> str:
    title = f"## {number}. {case.situation[0].upper()}{case.situation[1:]}\n\n{case.threads}.\n"
    models = case.models.items()
    cells = ([f"{name} ({of.what})", *_cells(found.get(name, {}))] for name, of in models)
    notes = [note for name in case.models for note in _notes(name, found.get(name, {}))]
    return "\n".join([title, *lines(COLUMNS, cells), "", *notes]) + ("\n" if notes else "")


def _cells(row: Row) -> list[str]:
    if row.get("step") != "done":
        return [f"failed at {row.get('step', 'the start')}", *["-"] * 8]
    return [
        f"{row['macs_share']:.1%}",
        f"{row['params_after'] / row['params_before']:.1%}",
        f"{row['macs_after'] / row['macs_before']:.1%}",
        f"{row['float64']:.0e}",
        row["class"],
        f"{row['onnx']:.0e}",
        row["reloaded"],
        f"{row.get('ort_times', '-')}",
        f"{row['eager_times']}",
    ]


def _notes(name: str, row: Row) -> list[str]:
    """What else was measured of a network."""
    notes = []
    if "losses" in row:
        losses = ", ".join(f"{what} {loss:.3f}" for what, loss in row["losses"].items())
        notes.append(f"loss on texts that it has not seen: {losses}.")
    if "processes_apart" in row:
        notes.append(f"the two processes end {row['processes_apart']:.0e} apart.")
    if "restored_error" in row:
        apart = f"{row['restored_error']:.0e}"
        notes.append(f"a fresh network with its gated checkpoint is {apart} apart.")
    if "large_s" in row:
        notes.append(
            f"the survey of Qwen3-8B ({row['large_params']:,} parameters, no values) "
            f"takes {row['large_s']} s, and its axes reach {row['large_share']:.1%} of them."
        )
    if row.get("parts", 1) > 1:
        notes.append(f"captured in {row['parts']} parts.")
    notes += [row[what].splitlines()[0][:300] for what in ("refused", "crash") if what in row]
    return [f"- {name}: {note}" for note in notes]


def passes(row: Row) -> bool:
    """Is the network exact, of its own class, equal in its files, and faster?"""
    return (
        row.get("step") == "done"
        and row["params_after"] < row["params_before"]
        and row["params_loaded"] == row["params_exported"]
        and row["float64"] <= EXACT
        and row["onnx"] is not None
        and row["class"] != "graph"
        and row["reloaded_error"] <= SAME
        and row.get("ort_times", row["eager_times"]) > 1
    )


def summary(row: Row) -> str:
    """One line for the terminal."""
    verdict = "passes" if passes(row) else "fails"
    what = ", ".join(_cells(row)) + "".join(f"\n    {note}" for note in _notes(row["model"], row))
    return f"{row['model']:20} {verdict}: {what}"
