"""PyTorch as a runtime: graphs of a gated model at any widths, and times of their operators."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import plain
from l0prune.capture.provenance import module_of, without_call
from l0prune.errors import UsageError, first_line
from l0prune.exporting.capture_parts import capture_parts
from l0prune.exporting.certify.lending import settle
from l0prune.exporting.network import copies_of, run
from l0prune.exporting.onnx import collect
from l0prune.exporting.slice import select, slice_graphs, slice_tensors
from l0prune.gating.attaching import holder
from l0prune.plan.layout import Layout
from l0prune.timing.facts import NodeFacts, number_of
from l0prune.timing.network_files import check_single_network
from l0prune.timing.sizes import SizeFinder

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class CutGraphs:
    """Networks of one gated model, in float32: captured once, cut as often as asked."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        gated, _ = holder(model)
        self._captured = capture_parts(copies_of(gated))
        self.plan = self._captured.plan
        check_single_network(self.plan.parts)
        self._batch = batch

    def network(self, open_: Tensor) -> GraphModule:
        """Return the network in which these slots are open; bool, flat."""
        whole = replace(self._captured, z=open_.to(torch.float64))
        (graph,) = run((select, slice_tensors, slice_graphs), whole).graphs.values()
        settle(graph, torch.float32)  # parameters that were folded as they are read
        return graph.float()

    def inputs(self) -> Inputs:
        """Return an example of the batch that is asked for."""

        def sized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            value = leaf.float() if leaf.is_floating_point() else leaf
            return value[torch.arange(self._batch) % len(value)] if value.ndim else value

        return plain(pytree.tree_map(sized, self._captured.example))


Shapes = list[tuple[int, ...]]


class Eager:
    """PyTorch without a compiler."""

    name = "eager"

    def __init__(self, device: str, threads: int) -> None:
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"PyTorch cannot use the device {device!r} here: {first_line(error)}"
            ) from error
        self.threads = threads

    def prepared(self, network: nn.Module) -> Callable[..., Any]:
        """Return the callable that runs a network on the device."""
        return network

    def median(self, run: Callable[[], Any], times: int) -> float:
        """Return the median of some runs in milliseconds."""
        return statistics.median(self._timed(run) for _ in range(times))

    def _timed(self, run: Callable[[], Any]) -> float:
        """Time one run in milliseconds; of a single thread on the CPU, only while it is at work."""

        def run_to_its_end() -> None:
            run()
            self.wait()

        self.wait()
        is_alone = self.threads == 1 and self.device.type == "cpu"
        return collect.milliseconds(run_to_its_end, is_alone)

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Use so many threads within the context, without gradients."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.no_grad():
                yield
        finally:
            torch.set_num_threads(before)

    def operators(self, network: GraphModule, inputs: Inputs, times: int) -> OperatorTimer:
        """Time the operators of a network."""
        found = OperatorTimer(network, self)
        for _ in range(times):
            found.run(*inputs)
        return found


@dataclass
class TimedNode:
    """Operator of a network, timed."""

    node: Node
    shapes: Shapes
    spent: list[float] = field(default_factory=list)


class OperatorTimer(Interpreter):
    """Interpreter that runs a graph node by node, and times each."""

    def __init__(self, network: GraphModule, runtime: Eager) -> None:
        super().__init__(network, garbage_collect_values=True)
        self._runtime = runtime
        self._node: Node | None = None
        self.seen: dict[str, TimedNode] = {}

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # type: ignore[override]
        """Run the network once."""
        placed = pytree.tree_leaves((args, kwargs))
        return super().run(*placed, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        """Run a node, which ``call_function`` then knows."""
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and time it."""
        assert self._node is not None
        self._runtime.wait()
        start = time.perf_counter()
        result = super().call_function(target, args, kwargs)
        self._runtime.wait()
        spent = 1e3 * (time.perf_counter() - start)
        name = self._node.name
        if name not in self.seen:
            leaves = pytree.tree_leaves((args, kwargs, result))
            shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]
            self.seen[name] = TimedNode(self._node, shapes)
        self.seen[name].spent.append(spent)
        return result

    def times(self, names: Sequence[str]) -> dict[str, float]:
        """Milliseconds by the number that a node has among ``names``.

        A node that is not among them, since not every network has it, is charged to the one before
        it.
        """
        number = {name: number_of(i) for i, name in enumerate(names)}
        found: dict[str, float] = defaultdict(float)
        last = collect.BEFORE
        for name, seen in self.seen.items():
            last = number.get(name, last)
            found[last] += collect.typical(seen.spent)
        return dict(found)


def facts_of(
    found: Sequence[OperatorTimer], finder: SizeFinder
) -> tuple[list[str], list[NodeFacts]]:
    """Return the names of nodes that all networks of the finder's widths have, and their facts."""
    names = [name for name in found[0].seen if all(name in each.seen for each in found)]
    return names, [_facts([each.seen[name] for each in found], finder) for name in names]


def _facts(alike: Sequence[TimedNode], finder: SizeFinder) -> NodeFacts:
    """Return the facts of one node in several networks."""
    monomials: dict[tuple[Layout, ...], None] = {}
    for shapes in zip(*(seen.shapes for seen in alike), strict=False):
        if len({len(shape) for shape in shapes}) == 1:
            sizes = [finder.find(column) for column in zip(*shapes, strict=True)]
            layouts = [size.layout for size in sizes if size and not size.is_constant]
            monomials[tuple(sorted(layouts, key=str))] = None
    node = alike[0].node
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return NodeFacts(name, without_call(module_of(node)), True, None, tuple(monomials))


class Compiled(Eager):
    """PyTorch with ``torch.compile``. Operators are timed without it: each would be fused."""

    name = "compile"

    def prepared(self, network: nn.Module) -> Callable[..., Any]:
        """Return the network, to be compiled when it is first called."""
        torch.compiler.reset()
        return torch.compile(network, dynamic=False)
