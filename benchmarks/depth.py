"""What whole blocks are worth in time: speed-up over MAC reduction, beside widths alone.

Blocks are closed evenly, or widths by the magnitude of their weights, until half of the MACs are
left; the ONNX file is timed in ONNX Runtime in turns with the dense network's. Weights are
random: nothing is learned here. 1.0 means that time goes as MACs do.

    python -m benchmarks.depth [--networks resnet56 vit …] [--ways 'whole blocks' …] [--share 0.5]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer

import l0prune
from benchmarks.runner import Some, machine, options, table
from recipes.vision import resnet56


def vit() -> nn.Module:
    """Eight blocks of width 192 over 64 patches."""
    return VisionTransformer(32, 4, 8, 4, 192, 768, num_classes=10)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet56": (resnet56, 32),
    "vit": (vit, 32),
    "resnet50": (models.resnet50, 224),
    "mobilenet_v2": (models.mobilenet_v2, 224),
    "densenet121": (models.densenet121, 224),
    "efficientnet_b0": (models.efficientnet_b0, 224),
    "convnext_tiny": (models.convnext_tiny, 224),
    "vit_b_16": (models.vit_b_16, 224),
    "inception_v3": (partial(models.inception_v3, init_weights=False), 299),
}
"""How each is made, and the side of its images."""


def by_depth(model: nn.Module, share: float) -> None:
    """Close branches, spread evenly over the network, until the budget is met."""
    gates = l0prune.gates(model)
    scores: Tensor = torch.tensor([_spread(number) for number in range(gates.plan.size)])
    l0prune.fit(model, f"macs={share}", scores)


def _spread(number: int) -> float:
    """The number with its bits in reverse order, between 0 and 1: neighbours lie far apart."""
    result, unit = 0.0, 0.5
    while number:
        result, number, unit = result + unit * (number & 1), number >> 1, unit / 2
    return result


def by_width(model: nn.Module, share: float, round_to: int) -> None:
    """Close slots of the least magnitude."""
    scores = l0prune.score(model, "magnitude")
    l0prune.fit(model, f"macs={share}", scores, round_to=round_to)


WAYS: dict[str, tuple[dict, Callable[[nn.Module, float], None]]] = {
    "whole blocks": ({"include": [], "branches": True}, by_depth),
    "widths": ({}, partial(by_width, round_to=1)),
    "widths in eights": ({}, partial(by_width, round_to=8)),
}


def measure(name: str, way: str, share: float) -> tuple[str, ...]:
    """MACs left, milliseconds before and after, and how the two compare."""
    torch.manual_seed(0)
    gates, close = WAYS[way]
    make, side = NETWORKS[name]
    example = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    model = l0prune.gate(make().eval(), example, **gates)
    close(model, share)
    small = l0prune.export(model)
    with tempfile.TemporaryDirectory() as folder:
        small.save_onnx(Path(folder) / "model.onnx")
    assert small.times is not None
    before, after, left = small.times.before, small.times.after, small.macs / small.macs_before
    numbers = before, after, before / after, before / after * left
    return name, way, f"{left:.1%}", *(f"{number:.2f}" for number in numbers)


def main() -> None:
    share = (0.5, "of the MACs that is left")
    given = options(__doc__, threads=None, networks=Some(NETWORKS), ways=Some(WAYS), share=share)
    print(f"{machine()}; timed on one, batch 1\n")
    rows = (measure(name, way, given.share) for name in given.networks for way in given.ways)
    table("network | cut | MACs left | dense ms | small ms | speed-up | of the ideal", rows)


if __name__ == "__main__":
    main()
