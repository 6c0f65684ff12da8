"""Single weights of the networks of MNIST, by global sparse momentum or another penalty.

    python -m benchmarks.elements
    python -m benchmarks.elements --networks lenet5 --epochs 30 --penalties gsm trimmed-l1

Each network is trained, then fine-tuned until as many weights are not zero as Ding et al. 2019 have
left. Weights are those of parameters with two or more dims, as there; the error is that of the
exported network on the test images after the last epoch. Files stay dense: ``params`` are those of
the export, whose slots without weights are gone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.isolation import ROOT
from benchmarks.runner import Some, options, table
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


def rows(given: Any) -> Iterator[tuple[str, ...]]:
    """Yield the dense network and each penalty."""
    data = l0prune.load_data("mnist")
    settings = {name: getattr(given, name) for name in ("epochs", "ramp", "lr", "distill")}
    if given.weight_decay is not None:
        settings["weight_decay"] = given.weight_decay
    for name in given.networks:
        dense = trained(name, data, given.out, given.dense_epochs)
        yield name, "none", "", f"{l0prune.evaluate(dense, data)['error']:.2%}", "", ""
        for penalty in given.penalties:
            yield row(name, penalty, dense, data, settings)


def row(
    name: str, penalty: str, dense: nn.Module, data: Any, settings: dict[str, Any]
) -> tuple[str, ...]:
    """Fine-tune a copy, and return a row of the table."""
    total, left, published = PUBLISHED[name]
    model = copy.deepcopy(dense)
    l0prune.gate(model, (data.train.example(2),))
    own = {"optimizer": "gsm", "batch_size": 256} if penalty == "gsm" else {"penalty": penalty}
    given = {"elements": left / total, **own, **settings}
    history = l0prune.finetune(model, data, report=False, **given)
    small = l0prune.export(model)
    wrong = l0prune.evaluate(small.module, data)["error"]
    kept = f"{history.last['nonzero']:,} of {total:,}"
    return name, penalty, kept, f"{wrong:.2%}", f"{small.params:,}", published


def main() -> None:
    given = options(
        __doc__, networks=Some(PUBLISHED), penalties=["gsm"], epochs=30, dense_epochs=4, ramp=0.6,
        lr=(0.03, "of the weights"), weight_decay=(float, "of gsm; by default for these steps"),
        distill=0.0, out=ROOT / "runs" / "elements",
    )  # fmt: skip
    head = "network | penalty | weights not zero | error | params | error of the paper"
    table(head, rows(given))


if __name__ == "__main__":
    main()
