"""Networks with early exits: a network as it is, and heads that read values on its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.errors import UsageError

Reached = Callable[[int, Tensor], None]
"""Told each exit's number and its answer as soon as that is computed; it may raise."""


class ExitOutputs(NamedTuple):
    """Answers of a network with exits.

    Attributes:
        logits: the answer of the network itself, its last exit.
        exits: the answers of the early exits, in their order, each of the shape of ``logits``.
    """

    logits: Tensor
    exits: tuple[Tensor, ...]


class PooledLinear(nn.Module):
    """Head of an exit: the mean over all positions, then a Linear.

    Args:
        channels: size of the dim that is read.
        outputs: of the Linear.
        dim: the one that holds the channels; the first dim is the batch, the others are averaged.
        dims: of the value that is read.
    """

    def __init__(self, channels: int, outputs: int, dim: int, dims: int) -> None:
        super().__init__()
        self.over = [number for number in range(1, dims) if number != dim]
        self.linear = nn.Linear(channels, outputs)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The arguments that it was made with."""
        dims = len(self.over) + 2
        (dim,) = {*range(1, dims)} - {*self.over}
        return self.linear.in_features, self.linear.out_features, dim, dims

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (n, …, channels, …) to (n, outputs)."""
        found: Tensor = self.linear(x.mean(self.over) if self.over else x)
        return found


class ExitNetwork(nn.Module):
    """A network with early exits, as ``l0prune.add_exits`` makes it. In all modes it computes all.

    The network in it is as it was, and knows nothing of the exits: while a forward of this module
    runs, hooks hand what the modules at ``at`` return to the heads.

    Attributes:
        network: the user's.
        heads: one for each exit.
        at: paths in the network of the modules whose outputs the heads read.
        weights: of the exits in the loss.
        distill: share of each exit's loss that is distillation from the last exit.
        temperature: of that.
    """

    def __init__(
        self,
        network: nn.Module,
        at: Sequence[str],
        heads: Sequence[nn.Module],
        weights: Sequence[float],
        distill: float,
        temperature: float,
    ) -> None:
        super().__init__()
        self.network, self.heads, self.at = network, nn.ModuleList(heads), tuple(at)
        self.weights, self.distill = tuple(weights), distill
        self.temperature = temperature

    @property
    def facts(self) -> dict[str, Any] | None:
        """Return the exits as plain data for ``of_facts``; None if a head is not pooled."""
        heads = [each.sizes for each in self.heads if isinstance(each, PooledLinear)]
        if len(heads) < len(self.heads):
            return None
        names = ("at", "weights", "distill", "temperature")
        return {name: getattr(self, name) for name in names} | {"heads": heads}

    @classmethod
    def of_facts(cls, network: nn.Module, facts: Mapping[str, Any]) -> ExitNetwork:
        """Return a network with exits at these places, whose heads have no values yet.

        Raises:
            KeyError, TypeError: these are no such facts.
        """
        heads = [PooledLinear(*sizes) for sizes in facts["heads"]]
        others = (facts["weights"], facts["distill"], facts["temperature"])
        return cls(network, facts["at"], heads, *others)

    @property
    def stands_for(self) -> nn.Module:
        """The network whose arguments its forward has."""
        return self.network

    def forward(self, *args: Any, **kwargs: Any) -> ExitOutputs:
        """Compute all answers; inputs are those of the network."""
        exits: list[Tensor] = []
        last = self.run(args, kwargs, lambda _, answer: exits.append(answer))
        return ExitOutputs(last, tuple(exits))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], reached: Reached) -> Tensor:
        """Return the last answer; each exit's is handed over when it is reached.

        What is raised then ends the forward there, and nothing after the exit is computed.
        """
        handles = [
            self.network.get_submodule(path).register_forward_hook(_asking(number, head, reached))
            for number, (path, head) in enumerate(zip(self.at, self.heads, strict=True))
        ]
        try:
            return answer_in(self.network(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()


def _asking(number: int, head: nn.Module, reached: Reached) -> Callable[..., None]:
    """Return a hook that hands what a head makes of a module's output on."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        reached(number, head(stream_in(output)))

    return hook


def stream_in(output: Any) -> Tensor:
    """Return the value that a block passes on: its output, or the first tensor in that."""
    leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor))


def answer_in(output: Any) -> Tensor:
    """Return the one tensor in what a network returns.

    Raises:
        UsageError: there are several, or none.
    """
    found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"the network returns {len(found)} tensors, and early exits stand in for one answer: wrap "
        "it in a module that returns only that"
    )
