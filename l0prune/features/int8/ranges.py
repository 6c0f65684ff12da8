"""Layers of a network quantized to eight bits, and the values that they read and write.

Plain data. A *point* is a value of the network that is rounded to a grid of 256 numbers. Each layer
reads one; a convolution writes one, after the BatchNorm that follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

LEVELS = 255
SMALLEST = float(np.float32(1e-12))  # step of a grid; no number of NumPy, which breaks graphs


@dataclass(frozen=True)
class QuantizedLayer:
    """A Linear or convolution whose weight and input are in eight bits.

    Attributes:
        path: of the module.
        weight: name of its weight in the model.
        reads: number of the point that is its input.
        quantizes: whether it rounds its input to that grid; else the input already is on it.
        writes: number of the point that it writes; None for none.
        adds_to: number of the point of the sum that its output is added to; None for none.
    """

    path: str
    weight: str
    reads: int
    quantizes: bool
    writes: int | None = None
    adds_to: int | None = None


@dataclass(frozen=True)
class Scheme:
    """The layers of a network that are in eight bits, and the points between them.

    Attributes:
        layers: of the network.
        bounds: of each point, the least and largest number that the next operator distinguishes:
            0 and infinity before a ReLU.
        outputs: by path of a module, the number of the point that is its output.
        sums: the same of modules that return a sum. Sums along a residual stream have one point,
            that of the stream's first value, so that a branch can be removed without a trace.
    """

    layers: tuple[QuantizedLayer, ...]
    bounds: tuple[tuple[float, float], ...]
    outputs: Mapping[str, int]
    sums: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Bits:
    """Bits that a training has learned, for a file.

    Attributes:
        points: of each point.
        weights: of each layer's weight.
        ends: of each layer, the largest whole number of each output's weights, by magnitude.
    """

    points: tuple[int, ...]
    weights: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ranges:
    """A scheme with the ranges that a training found.

    Attributes:
        scheme: what is in eight bits.
        least, most: of each point, with 0 between.
        counts: number of steps that each point's range is from; 0 where it is not known.
        largest: the largest integer of a weight, by magnitude.
        menu: bits of which those of each tensor are learned; empty where all have eight.
        bits: those that were learned, for a file.
    """

    scheme: Scheme
    least: tuple[float, ...]
    most: tuple[float, ...]
    counts: tuple[int, ...]
    largest: int
    menu: tuple[int, ...] = ()
    bits: Bits | None = None

    @property
    def by_layer(self) -> dict[str, tuple[int, int]]:
        """Bits of the weight and of the input of each layer, by path; empty where all are eight."""
        if self.bits is None:
            return {}
        pairs = zip(self.scheme.layers, self.bits.weights, strict=True)
        return {layer.path: (bits, self.bits.points[layer.reads]) for layer, bits in pairs}

    def levels(self, point: int) -> int:
        """Return the largest whole number of a point's grid, 255 for eight bits."""
        return LEVELS if self.bits is None else 2 ** self.bits.points[point] - 1

    def grid(self, point: int) -> tuple[np.float32, int]:
        """Return step and zero of a point's grid ``step·(q − zero)``, q from 0 to ``levels``."""
        least, most = np.float32(self.least[point]), np.float32(self.most[point])
        levels = self.levels(point)
        step = np.maximum((most - least) / np.float32(levels), np.float32(SMALLEST))
        return step, int(np.clip(np.round(-least / step), 0, levels))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        return asdict(self)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read the result of ``to_dict`` from untrusted data.

        Raises:
            ValueError, TypeError, LookupError: the data is invalid.
        """
        scheme = given["scheme"]
        layers = tuple(QuantizedLayer(**each) for each in scheme["layers"])
        bounds = tuple((float(low), float(high)) for low, high in scheme["bounds"])
        outputs, sums = (
            {str(path): int(point) for path, point in scheme[name].items()}
            for name in ("outputs", "sums")
        )
        least, most, counts = (tuple(given[name]) for name in ("least", "most", "counts"))
        if {len(least), len(most), len(counts)} != {len(bounds)}:
            raise ValueError(f"ranges of another number of points than {len(bounds)}")
        used = {each.reads for each in layers} | {*outputs.values(), *sums.values()}
        of_layers = (point for each in layers for point in (each.writes, each.adds_to))
        used |= {point for point in of_layers if point is not None}
        if not used <= {*range(len(bounds))}:
            raise ValueError("points that there are not")
        return cls(
            Scheme(layers, bounds, outputs, sums),
            tuple(map(float, least)),
            tuple(map(float, most)),
            tuple(map(int, counts)),
            int(given["largest"]),
            tuple(map(int, given.get("menu", ()))),
        )
