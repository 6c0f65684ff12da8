"""Networks with early exits: an unchanged network, heads on its values, and their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.errors import UsageError
from l0prune.files.around import AROUND, Around, Loss
from l0prune.running.criteria import class_dim, distance

Reached = Callable[[int, Tensor], None]
"""Callback with each exit's number and answer as soon as that is computed; it may raise."""


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
        dims: number of dims of the value that is read.
    """

    def __init__(self, channels: int, outputs: int, dim: int, dims: int) -> None:
        super().__init__()
        self.over = [number for number in range(1, dims) if number != dim]
        self.linear = nn.Linear(channels, outputs)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The arguments of the constructor."""
        dims = len(self.over) + 2
        (dim,) = {*range(1, dims)} - {*self.over}
        return self.linear.in_features, self.linear.out_features, dim, dims

    def forward(self, x: Tensor) -> Tensor:
        """Apply the head. Shape: (n, …, channels, …) to (n, outputs)."""
        found: Tensor = self.linear(x.mean(self.over) if self.over else x)
        return found


@AROUND.register
class ExitNetwork(Around):
    """Network with early exits, as ``l0prune.add_exits`` makes it; it always computes all exits.

    The network in it is unchanged: while a forward of this module runs, hooks pass the outputs of
    the modules at ``at`` to the heads.

    Attributes:
        network: the user's network.
        heads: one for each exit.
        at: paths in the network of the modules whose outputs the heads read.
        weights: of the exits in the loss.
        distill: share of each exit's loss that is distillation from the last exit.
        temperature: of the distillation.
    """

    name, words, ordinary = "exits", "early exits", (PooledLinear,)

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
        """The exits as plain data; None if a head is not pooled."""
        heads = [each.sizes for each in self.heads if isinstance(each, PooledLinear)]
        if len(heads) < len(self.heads):
            return None
        names = ("at", "weights", "distill", "temperature")
        return {name: getattr(self, name) for name in names} | {"heads": heads}

    @classmethod
    def of_facts(cls, network: nn.Module, facts: Mapping[str, Any]) -> Self:
        """See ``Around``."""
        heads = [PooledLinear(*sizes) for sizes in facts["heads"]]
        others = (facts["weights"], facts["distill"], facts["temperature"])
        return cls(network, facts["at"], heads, *others)

    def own_loss(self, loss: Loss) -> ExitLoss:
        """See ``Around``."""
        return ExitLoss(self, loss)

    def forward(self, *args: Any, **kwargs: Any) -> ExitOutputs:
        """Compute all answers; inputs are those of the network."""
        exits: list[Tensor] = []
        last = self.run(args, kwargs, lambda _, answer: exits.append(answer))
        return ExitOutputs(last, tuple(exits))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], reached: Reached) -> Tensor:
        """Return the last answer, and call ``reached`` with each exit's as soon as it is computed.

        An exception in ``reached`` ends the forward: nothing after that exit is computed.
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


class ExitLoss(nn.Module):
    """Loss of a network with exits: L(last) + Σᵢ wᵢ·((1 − d)·L(exitᵢ) + d·T²·KL(last ‖ exitᵢ)).

    wᵢ are its ``weights``, d is ``distill``, T ``temperature``. No gradient goes through the last
    exit as a teacher (self-distillation; Zhang et al. 2019, arXiv 1905.08094). ``finetune`` and
    ``train_dense`` learn by it; in a loop of your own: ``ExitLoss(model, loss)(outputs, targets)``.

    Args:
        network: with exits.
        loss: L, of an answer and the targets, a scalar.
    """

    def __init__(self, network: ExitNetwork, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.weights, self.distill = network.weights, network.distill
        self.temperature = network.temperature

    def forward(self, outputs: ExitOutputs, targets: Any) -> Tensor:
        """Return the loss, a scalar."""
        total = self.loss(outputs.logits, targets)
        for weight, answer in zip(self.weights, outputs.exits, strict=True):
            own = (1 - self.distill) * self.loss(answer, targets)
            last = outputs.logits.detach()
            taught = distance(answer, last, self.temperature, class_dim(last))
            total = total + weight * (own + self.distill * taught)
        return total


def _asking(number: int, head: nn.Module, reached: Reached) -> Callable[..., None]:
    """Return a hook that passes the head's answer for a module's output to ``reached``."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        reached(number, head(stream_in(output)))

    return hook


def stream_in(output: Any) -> Tensor:
    """Return a block's output tensor, or the first tensor in its output."""
    leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor))


def answer_in(output: Any) -> Tensor:
    """Return the only tensor in a network's output.

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
