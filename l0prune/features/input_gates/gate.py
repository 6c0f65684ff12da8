"""Gates of one block, computed from the block's input; hooks multiply by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l0prune.gating.kinds.base import Gate


class Reader(NamedTuple):
    """A layer that reads an axis.

    Attributes:
        path: of the layer in the network.
        axis: its number among those of the block.
        dim: the dim of the layer's input along which the axis runs, from the end.
    """

    path: str
    axis: int
    dim: int


class GatedBlock(NamedTuple):
    """Block whose inner axes have input gates.

    Attributes:
        path: of the block in the network.
        widths: number of slots of each axis.
        readers: all layers that read one of the axes.
        channels: of the block's input.
        dim: the dim of the block's input that holds them, from the end.
        each_position: whether every position has separate gates, instead of every example.
        skips: whether there is one more gate for the whole block.
    """

    path: str
    widths: tuple[int, ...]
    readers: tuple[Reader, ...]
    channels: int
    dim: int
    each_position: bool
    skips: bool


STEEP = 20.0
"""Factor from the Linears' outputs to log α: gates have farther to move than weights."""

Work = tuple[str, int, tuple[int, ...], float]
"""Path of a layer, index of its block, that block's axes by which MACs scale, and its MACs."""


class InputGate(nn.Module):
    """The gates of one block: mean over all positions, Linear, ReLU, and a Linear for each axis.

    Attributes:
        gate: the kind of gate; its tensors have the shape of a batch here.
        is_recording: whether ``chances`` are kept in eval mode, too.
        chances: of the last forward in training mode, P(z ≠ 0) of the gates of each axis, and last
            of the block's gate if it has one; in eval mode whether they were open. Shape
            (examples, …, slots); with an autograd graph.
    """

    def __init__(self, block: GatedBlock, hidden: int, gate: Gate) -> None:
        super().__init__()
        self.gate, self.dim, self.each_position = gate, block.dim, block.each_position
        self.hidden = nn.Linear(block.channels, hidden)
        self.axes = nn.ModuleList(nn.Linear(hidden, width) for width in block.widths)
        self.whole = nn.Linear(hidden, 1) if block.skips else None
        self.is_recording = False
        self._now: list[Tensor] = []
        self.chances: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without values of the last forward."""
        return {**self.__dict__, "_now": [], "chances": []}

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the multipliers of each axis.

        Shape: x that of the block's input; each (examples, slots), or with gates for each position
        (examples, …, slots).
        """
        if not self.each_position:
            over = [dim for dim in range(1, x.dim()) if dim != x.dim() + self.dim]
            x = x.mean(over) if over else x
        elif self.dim != -1:
            x = x.movedim(self.dim, -1)
        hidden = self.hidden(x).relu()
        logits = [self._log_alpha(axis(hidden)) for axis in self.axes]
        z = [self._z(each) for each in logits]
        if self.whole is not None:
            logits.append(self._log_alpha(self.whole(hidden)))
            of_block = self._z(logits[-1])
            z = [each * of_block for each in z]
        if self.training or self.is_recording:
            self.chances = [self._chance(each) for each in logits]
        return z

    @staticmethod
    def _log_alpha(found: Tensor) -> Tensor:
        """Return a Linear's output as log α, in at least float32 also under autocast."""
        return STEEP * (found.float() if found.dtype.itemsize < 4 else found)

    def _z(self, logits: Tensor) -> Tensor:
        if not self.training:
            return self.gate.estimate(logits)
        tiny = torch.finfo(logits.dtype).eps
        return self.gate.sample(logits, torch.rand_like(logits).clamp(tiny, 1 - tiny))

    def _chance(self, logits: Tensor) -> Tensor:
        if self.training:
            return self.gate.open_probability(logits)
        return (self.gate.estimate(logits) != 0).to(logits.dtype)

    # --- hooks ------------------------------------------------------------------------------

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before the block: compute z from its input."""
        self._now = self(args[0])

    def after(self, *_: Any) -> None:
        """Hook after the block: discard its z."""
        self._now = []

    def scale(
        self, axis: int, dim: int, _: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Hook before a layer that reads an axis: multiply its input by z."""
        if not self._now:
            return None  # the layer is called outside of the block
        x, z = args[0], self._now[axis]
        between = x.dim() - z.dim() + dim + 1
        for _number in range(between):
            z = z.unsqueeze(1)
        for _number in range(-1 - dim):
            z = z.unsqueeze(-1)
        return (x * z.to(x.dtype), *args[1:])
