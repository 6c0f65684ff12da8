"""Trial removals of branches before training: each is removed from the graph as by an export.

No weight is changed, and only shapes are computed, of those operators alone whose shapes change. Of
branches with the same operators the last is tried first, on which the least of the graph depends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from l0prune.capture.capture import CHOOSING
from l0prune.capture.compat import FakeTensor
from l0prune.capture.provenance import source_of
from l0prune.infer.branches import Branches
from l0prune.infer.build import Analysis
from l0prune.infer.dataflow import joined
from l0prune.infer.nodes import called, hint, operator_name
from l0prune.infer.parts import Parts
from l0prune.infer.registry import is_strict, said, worked_at
from l0prune.infer.rewrites.literals import Sizes
from l0prune.infer.rewrites.resized import rewritten, with_switches
from l0prune.plan.branch import vital
from l0prune.plan.plan import Pin
from l0prune.plan.switches import dead_parameters, switched
from l0prune.progress.stages import steps

REFUSED = "branch "  # prefix of ``Pin.where`` for a branch


class _WrongGraph(Exception):
    """The graph without some branches does not match the plan."""


@dataclass(frozen=True)
class Failure:
    """Failure of a trial: the operator at which it did, if known, and the error's text."""

    node: Node | None
    text: str

    def pin(self, where: str, what: str) -> Pin:
        """Return a pin with the reason: ``what`` failed."""
        at = f" at operator {called(self.node)}" if self.node is not None else ""
        return Pin(
            where,
            f"{what}{at} when that was tried ({self.text}); please report this",
            operator_name(self.node.target) if self.node is not None else "",
            source_of(self.node) if self.node is not None else "",
        )


def without_refused_branches(parts: Parts) -> Parts:
    """Return the parts, with a plan of only those branches that can be removed from the graphs.

    Each is tried alone, and all of them together. A failure becomes a pin, with the reason;
    with ``L0PRUNE_STRICT=1`` in the environment the error is raised.
    """
    names = {branch.name for branch in parts.plan.branches}
    pins = [pin for part in parts.found for pin in _refused(part.analysis, names)]
    if not pins:
        return parts
    refused = {pin.where.removeprefix(REFUSED) for pin in pins}
    left = tuple(branch for branch in parts.plan.branches if branch.name not in refused)
    plan = replace(parts.plan, branches=left, pins=(*parts.plan.pins, *pins))
    return replace(parts, plan=plan)


def _refused(analysis: Analysis, names: Collection[str]) -> Iterator[Pin]:
    """Yield a pin for each branch of these names that cannot be removed."""
    own = [branch.name for branch in analysis.plan.branches if branch.name in names]
    if not own:
        return
    trials, found = Trials(analysis, own), dict[str, Pin | None]()
    for *others, last in steps(_alike(analysis.branches, own)):
        found[last] = trials.failed([last])
        for name in others:
            found[name] = trials.failed([name]) if found[last] is not None else None
    yield from (pin for pin in found.values() if pin is not None)
    good = [name for name in own if found[name] is None]
    if len(good) > 1 and trials.failed(good) is not None:
        together: list[str] = []
        for name in good:
            pin = trials.failed([*together, name])
            if pin is None:
                together.append(name)
            else:
                yield pin


class Trials:
    """Trial removals of branches from copies of one captured graph."""

    def __init__(self, analysis: Analysis, names: Sequence[str]) -> None:
        self.analysis = with_switches(analysis, switched(analysis.plan, names))
        self.layouts = dict(self.analysis.layouts)
        self.tensors = nn.Module()  # tensors that the graphs read, by node name
        captured, plan = analysis.captured, self.analysis.plan
        for node in captured.graph.nodes:
            if node.op == "get_attr":
                name = str(node.target)
                setattr(self.tensors, name, getattr(captured.program.graph_module, name))
            elif node.name in captured.names:
                self.tensors.register_buffer(node.name, node.meta["val"])
                if captured.names[node.name] in plan.tensors:
                    self.layouts[node.name] = plan.tensors[captured.names[node.name]]

    def failed(self, gone: Sequence[str]) -> Pin | None:
        """Return a pin if the last of these branches cannot be removed with the others."""
        is_open = torch.ones(self.analysis.plan.size, dtype=torch.bool)
        for axis in self.analysis.plan.axes:
            is_open[axis.slice] = axis.name not in gone
        failure = self.failure(is_open, gone)
        if failure is None:
            return None
        also = f" together with {', '.join(gone[:-1])}" if len(gone) > 1 else ""
        return failure.pin(
            f"{REFUSED}{gone[-1]}", f"it has no gate of its own, since leaving it out{also} failed"
        )

    def failure(self, is_open: Tensor, gone: Sequence[str] = ()) -> Failure | None:
        """Return how a cut of the closed slots, with these branches among them, fails."""
        try:
            self._try(is_open, gone)
        except Exception as error:
            if is_strict():
                raise
            return Failure(worked_at(error), said(error))
        return None

    def _try(self, is_open: Tensor, gone: Sequence[str]) -> None:
        """Cut slots, and compare the remaining graph with the plan; raise if they differ."""
        plan = self.analysis.plan
        graph = self._copied()
        before = {node: (node.target, node.args, node.kwargs) for node in graph.nodes}
        sizes = rewritten(graph, self.analysis, plan.kept(is_open), dict(self.layouts))
        graph.eliminate_dead_code()
        self._check_parameters(graph, sizes, gone)
        self._check_shapes(graph, sizes, before)

    def _copied(self) -> Graph:
        """Return a copy of the captured graph that reads stored tensors as attributes."""
        captured, graph, copies = self.analysis.captured, Graph(), dict[Node, Node]()
        for node in captured.graph.nodes:
            if node.name in captured.names:
                copies[node] = graph.create_node("get_attr", node.name, name=node.name)
                copies[node].meta = dict(node.meta)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].name = node.name  # fx renames nodes called like a builtin, as ``input``
        graph.owning_module = self.tensors  # type: ignore[assignment]  # gets their buffers
        return graph

    def _check_parameters(self, graph: Graph, sizes: Sizes, gone: Collection[str]) -> None:
        """Raise _WrongGraph where the graph reads other parameters than the plan counts."""
        captured, plan = self.analysis.captured, self.analysis.plan
        readers: dict[str, Node | None] = {}
        for each in graph.nodes:
            name = captured.names.get(each.name, "") if each.op == "get_attr" else ""
            if name in captured.parameters and 0 not in map(sizes.of, plan.tensors[name]):
                readers.setdefault(name, next(iter(each.users), None))
        dead = set(dead_parameters(plan, gone))
        for name, node in readers.items():  # noqa: B007  (worked_at finds it)
            if name in dead:
                raise _WrongGraph(f"{name} is left, which the plan counts as gone")
        counted = {cost.tensor for cost in plan.costs if cost.unit == "params"} - dead
        for name in sorted(counted - readers.keys()):
            if 0 not in map(sizes.of, plan.tensors[name]):
                raise _WrongGraph(f"{name} is gone, which the plan counts")

    def _check_shapes(self, graph: Graph, sizes: Sizes, before: dict[Node, Any]) -> None:
        """Raise an error if an operator fails on its inputs, or returns an unplanned shape."""
        values: dict[Node, Any] = {}  # results whose shape has changed
        fakes = (node.meta.get("val") for node in graph.nodes)
        some = next(value for value in fakes if isinstance(value, FakeTensor))
        mode = some.fake_mode

        def now(operand: Node) -> Any:
            return values[operand] if operand in values else _in_numbers(operand.meta.get("val"))

        for node in graph.nodes:
            old = node.meta.get("val")
            if node.op in ("get_attr", "placeholder"):
                wanted = _shapes(sizes, node)
                if old is None and node.op == "get_attr":
                    value = getattr(self.tensors, str(node.target))
                    if isinstance(value, Tensor):  # an index that a rewrite has made
                        value = mode.from_tensor(value.to(some.device))
                    values[node] = value  # or a branch of control flow
                elif isinstance(old, Tensor) and wanted not in (None, list(old.shape)):
                    values[node] = old.new_empty(wanted)
                continue
            is_same = before.get(node) == (node.target, node.args, node.kwargs)
            is_same = is_same and values.keys().isdisjoint(node.all_input_nodes)
            if node.op != "call_function" or is_same:
                continue
            wanted = _shapes(sizes, node)
            with mode, torch.no_grad():
                args, kwargs = map_arg((node.args, node.kwargs), now)
                if node.target in CHOOSING and _in_numbers(old) is not old:
                    value = old.new_empty(wanted)
                else:
                    value = node.target(*args, **kwargs)
            found = _shapes_of(value)
            if old is None or found != _shapes_of(old):
                values[node] = value
            if wanted is not None and found != wanted:
                raise _WrongGraph(f"it has shape {found} where {wanted} is planned")


def _shapes(sizes: Sizes, node: Node) -> Any:
    """Return the planned shape of a node, or those of its several outputs; None if unknown."""

    def shape(dims: Any) -> Any:
        is_many = any(isinstance(each, tuple) for each in dims)
        return [shape(each) for each in dims] if is_many else [sizes.of(each) for each in dims]

    dims = sizes.layouts.get(node.name)
    return None if dims is None else shape(dims)


def _shapes_of(value: Any) -> Any:
    """Return the shape of a tensor, or those of several; numbers are returned unchanged."""
    if isinstance(value, Tensor):
        return list(map(hint, value.shape))
    if isinstance(value, list | tuple):
        return [_shapes_of(each) for each in value]
    return _in_numbers(value)


def _in_numbers(value: Any) -> Any:
    """Return a value with numbers for sizes that depend on data; itself without such sizes."""
    if isinstance(value, torch.SymInt):
        return hint(value)
    is_fixed = not isinstance(value, Tensor) or all(type(size) is int for size in value.shape)
    return value if is_fixed else value.new_empty(list(map(hint, value.shape)))


def _alike(branches: Branches, names: Sequence[str]) -> list[list[str]]:
    """Group the branches that have the same operators and are joined in the same way."""
    operators: dict[str, list[Any]] = defaultdict(list)
    for node, of in branches.needs.items():
        if node.op == "call_function" and of:
            for name in vital(of):
                operators[name].append(node.target)
    groups: dict[Any, list[str]] = defaultdict(list)
    for ending in branches.endings:
        if ending.name in names:
            joins = {
                (j.target, len(joined(j)) > 2, *(u.target for u in j.users)) for j in ending.joins
            }
            groups[frozenset(joins), tuple(operators[ending.name])].append(ending.name)
    return list(groups.values())
