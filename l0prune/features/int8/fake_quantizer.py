"""Fake quantization: a network that computes in floating point what its int8 file will.

Each weight w of a layer, times its gates, is read as ``s·clamp(round(w/s), −127, 127)``, with a
step ``s = max|w|/127`` for each output. A value x at a point between layers is
``s·(clamp(round(x/s) + zero, 0, 255) − zero)``, with one step and zero for all of it, from the
moving averages of its least and largest number. Gradients go straight through the rounding, and are
0 where a value is clamped.

A runtime folds BatchNorm into the convolution before it. With a step for each output that changes
no rounding: of ``g·w`` step and weight are both g times as large. So BatchNorm stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.features.int8.attaching import OnLayers
from l0prune.features.int8.ranges import LEVELS, SMALLEST, Ranges, Scheme
from l0prune.gating.bank import Gates
from l0prune.plan.cost import CostModel
from l0prune.plan.plan import Plan

_LEAST_SHARE = 0.01  # of a step in the moving averages


class FakeQuantizer(OnLayers):
    """Fake quantization of the layers of one gated model, and the ranges that it has seen.

    Attributes:
        largest: the largest integer of a weight, by magnitude.
        is_on: forwards are quantized, at the points whose range is known.
        is_observing: forwards in training mode record the ranges of values.
        ranges: least and most of each point, shape ``(points, 2)``.
        counts: steps that each point's range is from; 0 where it is not known.
    """

    def __init__(self, gates: Gates, scheme: Scheme, largest: int) -> None:
        super().__init__(gates, scheme)
        self.largest = largest
        self.is_on = self.is_observing = False
        self.ranges = torch.zeros(len(scheme.bounds), 2)
        self.counts = [0] * len(scheme.bounds)
        self._steps = torch.ones(len(scheme.bounds))
        self._zeros = torch.zeros(len(scheme.bounds), dtype=torch.int32)
        self._seen: dict[int, Tensor] = {}  # least and most of this step

    @classmethod
    def of(cls, gates: Gates, ranges: Ranges) -> FakeQuantizer:
        """Return an enabled quantizer with ranges that a training found."""
        made = cls(gates, ranges.scheme, ranges.largest)
        made.take(ranges)
        return made

    def take(self, ranges: Ranges) -> None:
        """Load ranges that a training found, and enable the quantizer."""
        found = torch.tensor([ranges.least, ranges.most]).T.contiguous()
        self.load(found, ranges.counts)
        self.is_on = True

    def bake(self, model: nn.Module) -> None:
        """Round the weights of a gated model to their grids; only ``LearnedBits`` does."""

    def for_file(self, plan: Plan, kept: Tensor) -> Ranges | None:
        """See ``Rounding``."""
        return self.found if any(self.counts) else None

    def price(self, plan: Plan) -> CostModel | None:
        """See ``Rounding``."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """See ``Rounding``."""
        return self.found.to_dict()

    @property
    def found(self) -> Ranges:
        """The ranges as plain data."""
        least, most = (tuple(column.tolist()) for column in self.ranges.cpu().T)
        return Ranges(self.scheme, least, most, tuple(self.counts), self.largest)

    @property
    def by_layer(self) -> dict[str, tuple[int, int]]:
        """Bits of the weight and the input of each layer, by path; empty where none are learned."""
        return {}

    def load(self, ranges: Tensor, counts: Sequence[int]) -> None:
        """Replace the ranges, and the number of steps that each is from."""
        self.ranges, self.counts = ranges.clone(), list(counts)
        self._seen = {}
        self._to_grids()

    def off(self) -> None:
        """Disable quantization and observation."""
        self.is_on = self.is_observing = False

    @property
    def acts(self) -> bool:
        """Return whether weights are read quantized now."""
        return self.is_on and not self.gates.bypassed

    def weight(self, weight: Tensor, layer: int) -> Tensor:
        """Quantize the weight of this layer. Shape: ``(outputs, …)``, and so the result."""
        if not weight.numel():
            return weight
        steps = weight.detach().flatten(1).abs().amax(1).float() / self.largest
        zeros = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        return torch.fake_quantize_per_channel_affine(
            weight, steps.clamp_min(SMALLEST), zeros, 0, -self.largest, self.largest
        )

    def at(self, point: int, value: Tensor) -> Tensor:
        """Observe and quantize a value at this point. Shape: any, and so the result."""
        if self.gates.bypassed or not value.numel():
            return value
        if self.is_observing and self.gates.training:
            self._observe(point, value.detach())
        if not (self.is_on and self.counts[point]):
            return value
        return self._on_grid(point, value)

    def _on_grid(self, point: int, value: Tensor) -> Tensor:
        if self._steps.device != value.device:
            self._steps, self._zeros = self._steps.to(value.device), self._zeros.to(value.device)
        steps, zeros = self._steps[point], self._zeros[point]
        return torch.fake_quantize_per_tensor_affine(value, steps, zeros, 0, LEVELS)

    def _observe(self, point: int, value: Tensor) -> None:
        found = torch.stack(value.aminmax()).float()
        if point in self._seen:  # by another micro-batch, or by the same one in backward
            before = self._seen[point]
            found = torch.stack((before[0].minimum(found[0]), before[1].maximum(found[1])))
        self._seen[point] = found

    @property
    def computed(self) -> list[int]:
        """Numbers of the points that were computed in this step."""
        return sorted(self._seen)

    def forget(self) -> None:
        """Drop, before a step, the ranges observed in forwards outside of it."""
        self._seen = {}

    @property
    def seen(self) -> Tensor:
        """Least and most of each point in this step, infinite where it was not computed.

        Shape: ``(points, 2)``.
        """
        none = self.ranges.new_tensor([float("inf"), float("-inf")])
        device = next((pair.device for pair in self._seen.values()), none.device)
        return torch.stack([self._seen.get(n, none).to(device) for n in range(len(self.counts))])

    @torch.no_grad()
    def advance(self, seen: Tensor, points: Sequence[int]) -> None:
        """Update, after a step, the moving averages with the ranges that its forwards observed.

        Args:
            seen: the attribute ``seen``, or its extremes over all processes.
            points: those that were computed.
        """
        self._seen = {}
        bounds = torch.tensor(self.scheme.bounds, device=seen.device)
        found = seen.clamp(bounds[:, :1], bounds[:, 1:])
        found = torch.stack((found[:, 0].clamp_max(0), found[:, 1].clamp_min(0)), 1)
        shares = [0.0] * len(self.counts)
        for point in points:
            self.counts[point] += 1
            shares[point] = max(_LEAST_SHARE, 1 / self.counts[point])
        share, ranges = torch.tensor(shares, device=seen.device)[:, None], self.ranges.to(seen)
        self.ranges = torch.where(share > 0, torch.lerp(ranges, found, share), ranges)
        self._to_grids()

    def _to_grids(self) -> None:
        """Compute step and zero of each point, as ``Ranges.grid`` does."""
        least, most = self.ranges.unbind(1)
        self._steps = ((most - least) / LEVELS).clamp_min(SMALLEST)
        self._zeros = (-least / self._steps).round().clamp(0, LEVELS).int()
