"""Input gates: modules and hooks that open and close the channels of blocks by their input.

Before a block its input, averaged over all positions, goes through an ``InputGate``, which computes
log α for each channel of the block's inner axes. z of these gates multiplies the inputs of the
layers that read an axis, so that a closed channel is zero wherever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from l0prune.features.input_gates.cost import means_of, shaping, share_of
from l0prune.features.input_gates.gate import GatedBlock, InputGate, Reader, Work
from l0prune.files.around import AROUND, Around
from l0prune.gating.kinds.base import Gate, gate_from_dict, gate_to_dict

_STEP = 0.05  # of the multiplier, for an excess of all MACs
_UNPAID = (
    "this model has input gates, and nothing makes them close: before its backward pass, the loss "
    "of each forward needs what they pay: loss = loss + l0prune.input_penalty(model)"
)


@AROUND.register
class InputGatedNetwork(Around):
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

    name, words, has_hooks, scales_slots = "input_gates", "input gates", True, True
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
        for block, gate in zip(self.blocks, self._each(), strict=True):
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

    def shares(self) -> Tensor | None:
        """Return the share of the MACs that the gates left in the last forward, on average.

        In training mode it is the expectation over their noise, differentiable. None where there
        has been no such forward.
        """
        means = [means_of(gate) for gate in self._each()]
        if not all(means):
            return None
        total = torch.as_tensor(self.macs - sum(each[-1] for each in self.work)).to(means[0][0])
        for _, block, axes, macs in self.work:
            own = share_of(axes, means[block], self.blocks[block].skips)
            total = total + macs * own.mean()
        return total / self.macs

    def cost(self) -> Tensor | None:
        """See ``Around``; the multiplier of a target takes its step."""
        share = self.shares()
        if share is None:
            return None
        if self.target is None:
            total = self.price * share
        else:
            excess = share - self.target
            total = self.multiplier.clone().to(share) * excess
            if self.training:
                with torch.no_grad():
                    self.multiplier.add_(_STEP * excess.detach()).clamp_(min=0)
        if self.shape:
            total = total + self.shape * shaping(self._each())
        for gate in self._each():
            gate.chances = []
        return total

    def unpaid(self) -> str:
        """See ``Around``."""
        return _UNPAID if any(gate.chances for gate in self._each()) else ""

    def _each(self) -> Iterator[InputGate]:
        return (gate for gate in self.gates if isinstance(gate, InputGate))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's output; inputs are those of the network."""
        return self.network(*args, **kwargs)

    @property
    def facts(self) -> dict[str, Any]:
        """The gates as plain data."""
        names = ("work", "macs", "target", "price", "shape")
        gates = [*self._each()]
        hidden = [gate.hidden.out_features for gate in gates]
        own = {"blocks": self.blocks, "hidden": hidden, "gate": gate_to_dict(gates[0].gate)}
        return own | {name: getattr(self, name) for name in names}

    @classmethod
    def of_facts(cls, network: nn.Module, facts: Mapping[str, Any]) -> Self:
        """See ``Around``."""
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


def input_gated(model: nn.Module) -> InputGatedNetwork | None:
    """Return the network with input gates in a model, if there is one."""
    return next((m for m in model.modules() if isinstance(m, InputGatedNetwork)), None)


def input_penalty(model: nn.Module) -> Tensor | None:
    """Return the cost of the input gates of the last forward in training mode, to add to the loss.

    ``finetune`` and ``train_dense`` add it by themselves, ``l0prune.penalty`` includes it; in a
    loop of your own with a ``Pruner`` it belongs to the loss of each forward, before its backward
    pass. The multiplier of a target takes its step.

    Returns a scalar; None where the model has no input gates, or has not been run in training mode
    since the last penalty.
    """
    network = input_gated(model)
    return None if network is None else network.cost()
