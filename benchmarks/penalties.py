"""Penalties on the weights of slots beside gates that learn, on the same recipe and budget.

    python -m benchmarks.penalties
    python -m benchmarks.penalties --recipe cifar-resnet --set finetune.budget=macs=0.39

Each row fine-tunes the same dense network with the recipe's settings and one penalty; the row
``gates`` has none, ``gates-alike`` no start from scores either, as penalties have none. All take as
many steps. Error and MACs are those of the exported model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks.isolation import ROOT
from benchmarks.runner import options, table
from l0prune.features.penalties.shrinkage import PENALTIES
from l0prune.features.recipes.files import load
from l0prune.features.recipes.runs import run

GATES = {"gates": (), "gates-alike": ("finetune.start=alike",)}
SHORT = ("finetune.budget=macs=0.25", "finetune.epochs=15")  # of the default recipe


def _settings(row: str, recipe: str) -> tuple[str, ...]:
    """What a row sets; gsm is SGD, with its rate, and a momentum and decay of its own."""
    if row != "gsm":
        return GATES.get(row, (f"finetune.penalty={row}",))
    known = load(recipe, []).finetune
    rate = () if known.get("optimizer") == "sgd" else ("finetune.lr=0.03",)
    left_out = [f"finetune.{each}=" for each in ("momentum", "weight_decay") if each in known]
    return ("finetune.optimizer=gsm", *rate, *left_out)


def measure(row: str, recipe: str, overrides: list[str], out: Path) -> dict[str, Any]:
    """Do the recipe with one penalty, from the dense network of the rows before."""
    own = _settings(row, recipe)
    folder = out / row
    folder.mkdir(parents=True, exist_ok=True)
    if (dense := out / "dense.pt").exists() and not (folder / "dense.pt").exists():
        shutil.copy(dense, folder)
    result = run(load(recipe, [*own, *overrides]), folder)
    if not dense.exists() and (folder / "dense.pt").exists():
        shutil.copy(folder / "dense.pt", dense)
    return result


def main() -> None:
    given = options(
        __doc__, recipe="digits-resnet", rows=[*GATES, *PENALTIES], set=([str], "KEY=VALUE …"),
        seed=0, out=ROOT / "runs" / "penalties",
    )  # fmt: skip
    short = SHORT if given.recipe == "digits-resnet" else ()
    overrides = [*short, f"finetune.seed={given.seed}", *given.set]

    def cells(row: str) -> tuple[str, ...]:
        found = measure(row, given.recipe, overrides, given.out / f"seed-{given.seed}")
        share = found["macs"] / found["macs_before"]
        return row, f"{found['test_error']:.2%}", f"{share:.1%}", f"{found['params']:,}"

    table("penalty | error | MACs | params", map(cells, given.rows))


if __name__ == "__main__":
    main()
