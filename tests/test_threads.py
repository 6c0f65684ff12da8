"""Cases on which users of other tools failed: cut, proven, written and loaded again."""

from __future__ import annotations

import pytest

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
