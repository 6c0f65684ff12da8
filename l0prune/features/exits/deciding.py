"""Networks in torch that stop at the first exit whose score reaches its threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import examples_in
from l0prune.features.exits.criteria import Criterion
from l0prune.features.exits.network import ExitNetwork, Reached


class Decision(NamedTuple):
    """Decision of a network with early exits, for each example.

    Attributes:
        output: the answers; (n, …).
        exit: the number of the exit that gave each answer, from 0; for the network's end it is the
            number of early exits; int64, (n,).
        margin: the least margin of the decisions up to that exit; (n,).
    """

    output: Tensor
    exit: Tensor
    margin: Tensor


class _Left(Exception):
    """Signal that a forward stops at an exit; carries the decision."""

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        self.decision = decision


class EarlyExit(nn.Module):
    """A network that answers at the first exit whose score is at least its threshold.

    A single example is computed no further than that exit. For a larger batch all exits are
    computed, and each example gets the answer that it gets alone.

    Attributes:
        network: an exported network with exits.
        thresholds: of the early exits, float32; may be set.
    """

    thresholds: Tensor

    def __init__(self, network: nn.Module, criterion: Criterion, thresholds: Tensor) -> None:
        super().__init__()
        self.network, self.criterion = network, criterion
        self.register_buffer("thresholds", thresholds.float(), persistent=True)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the answers; inputs are those of the network."""
        return self.decide(*args, **kwargs).output

    def decide(self, *args: Any, **kwargs: Any) -> Decision:
        """Return the answers, the exits that gave them, and the margins."""
        if examples_in((args, kwargs)) != 1:
            return self._of_all(*answers_of(self.network, args, kwargs))
        seen: list[Tensor] = []
        margins: list[Tensor] = []

        def reached(number: int, answer: Tensor) -> None:
            seen.append(answer)
            passes, margin = self.judge(number, seen)
            margins.append(margin)
            if bool(passes):
                raise _Left(_decision(answer, number, margins))

        try:
            last = run(self.network, args, kwargs, reached)
        except _Left as left:
            return left.decision
        return _decision(last, len(seen), margins)

    def judge(self, number: int, answers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return whether an exit's score reaches its threshold, and the margin; both (n,).

        Args:
            number: of the exit.
            answers: of all exits up to it.
        """
        score = self.criterion.score(answers).float()
        threshold = self.thresholds[number]
        return score >= threshold, self.criterion.margin(score, threshold, answers)

    def _of_all(self, exits: Sequence[Tensor], last: Tensor) -> Decision:
        """Choose the answer of each example among those of all exits."""
        judged = [self.judge(number, exits[: number + 1]) for number in range(len(exits))]
        margins = [margin for _, margin in judged]
        found = _decision(last, len(exits), margins)
        for number in reversed(range(len(exits))):
            passes = judged[number][0]
            other = _decision(exits[number], number, margins[: number + 1])
            shape = (-1,) + (1,) * (last.dim() - 1)
            found = Decision(
                torch.where(passes.reshape(shape), other.output, found.output),
                torch.where(passes, other.exit, found.exit),
                torch.where(passes, other.margin, found.margin),
            )
        return found


def _decision(answer: Tensor, number: int, margins: Sequence[Tensor]) -> Decision:
    exit_ = torch.full((len(answer),), number, dtype=torch.int64, device=answer.device)
    return Decision(answer, exit_, torch.stack(list(margins)).amin(0))


def answers_of(
    network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], Tensor]:
    """Return the answers of the early exits, and the last one."""
    outputs = network(*args, **kwargs)
    return list(outputs.exits), outputs.logits


def run(
    network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], reached: Reached
) -> Tensor:
    """Run a network with exits, or a captured graph of one, until ``reached`` raises."""
    if isinstance(network, ExitNetwork):
        return network.run(args, kwargs, reached)
    assert isinstance(network, GraphModule)
    return _Stepwise(network, reached).answer(args, kwargs)


class _Stepwise(Interpreter):
    """Interpreter of a captured graph that reports each exit's answer once it is computed."""

    def __init__(self, graph: GraphModule, reached: Reached) -> None:
        super().__init__(graph)
        self._reached = reached
        leaves = pytree.tree_leaves(graph.graph.output_node().args[0])
        _, *exits = [leaf for leaf in leaves if isinstance(leaf, Node)]
        self._exits = {node: number for number, node in enumerate(exits)}

    def run_node(self, node: Node) -> Any:
        """Compute one node; report the answer if it is an exit's."""
        found = super().run_node(node)
        if node in self._exits:
            self._reached(self._exits[node], found)
        return found

    def answer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the last answer."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        outputs = self.run(*leaves, enable_io_processing=False)
        last: Tensor = pytree.tree_leaves(outputs)[0]
        return last
