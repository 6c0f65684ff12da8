"""A cut network in 8 bits: how large it is, and how far what it answers is from before.

A network of three Linear layers on scikit-learn's digits, trained with gates to 30 % of its MACs,
then quantized by torchao and by ``torch.ao.quantization``, as it came and cut. *MB* are those of a
saved state_dict. *off* is the largest difference that quantization makes to an output, relative to
the largest output. Takes half a minute.

    python -m benchmarks.quantization [--epochs 30]
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import l0prune
from benchmarks.runner import options, table

Way = Callable[[nn.Module], nn.Module]


def by_torchao(module: nn.Module, *, activations: bool = False) -> nn.Module:
    """A copy with weights in int8; its activations, too, where they are multiplied."""
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    quantized = copy.deepcopy(module).eval()
    config = Int8DynamicActivationInt8WeightConfig() if activations else Int8WeightOnlyConfig()
    quantize_(quantized, config)
    return quantized


def by_torch(module: nn.Module) -> nn.Module:
    """A copy with weights in int8, activations quantized as they come: deprecated by torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import quantize_dynamic

        done: nn.Module = quantize_dynamic(module.eval(), {nn.Linear}, dtype=torch.qint8)
        return done


WAYS: dict[str, Way] = {
    "float32": lambda module: module,
    "torchao, weights int8": by_torchao,
    "torchao, weights and activations int8": lambda module: by_torchao(module, activations=True),
    "torch.ao, dynamic int8": by_torch,
}


def size(module: nn.Module) -> int:
    """Bytes of its state_dict in a file."""
    held = io.BytesIO()
    torch.save(module.state_dict(), held)
    return held.tell()


@torch.no_grad()
def off(expected: nn.Module, module: nn.Module, x: Tensor) -> float:
    """The largest difference of their outputs, relative to the largest of them."""
    before, after = expected(x), module(x)
    return float((before - after).abs().max() / before.abs().max())


def network() -> nn.Module:
    """The network."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def main() -> None:
    given = options(__doc__, epochs=30)
    data = l0prune.load_data("digits")
    x, _ = next(iter(data.test.batches(10_000)))
    dense = network()
    gated = l0prune.gate(copy.deepcopy(dense), x[:2])
    l0prune.finetune(gated, data, budget="macs=0.3", epochs=given.epochs, device="cpu")
    l0prune.train_dense(dense, data, epochs=given.epochs, device="cpu")
    cut = l0prune.export(gated)
    print(f"cut from {cut.params_before:,} to {cut.params:,} params")

    def cells(name: str) -> Iterator[str]:
        yield name
        for module in (dense, cut.module):
            made = WAYS[name](module)
            error = l0prune.evaluate(made, data, device="cpu")["error"]
            yield from (f"{size(made) / 1e6:.2f}", f"{error:.1%}", f"{off(module, made, x):.1%}")

    table(" | whole, MB | error | off | cut, MB | error | off", map(cells, WAYS))


if __name__ == "__main__":
    main()
