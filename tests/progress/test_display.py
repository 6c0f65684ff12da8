import io
import re

import pytest
from rich.console import Console

from l0prune.progress import display, stages
from l0prune.progress.display import displayed, duration, shown
from l0prune.progress.stages import stage, steps


@pytest.fixture
def clock(monkeypatch):
    """The clock of stages, to be set by hand."""
    now = [100.0]
    monkeypatch.setattr(stages, "now", lambda: now[0])
    return now


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, legacy_windows=False)


def test_durations():
    texts = [duration(seconds) for seconds in (0.4, 35, 89, 91, 3600, 5400, 7260)]
    assert texts == ["0 s", "35 s", "89 s", "2 min", "60 min", "1 h 30 min", "2 h 1 min"]


def test_a_pipe_gets_a_line_each_ten_seconds(clock):
    out = console()
    with shown(console=out), stage("scoring"):
        for _ in steps(range(20)):
            clock[0] += 2
    assert out.file.getvalue().splitlines() == [
        "scoring: 25%, 30 s left",
        "scoring: 50%, 20 s left",
        "scoring: 75%, 10 s left",
        "scoring: 100%, 0 s left",
        "scoring: 40.0 s",
    ]


def test_work_that_counts_nothing_says_how_long_it_has_taken(clock):
    out = console()
    with shown(console=out) as to, stage("exporting"), stage("translating"):
        clock[0] += 9
        to.look()
        clock[0] += 2
        to.look()
        to.look()
    lines = out.file.getvalue().splitlines()
    assert lines == ["exporting: 11 s so far (translating)", "exporting: 11.0 s"]


def test_the_outermost_work_that_counts_is_told_with_the_part_that_goes_on(clock):
    out = console()
    with shown(console=out), stage("shrinking"), stage("dividing"):
        for _ in steps(range(2)):
            with stage("looking"):
                for _ in steps(range(2)):
                    clock[0] += 10
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "dividing: 25%, 30 s left (looking)"
    assert lines[-1] == "shrinking: 40.0 s"


def test_a_long_step_is_told_by_the_clock_of_the_display(clock, monkeypatch):
    monkeypatch.setattr(display, "EVERY", 0.05)
    out = console()
    with shown(console=out) as to, stage("translating"):
        clock[0] += 0.1
        to._over.wait(0.01)
        for _ in range(500):
            if out.file.getvalue():
                break
            to._over.wait(0.01)
    assert out.file.getvalue().startswith("translating: 0 s so far")


def test_a_terminal_shows_share_bar_and_time_left(clock):
    out = console(terminal=True)
    with shown(console=out) as to, stage("scoring"):
        for number in steps(range(4)):
            clock[0] += 20
            if number == 2:
                to._live.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.file.getvalue())
    assert "scoring" in text
    assert "50%, 60 s left" in text
    assert "━" in text


def test_the_outermost_display_decides(clock, capsys):
    @displayed
    def work(*, progress=True):
        with stage("working"):
            clock[0] += 5

    with shown(False):
        work()
    work(progress=False)
    assert capsys.readouterr() == ("", "")
    out = console()
    with shown(console=out):
        work()
    assert out.file.getvalue() == "working: 5.0 s\n"
    work()
    assert capsys.readouterr() == ("", "working: 5.0 s\n")
