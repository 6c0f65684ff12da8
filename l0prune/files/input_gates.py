"""Networks whose blocks open and close channels by their input: the gating modules and their hooks.

Before a block its input, averaged over all positions, goes through a small network, which says for
each channel of the block's inner axis how likely it is open. z of these gates multiplies what reads
the axis, so that a closed channel is nothing but a zero wherever it is read.
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
        dim: the dim of the layer's input that the axis is, from the end.
    """

    path: str
    axis: int
    dim: int


class GatedBlock(NamedTuple):
    """A block whose inner axes have gates.

    Attributes:
        path: of the block in the network.
        widths: slots of each axis.
        readers: all layers that read one of the axes.
        channels: of the block's input.
        dim: the dim of the block's input that holds them, from the end.
        each_position: every position has gates of its own, instead of every example.
        skips: there is one gate more, of the whole block.
    """

    path: str
    widths: tuple[int, ...]
    readers: tuple[Reader, ...]
    channels: int
    dim: int
    each_position: bool
    skips: bool


STEEP = 20.0
"""By how much log α is larger than what the Linears say: gates have farther to go than weights."""

Work = tuple[str, int, tuple[int, ...], float]
"""A layer, the number of its block, the axes of that by which it grows, and its MACs."""


class InputGate(nn.Module):
    """The gates of one block: mean over all positions, Linear, ReLU, and a Linear for each axis.

    Attributes:
        gate: the kind of gate; its tensors have the shape of a batch here.
        is_recording: ``chances`` are kept in eval mode, too.
        chances: of the last forward in training mode, P(z ≠ 0) of the gates of each axis, and at
            last of the block's where it has one; in eval mode whether they were open. Shape
            (examples, …, slots); with a graph.
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
        """Return what a copy has: nothing of the last forward."""
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
        """Return what a Linear says as log α, in float32 at least, whatever autocast does."""
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
        """Hook before the block: look at its input."""
        self._now = self(args[0])

    def after(self, *_: Any) -> None:
        """Hook after the block: forget what was for it alone."""
        self._now = []

    def scale(
        self, axis: int, dim: int, _: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Hook before a layer that reads an axis: multiply its input."""
        if not self._now:
            return None  # it is called by itself, outside of the block
        x, z = args[0], self._now[axis]
        between = x.dim() - z.dim() + dim + 1
        for _number in range(between):
            z = z.unsqueeze(1)
        for _number in range(-1 - dim):
            z = z.unsqueeze(-1)
        return (x * z.to(x.dtype), *args[1:])


class InputGatedNetwork(nn.Module):
    """A network with gates that follow its input, as ``l0prune.add_input_gates`` makes it.

    Its answers are the network's. The network in it has its own class and tensors; hooks on the
    blocks and on the layers that read their inner axes do the rest, until ``take_off``.

    Attributes:
        network: the user's.
        gates: one ``InputGate`` for each of ``blocks``.
        blocks: where they are.
        work: what follows the gates: of each layer its path, the number of its block, the axes
            of that by which it grows, and its MACs at the network's first size.
        macs: of the whole at its first size, gating modules included.
        target: share of those MACs that is to be computed on average; None for a price.
        price: of that share, in units of the loss, where there is no target.
        shape: weight of batch-shaping.
        multiplier: what stands for the price under a target; it learns (``input_penalty``).
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
        """Return the network without its hooks, as it was but for what it has learned."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return self.network

    @property
    def stands_for(self) -> nn.Module:
        """The network whose arguments its forward has."""
        return self.network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the network does; inputs are its own."""
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
        """Return a network with such gates, which have no values yet.

        Raises:
            AttributeError, KeyError, TypeError: these are no such facts.
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
