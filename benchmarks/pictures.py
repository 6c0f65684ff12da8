"""Two pictures of a report as files of their own, for the documentation.

python -m benchmarks.pictures docs/digits-wide.report.json docs
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from l0prune.features import page
from l0prune.features.page.network import network
from l0prune.features.page.training import gate_histogram as gates
from l0prune.files.atomic import write_whole
from l0prune.report.report import Report

WIDTH = 800
_COLOURS = re.compile(
    r":root \{.*?\n\}\n@media \(prefers-color-scheme: dark\) \{.*?\n\}\n", re.DOTALL
)


def standalone(picture: str) -> str:
    """A picture with the page's colours and letters in it, light and dark."""
    css = Path(page.__file__).with_name("page.css").read_text(encoding="utf-8")
    found = _COLOURS.search(css)
    assert found is not None
    rules = [line for line in css.splitlines() if line.startswith("svg ")]
    style = "\n".join([found[0], "svg { font-family: system-ui, sans-serif; }", *rules])
    head, end, rest = picture.partition(">")
    return f"{head}{end}<style>{style}</style>{rest}\n"


def write(report: Path, folder: Path) -> None:
    """Write ``report-network.svg`` and ``report-gates.svg``."""
    content = Report.load(report).content
    gated = next(training for training in content.trainings if training.epochs[-1].gates)
    pictures = {
        "report-network.svg": network(content.layers, content.axes, WIDTH),
        "report-gates.svg": gates(gated, WIDTH),
    }
    for name, picture in pictures.items():
        write_whole(folder / name, standalone(picture))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="a report.json")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    given = parser.parse_args()
    write(given.report, given.folder)


if __name__ == "__main__":
    main()
