"""Single weights of the networks of MNIST, by global sparse momentum or another penalty.

    python -m benchmarks.elements
    python -m benchmarks.elements --networks lenet5 --epochs 30 --penalties gsm trimmed-l1

Each network is trained, then fine-tuned until as many weights are not zero as Ding et al. 2019 have
left. Weights are those of parameters with two or more dims, as there; the error is that of the
exported network on the test images after the last epoch. Files stay dense: ``params`` are those of
the export, whose slots without weights are gone.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.isolation import ROOT
from l0prune.files.model_sources import load_model

# Network: weights, those that global sparse momentum left, and its error.
PUBLISHED = {"mlp": (266_200, 4_400, "1.82%"), "lenet5": (430_500, 1_400, "0.94%")}
DENSE: dict[str, Any] = {"lr": 1e-3, "schedule": "cosine", "batch_size": 256}


def trained(name: str, data: Any, folder: Path, epochs: int) -> nn.Module:
    """Return the dense network, of a file that was written before if there is one."""
    torch.manual_seed(0)
    model = load_model(f"{ROOT / 'recipes' / 'vision.py'}:{name}")
    path = folder / f"{name}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    l0prune.train_dense(model, data, epochs=epochs, report=False, **DENSE)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def row(name: str, penalty: str, dense: nn.Module, data: Any, settings: dict[str, Any]) -> str:
    """Fine-tune a copy, and return a line of the table."""
    total, left, published = PUBLISHED[name]
    model = copy.deepcopy(dense)
    l0prune.gate(model, (data.train.example(2),))
    own = {"optimizer": "gsm", "batch_size": 256} if penalty == "gsm" else {"penalty": penalty}
    given = {"elements": left / total, **own, **settings}
    history = l0prune.finetune(model, data, report=False, **given)
    small = l0prune.export(model)
    wrong = l0prune.evaluate(small.module, data)["error"]
    nonzero = history.last["nonzero"]
    kept = f"{nonzero:,} of {total:,}"
    return f"| {name} | {penalty} | {kept} | {wrong:.2%} | {small.params:,} | {published} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=[*PUBLISHED], choices=[*PUBLISHED])
    parser.add_argument("--penalties", nargs="+", default=["gsm"])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--dense-epochs", type=int, default=4)
    parser.add_argument("--ramp", type=float, default=0.6)
    parser.add_argument("--lr", type=float, default=0.03, help="of the weights")
    parser.add_argument("--weight-decay", type=float, help="of gsm; by default for these steps")
    parser.add_argument("--distill", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "elements")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = l0prune.load_data("mnist")
    settings = {name: getattr(options, name) for name in ("epochs", "ramp", "lr", "distill")}
    if options.weight_decay is not None:
        settings["weight_decay"] = options.weight_decay
    print("| network | penalty | weights not zero | error | params | error of the paper |")
    print("|---" * 6 + "|")
    for name in options.networks:
        dense = trained(name, data, options.out, options.dense_epochs)
        print(f"| {name} | none | | {l0prune.evaluate(dense, data)['error']:.2%} | | |", flush=True)
        for penalty in options.penalties:
            print(row(name, penalty, dense, data, settings), flush=True)


if __name__ == "__main__":
    main()
