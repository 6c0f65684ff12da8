"""Pages that are read back: one of which no two numbers are alike, and a committed one."""

from pathlib import Path

import pytest
from read_page import Page, varied

import l0prune

COMMITTED = Path(__file__).parents[3] / "docs" / "digits-wide.report.json"


@pytest.fixture(scope="module", params=["varied", "committed"])
def page(request, tmp_path_factory):
    is_committed = request.param == "committed"
    report = l0prune.Report.load(COMMITTED) if is_committed else l0prune.Report(varied())
    return Page(report, tmp_path_factory.mktemp("saved"))
