"""Expected and real MACs over the epochs of runs, beside the dense networks (figures 3 and 4).

Reads the metrics of runs that are there and does those that are not. The expected MACs are those
of the gates as they are drawn in training, the real ones those of an export at that epoch; 1 MAC
is 2 FLOPs. Prints the numbers as JSON; the figure needs matplotlib (pip install '.[benchmarks]').

    python -m benchmarks.curves mnist-mlp mnist-lenet5 [--figure curves.png]
    python -m benchmarks.curves RUN-FOLDER …
    python -m benchmarks.curves mnist-mlp --set finetune.epochs=20 --set finetune.settle=4
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.isolation import parser_of
from l0prune.errors import FileError, L0pruneError
from l0prune.features.recipes import runs as recipes
from l0prune.training.history import NAME

Curve = dict[str, Any]

SERIES = ("epoch", "phase", "expected_macs", "macs", "error")


def metrics(folder: Path) -> Path | None:
    """The metrics of a run's folder, whether of a recipe or of ``l0prune finetune``."""
    candidates = (folder / "finetune" / NAME, folder / NAME)
    return next((path for path in candidates if path.is_file()), None)


def seconds(folder: Path) -> float:
    """How long all training in a run's folder took, over all of its phases."""
    lines = [
        line
        for path in folder.rglob(NAME)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sum(json.loads(line)["seconds"] for line in lines)


def read(name: str, path: Path) -> Curve:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not records or "expected_macs" not in records[-1]:
        raise FileError(f"{path} holds no epoch of a run with gates")
    series = {key: [record.get(key) for record in records] for key in SERIES}
    return {"name": name, "dense_macs": records[-1]["dense_macs"], **series}


def curve(run: str, home: Path, overrides: list[str]) -> Curve:
    """The curve of a run's folder, or of a recipe, done first if need be."""
    found = metrics(Path(run))
    if found is not None:
        return read(Path(run).name, found)
    recipe = recipes.load(run, overrides)
    folder = home / recipe.name
    recipes.run(recipe, folder, os.environ.get("L0PRUNE_DATA"))
    done = metrics(folder)
    assert done is not None
    return read(recipe.name, done)


def draw(curves: list[Curve], path: Path) -> None:
    """One panel a run: expected and real MACs, the dense network's above them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(
        1, len(curves), figsize=(4.5 * len(curves), 3.2), squeeze=False, layout="constrained"
    )
    for panel, one in zip(panels[0], curves, strict=True):
        panel.axhline(one["dense_macs"], color="black", linestyle=":", label="dense")
        panel.plot(one["epoch"], one["expected_macs"], marker=".", label="expected")
        panel.plot(one["epoch"], one["macs"], linestyle="--", marker=".", label="if exported now")
        settling = [e for e, phase in zip(one["epoch"], one["phase"], strict=True)
                    if phase == "settle"]  # fmt: skip
        if settling:
            panel.axvspan(settling[0] - 1, settling[-1], color="0.93", label="weights settle")
        panel.set(title=one["name"], xlabel="epoch", ylabel="MACs an example", ylim=(0, None))
        panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        panel.yaxis.set_major_formatter(ticker.EngFormatter())
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+", help="folders of runs, or recipes")
    parser.add_argument("--figure", type=Path, help="file to draw: .png, .svg, .pdf")
    parser.add_argument("--home", type=Path, default=Path("runs"), help="folder of recipes' runs")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    try:
        curves = [curve(run, options.home, options.set) for run in options.runs]
    except L0pruneError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(curves))
    if options.figure is not None:
        draw(curves, options.figure)
        print(f"{options.figure} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
