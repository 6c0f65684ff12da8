"""The section of the page of threads that is about ``benchmarks.reports``."""

from __future__ import annotations

from benchmarks.isolation import ROOT, Row, failure, rows
from benchmarks.reports import REPORTS
from benchmarks.runner import lines

TITLE = "## Fourteen more reports"
PAGE = ROOT / "docs" / "threads.md"
EXACT, SAME = 1e-10, 1e-6
COLUMNS = "thread | what it is about | what l0prune does | test"
FIGURES = "params | float64 | class | ONNX | loaded by"


def words(after: str = "") -> str:
    """What the page says before a table, up to how many pass, which is in bold."""
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(after) :].partition("\n**")[0]


def section() -> str:
    """A table of all reports, and what else was measured."""
    found = {row["model"]: row for row in rows(ROOT / "runs" / "coverage-reports.jsonl")}
    passed = sum(passes(found.get(name, {})) for name in REPORTS)
    verdict = f"**{passed} of {len(REPORTS)} reports pass.**\n"
    cells = (
        (name, of.situation, of.answer, f"`{of.test}`", *_cells(found.get(name, {})))
        for name, of in REPORTS.items()
    )
    also = {name: found[name].get("also") for name in REPORTS if name in found}
    notes = (f"- {name}: {said}." for name, said in also.items() if said)
    table = lines(f"{COLUMNS} | {FIGURES}", cells)
    return "\n".join([words(TITLE), verdict, *table, "", *notes]) + "\n"


def with_reports(text: str) -> str:
    """The page with that section made anew; it comes last."""
    return f"{text.partition(TITLE)[0].rstrip()}\n\n{section()}"


def passes(row: Row) -> bool:
    """Return whether the network is smaller, exact, of its own class, and equal in its files."""
    return (
        row.get("step") == "done"
        and row["params_after"] < row["params_before"]
        and row["float64"] <= EXACT
        and row["class"] != "graph"
        and row["loaded_error"] <= SAME
    )


def summary(row: Row) -> str:
    """One line for the terminal."""
    verdict = "passes" if passes(row) else "fails"
    said = f"{row['model']:22} {verdict}: {', '.join(_cells(row))}"
    return "\n    ".join(each for each in (said, row.get("also", ""), failure(row)) if each)


def _cells(row: Row) -> tuple[str, ...]:
    if row.get("step") != "done":
        return f"failed at {row.get('step', 'the start')}", *["-"] * 4
    return (
        f"{row['params_after'] / row['params_before']:.1%}",
        f"{row['float64']:.0e}",
        row["class"],
        f"{row['onnx']:.0e}" if "onnx" in row else "-",
        row["loaded_by"],
    )
