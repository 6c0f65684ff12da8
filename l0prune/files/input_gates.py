"""Input gates: modules and hooks that open and close the channels of blocks by their input.

Before a block its input, averaged over all positions, goes through an ``InputGate``, which computes
log α for each channel of the block's inner axes. z of these gates multiplies the inputs of the
layers that read an axis, so that a closed channel is zero wherever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l0prune.gating.kinds.base import Gate, gate_from_dict, gate_to_dict


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


class InputGatedNetwork(nn.Module):
    """Network with input gates, as ``l0prune.add_input_gates`` makes it.

    It returns the network's outputs. The network keeps its class and tensors; hooks on the
    blocks and on the layers that read their inner axes apply the gates, until ``take_off``.

    Attributes:
        network: the user's network.
        gates: one ``InputGate`` for each of ``blocks``.
        blocks: the gated blocks.
        work: the layers whose MACs depend on gates: path, index of the block, the axes of that
            by which they scale, and the MACs at the network's first size.
        macs: of the whole at its first size, gating modules included.
        target: share of those MACs that is to be computed on average; None for a price.
        price: of that share, in units of the loss, where there is no target.
        shape: weight of batch-shaping.
        multiplier: learned price under a target (``input_penalty``).
    """

    multiplier: Tensor

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[GatedBlock],
        hidden: Sequence[int],
        gate: Gate,
        work: Sequence[Work],
        macs: float,
        target: float | None,
        price: float,
        shape: float,
    ) -> None:
        super().__init__()
        self.network, self.blocks, self.macs = network, tuple(blocks), macs
        self.work = tuple(work)
        self.target, self.price, self.shape = target, price, shape
        pairs = zip(blocks, hidden, strict=True)
        self.gates = nn.ModuleList(InputGate(block, size, gate) for block, size in pairs)
        self.register_buffer("multiplier", torch.zeros(()))
        self._handles: list[Any] = []
        self._put_on()

    def _put_on(self) -> None:
        """Register the hooks."""
        for block, gate in zip(self.blocks, self.gates, strict=True):
            assert isinstance(gate, InputGate)
            module = self.network.get_submodule(block.path)
            self._handles.append(module.register_forward_pre_hook(gate.before))
            self._handles.append(module.register_forward_hook(gate.after, always_call=True))
            for path, axis, dim in block.readers:
                hook: Callable[..., Any] = partial(gate.scale, axis, dim)
                layer = self.network.get_submodule(path)
                self._handles.append(layer.register_forward_pre_hook(hook))

    def take_off(self) -> nn.Module:
        """Remove the hooks and return the network, with the weights that it has learned."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return self.network

    @property
    def stands_for(self) -> nn.Module:
        """The wrapped network, whose arguments the forward takes."""
        return self.network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's output; inputs are those of the network."""
        return self.network(*args, **kwargs)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the gates as plain data, for ``of_facts``."""
        names = ("work", "macs", "target", "price", "shape")
        first = self.gates[0]
        assert isinstance(first, InputGate)
        hidden = [gate.hidden.out_features for gate in self.gates]  # type: ignore[union-attr]
        own = {"blocks": self.blocks, "hidden": hidden, "gate": gate_to_dict(first.gate)}
        return own | {name: getattr(self, name) for name in names}

    @classmethod
    def of_facts(cls, network: nn.Module, facts: Mapping[str, Any]) -> InputGatedNetwork:
        """Build a network with input gates from ``facts``; their weights are not loaded.

        Raises:
            AttributeError, KeyError, TypeError: the facts are invalid.
        """
        blocks = [
            GatedBlock(path, tuple(widths), tuple(Reader(*each) for each in readers), *rest)
            for path, widths, readers, *rest in facts["blocks"]
        ]
        work = [(path, block, tuple(axes), macs) for path, block, axes, macs in facts["work"]]
        return cls(
            network,
            blocks,
            facts["hidden"],
            gate_from_dict(facts["gate"]),
            work,
            *(facts[name] for name in ("macs", "target", "price", "shape")),
        )
