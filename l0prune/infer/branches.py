"""Branches of a captured graph: what is joined to a stream, and computed for that alone.

A branch may have a gate of its own where what is left without it is computed exactly, be it added
(``sums``) or put beside others (``concats``); all that only the branch needs can go with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from torch.fx import Node

from l0prune.capture.provenance import module_of, without_call
from l0prune.infer.concats import side_by_side
from l0prune.infer.ending import Ending
from l0prune.infer.expressions import Var
from l0prune.infer.inference import Inference
from l0prune.infer.liveness import needs
from l0prune.infer.nodes import has_tensor
from l0prune.infer.regions import macs_of
from l0prune.infer.sums import added
from l0prune.plan.needs import Needs, is_needed, shortest, vital

_MOST = 6  # ways in which one tensor may be needed


@dataclass(frozen=True)
class Branches:
    """Those of a graph.

    Attributes:
        endings: where they end.
        needs: of each node, which of them have to be there for it to be needed.
        parameters: the same of each parameter, under whichever of its names it is read.
    """

    endings: tuple[Ending, ...] = ()
    needs: Mapping[Node, Needs] = field(default_factory=dict)
    parameters: Mapping[str, Needs] = field(default_factory=dict)

    def modules(self, name: str) -> tuple[str, ...]:
        """Paths of the modules of whose own work nothing is needed without this branch."""
        return tuple(self._modules[name])

    def tensors(self, name: str) -> tuple[str, ...]:
        """Names of the parameters that are not needed without this branch."""
        return tuple(self._tensors[name])

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        needs: dict[str, list[Needs]] = defaultdict(list)
        for node, of in self.needs.items():
            if node.op == "call_function" and of:
                needs[without_call(module_of(node))].append(of)
        return _by_branch({path: chain(*each) for path, each in needs.items() if path})

    @cached_property
    def _tensors(self) -> dict[str, list[str]]:
        return _by_branch(self.parameters)

    def dead(self, gone: Collection[str]) -> set[Node]:
        """What is needed with all branches and not without these."""
        calls = ((node, of) for node, of in self.needs.items() if node.op == "call_function")
        return {node for node, of in calls if of and not is_needed(of, gone)}


def branches(infer: Inference, axes: Collection[Var], taken: Sequence[str]) -> Branches:
    """Those of a graph that inference has been through.

    Args:
        infer: that.
        axes: the variables that may be cut.
        taken: names that are taken already.
    """
    read, macs, names = _needs(infer, ()), macs_of(infer), set(taken)
    endings = [*added(infer, read, macs, names), *side_by_side(infer, read, macs, axes, names)]
    while True:
        of_nodes = _needs(infer, endings)
        # A size, which many branches may go by, costs nothing.
        tensors = (of for node, of in of_nodes.items() if has_tensor(node))
        hungry = next((of for of in tensors if len(of) > _MOST), None)
        if hungry is None:
            return Branches(tuple(endings), of_nodes, _of_parameters(infer, of_nodes))
        # Without a switch on the last one that it is for, it is needed more often.
        fed = [each for each in endings if any(each.name in some for some in hungry)]
        endings.remove(fed[-1])


def _by_branch(needs: Mapping[str, Iterable[frozenset[str]]]) -> dict[str, list[str]]:
    """By branch, the names of what is not needed without it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, of in needs.items():
        for branch in vital(of):
            found[branch].append(name)
    return found


def _needs(infer: Inference, endings: Sequence[Ending]) -> dict[Node, Needs]:
    names = {(each.end, join): each.name for each in endings for join in each.joins}
    return needs(infer.captured.graph, lambda node, user: names.get((node, user)))


def _of_parameters(infer: Inference, of_nodes: Mapping[Node, Needs]) -> dict[str, Needs]:
    found: dict[str, Needs] = {}
    for node in infer.captured.graph.find_nodes(op="placeholder"):
        if infer.is_parameter(node):
            name = infer.captured.names[node.name]
            found[name] = shortest((*found.get(name, ()), *of_nodes[node]))
    return found
