"""Cases on which users of other tools failed: cut, proven, written and loaded again."""

from __future__ import annotations

import pytest

from benchmarks.isolation import ROOT
from benchmarks.reports import REPORTS
from benchmarks.reports_page import TITLE, section, with_reports
from benchmarks.reports_page import passes as report_passes
from benchmarks.threads import CASES, MODELS
from benchmarks.threads_page import EXACT, SAME, page, passes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


def test_every_case_is_on_the_page():
    text = page()
    assert len(CASES) == 15
    assert all(f"## {number}. " in text for number in range(1, 16))
    assert len(MODELS) == sum(len(case.models) for case in CASES)
    assert all(f"| {name} (" in text for name in MODELS)


def test_a_case_that_was_not_measured_has_not_passed():
    row = {"step": "done", "params_before": 9, "params_after": 4, "params_loaded": 4, "onnx": 1e-6}
    row |= {
        "params_exported": 4,
        "float64": 1e-15,
        "class": "yes",
        "reloaded_error": 0.0,
        "eager_times": 1.5,
    }
    assert passes(row)
    assert not passes({})
    for worse in ({"ort_times": 0.9}, {"class": "graph"}, {"params_loaded": 9}, {"onnx": None}):
        assert not passes(row | worse)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_network_is_cut_and_loaded_again(name):
    for package in ("einops", "monai", "timm", "transformers", "ultralytics", "vit_pytorch"):
        pytest.importorskip(package)
    from benchmarks.thread_steps import steps

    row = {}
    for done in steps(name):
        row |= done
        if row["step"] == "time":
            break
    assert row["params_loaded"] == row["params_exported"]
    assert row["params_after"] < row["params_before"]
    assert row["float64"] <= EXACT
    assert row["onnx"] is not None
    assert row["class"] != "graph"
    assert row["reloaded_error"] <= SAME


def test_every_report_is_on_the_page_with_its_test():
    """Also on the page as it is committed; tests that are named there are looked for elsewhere."""
    text = section()
    assert len(REPORTS) == 14
    for name, report in REPORTS.items():
        assert f"| {name} | {report.situation} | {report.answer} | `{report.test}` |" in text
    committed = (ROOT / "docs" / "threads.md").read_text()
    assert with_reports(committed).partition(TITLE)[0] == committed.partition(TITLE)[0]
    assert TITLE in committed
    assert all(f"\n| {name} | {each.situation} |" in committed for name, each in REPORTS.items())
    assert "failed" not in committed.partition(TITLE)[2]


def test_a_report_that_was_not_measured_has_not_passed():
    row = {"step": "done", "params_before": 9, "params_after": 4, "float64": 1e-15, "class": "yes"}
    row["loaded_error"] = 0.0
    assert report_passes(row)
    assert not report_passes({})
    for worse in ({"float64": 1e-3}, {"class": "graph"}, {"params_after": 9}, {"step": "onnx"}):
        assert not report_passes(row | worse)
    assert not report_passes(row | {"loaded_error": 1e-3})


QUICK = ("onnxsim 1012",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n not in QUICK else ()) for n in REPORTS]
)
def test_the_network_of_a_report_is_cut(name):
    for package in ("peft", "transformers"):
        pytest.importorskip(package)
    from benchmarks.report_steps import steps

    row = {}
    for done in steps(name):
        row |= done
    assert report_passes(row | {"step": "done"}), row
    assert row.get("onnx", 0.0) < 1e-5
