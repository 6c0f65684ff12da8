"""Runs side by side: error against cost, and which of them no other beats."""

import pytest
from reported import content

import l0prune
from l0prune.errors import FileError
from l0prune.features.page.sweep import pareto_front
from l0prune.report.content import Gain, Metric, Pair
from l0prune.report.report import report_of


def test_the_front_is_what_no_other_run_beats():
    points = [(50, 3.0), (30, 5.0), (40, 6.0), (70, 3.0), (10, 9.0)]
    assert pareto_front(points) == [4, 1, 0]
    assert pareto_front(points, larger_is_better=True) == [4]
    assert pareto_front([(1, 1.0), (1, 1.0)]) == [0, 1]


def run(macs, error):
    return content(
        gain=Gain(
            macs=Pair(before=1000, after=macs),
            metric=Metric(name="error", before=0.01, after=error),
        )
    )


def test_a_folder_of_runs_is_compared(tmp_path):
    for name, macs, error in (("a", 500, 0.02), ("b", 300, 0.04), ("c <&", 400, 0.05)):
        (tmp_path / name).mkdir()
        l0prune.Report(run(macs, error)).save(tmp_path / name)
    (tmp_path / "other").mkdir()
    found = report_of(tmp_path)
    assert [each.name for each in found.content.runs] == ["a", "b", "c <&"]
    assert [each.costs["macs"].after for each in found.content.runs] == [500, 300, 400]
    page = found.html()
    assert "3 runs, of which 2 are on the Pareto front" in page
    assert 'href="c%20%3C%26/report.html"' in page
    assert "How to repeat it" not in page
    found.save(tmp_path)
    (tmp_path / "d").mkdir()
    l0prune.Report(run(100, 0.5)).save(tmp_path / "d")
    assert [each.name for each in report_of(tmp_path).content.runs] == ["a", "b", "c <&", "d"]


def test_one_run_alone_is_no_sweep(tmp_path):
    (tmp_path / "a").mkdir()
    l0prune.Report(run(1, 0.5)).save(tmp_path / "a")
    with pytest.raises(FileError, match="no run's folder"):
        report_of(tmp_path)
