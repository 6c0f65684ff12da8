"""The MNIST networks of the paper's Table 1 and smaller ones, beside what others published.

    python -m benchmarks.mnist [--rows mlp-lambda lenet5-small …]
    python -m benchmarks.mnist --rows mlp-small --set finetune.epochs=20 --out runs/mnist-short

Each row is a recipe with some settings of its own, run in ``runs/mnist/ROW``; stages that are done
there are not done again, and a run that was stopped goes on. The architecture is told from the
shapes of the exported weights, in the paper's way (the inputs of a Linear, the maps of a
convolution), and weights are counted without biases, as there; params are all. The error is that
of the exported model on the test images after the last epoch, and of its ONNX file in ONNX Runtime.
Seconds are those of training, dense training included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.curves import seconds
from benchmarks.isolation import ROOT
from benchmarks.runner import Some, options, table
from l0prune.features.recipes.files import load
from l0prune.features.recipes.runs import run


def _mlp(inputs: int, first: int, second: int) -> int:
    return inputs * first + first * second + second * 10


def _lenet5(first: int, second: int, flat: int, hidden: int) -> int:
    return 25 * first + 25 * first * second + flat * hidden + hidden * 10


WEIGHTS: dict[str, Callable[..., int]] = {"mlp": _mlp, "lenet5": _lenet5}
DENSE = {"mlp": "784-300-100", "lenet5": "20-50-800-500"}

# Row: its network, its recipe, and what it sets otherwise.
ROWS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "mlp-lambda": ("mlp", "mnist-mlp", ()),
    "mlp-small": ("mlp", "mnist-mlp-small", ()),
    "mlp-34k": ("mlp", "mnist-mlp-small", ("finetune.budget=params=34k", "finetune.settle=20")),
    # The paper's 200 epochs at a gate rate of 1e-3, in fewer at a higher one.
    "lenet5-lambda": ("lenet5", "mnist-lenet5",
                      ("finetune.epochs=48", "finetune.settle=4", "finetune.gate_lr=3e-2")),
    "lenet5-small": ("lenet5", "mnist-lenet5-small", ()),
    "lenet5-2k": ("lenet5", "mnist-lenet5-small",
                  ("finetune.budget=params=2050", "recover.epochs=100")),
    "lenet5-10k": ("lenet5", "mnist-lenet5-small",
                   ("finetune.budget=params=10k", "finetune.epochs=25", "recover.epochs=20")),
}  # fmt: skip


class Published(NamedTuple):
    """A result of others; the architecture is not always known."""

    network: str
    who: str
    architecture: str | None
    error: float
    params: int | None = None


PUBLISHED = (
    Published("mlp", "the paper, λ = 0.1/N", "219-214-100", 0.014),
    Published("mlp", "the paper's code on this data", "277-201-99", 0.0148),
    Published("mlp", "the paper, λ sep.", "266-88-33", 0.018),
    Published("mlp", "BC-GNJ", "278-98-13", 0.018),
    Published("lenet5", "the paper, λ = 0.1/N", "20-25-45-462", 0.009),
    Published("lenet5", "the paper, λ sep.", "9-18-65-25", 0.010),
    Published("lenet5", "BC-GHS", "5-10-76-16", 0.010),
    # Gallego-Posada et al. 2022: 2.35 % of the parameters, by the saved results of their code.
    Published("lenet5", "constrained L0", None, 0.0091, round(0.0235 * 431_080)),
)


def weights(network: str, architecture: str) -> int:
    """Weights without biases of a network of this architecture."""
    return WEIGHTS[network](*map(int, architecture.split("-")))


def measure(row: str, overrides: list[str], out: Path) -> dict[str, Any]:
    """Do the row's recipe, or what is missing of it."""
    network, name, own = ROWS[row]
    folder = out / row
    recipe = load(name, [*own, "export.state=true", *overrides])
    result = run(recipe, folder)
    state = torch.load(folder / f"{recipe.name}.state.pt", weights_only=True)["state_dict"]
    shapes = [tensor.shape for tensor in state.values() if tensor.dim() > 1]
    return {
        "row": row,
        "network": network,
        "architecture": "-".join(str(s[0] if len(s) == 4 else s[1]) for s in shapes),
        "params": result["params"],
        "weights": sum(map(math.prod, shapes)),
        "error": result["test_error"],
        "onnx_error": result["onnx_test_error"],
        "seconds": seconds(folder),
    }


def cells(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield for each network what was measured, then what others published."""
    for network in dict.fromkeys(row["network"] for row in found):
        dense = DENSE[network]
        yield network, "dense", dense, f"{weights(network, dense):,}", "", "", "", ""
        for row in (row for row in found if row["network"] == network):
            counts = f"{row['weights']:,}", f"{row['params']:,}"
            errors = f"{row['error']:.2%}", f"{row['onnx_error']:.2%}"
            about = network, f"**{row['row']}**", row["architecture"]
            yield *about, *counts, *errors, f"{row['seconds']:,.0f}"
        for other in (other for other in PUBLISHED if other.network == network):
            known = other.architecture
            count = "" if known is None else f"{weights(network, known):,}"
            params = "" if other.params is None else f"{other.params:,}"
            yield network, other.who, known or "", count, params, f"{other.error:.2%}", "", ""


def main() -> None:
    out = ROOT / "runs" / "mnist"
    given = options(__doc__, rows=Some(ROWS), set=([str], "KEY=VALUE, for all rows"), out=out)
    found = [measure(row, given.set, given.out) for row in given.rows]
    table("network | who | architecture | weights | params | error | ONNX error | s", cells(found))


if __name__ == "__main__":
    main()
