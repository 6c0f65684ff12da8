"""PyTorch as a runtime: graphs of a gated model at any widths, and times of their operators."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from l0prune.capture.capture import Captured
from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import plain
from l0prune.capture.provenance import module_of, without_call
from l0prune.errors import UsageError, first_line
from l0prune.exporting.capture_parts import capture_parts
from l0prune.exporting.certify.lending import settle
from l0prune.exporting.network import Network, copies_of, run
from l0prune.exporting.onnx import collect
from l0prune.exporting.slice import select, slice_graphs, slice_tensors
from l0prune.features.latency.facts import INPUT, NodeFacts, facts_of_node, number_of
from l0prune.features.latency.sizes import SizeFinder, check_single_network
from l0prune.gating.attaching import holder, weights_of

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
HALVES = {torch.float16, torch.bfloat16}


class CutGraphs:
    """Networks of one gated model, captured once and cut for each choice of slots.

    They compute in ``dtype``; if that is None in float32, or in half precision if all weights of
    the model are in it.
    """

    def __init__(self, model: nn.Module, batch: int, dtype: torch.dtype | None = None) -> None:
        gated, _ = holder(model)
        found = {p.dtype for p in weights_of(gated).values() if p.is_floating_point()}
        own = found.pop() if len(found) == 1 and found <= HALVES else torch.float32
        self._dtype = dtype or own
        self._captured = capture_parts(copies_of(gated))
        self.plan = self._captured.plan
        check_single_network(self.plan.parts)
        self._batch = batch

    def cut(self, open_: Tensor) -> Network:
        """Return the captured network, whose graph has these slots open; bool, flat."""
        whole = replace(self._captured, z=open_.to(torch.float64))
        return run((select, slice_tensors, slice_graphs), whole)

    def network(self, open_: Tensor) -> GraphModule:
        """Return the network in which these slots are open; bool, flat."""
        (graph,) = self.cut(open_).graphs.values()
        settle(graph, self._dtype)  # parameters that were folded as they are read
        return graph.to(self._dtype)

    @property
    def captured(self) -> Captured:
        """The capture that is cut."""
        return self._captured.captured.found[0].analysis.captured

    def operators(self, open_: Tensor) -> list[str]:
        """Return the operators of the network in which these slots are open."""
        (graph,) = self.cut(open_).graphs.values()
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]

    def constants(self) -> set[int]:
        """Return all integers in the captured graph: arguments and sizes of the dense network."""
        found: set[int] = set()
        for node in self.captured.program.graph.nodes:
            values = pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val")))
            shapes = (value.shape for value in values if isinstance(value, Tensor))
            numbers = chain(values, *shapes)
            found |= {number for number in numbers if type(number) is int}
        return found

    def inputs(self) -> Inputs:
        """Return example inputs of the requested batch size."""

        def sized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            value = leaf.to(self._dtype) if leaf.is_floating_point() else leaf
            return value[torch.arange(self._batch) % len(value)] if value.ndim else value

        return plain(pytree.tree_map(sized, self._captured.example))


Shapes = list[tuple[int, ...]]


class Eager:
    """Runtime PyTorch without a compiler."""

    name = "eager"
    dtype: torch.dtype | None = None  # that networks compute in; None for the model's own

    def __init__(self, device: str, threads: int) -> None:
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"PyTorch cannot use the device {device!r} here: {first_line(error)}"
            ) from error
        self.threads = threads

    @property
    def version(self) -> str:
        """PyTorch's version, with the card's name where there is one."""
        card = f", {torch.cuda.get_device_name(self.device)}" if self._is_cuda else ""
        return f"{torch.__version__}{card}"

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def prepared(self, network: nn.Module) -> Callable[..., Any]:
        """Return the callable that runs a network on the device."""
        return network

    def median(self, run: Callable[[], Any], times: int) -> float:
        """Return the median of several runs in milliseconds."""
        return statistics.median(self._timed(run) for _ in range(times))

    def _timed(self, run: Callable[[], Any]) -> float:
        """Time one run in milliseconds; with a single thread on the CPU, its CPU time."""

        def run_to_its_end() -> None:
            run()
            self.wait()

        self.wait()
        is_alone = self.threads == 1 and self.device.type == "cpu"
        return collect.milliseconds(run_to_its_end, is_alone)

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def host_part(self, run: Callable[[], Any], times: int = 9) -> float:
        """Return the share of a run's time in which the host launches operators; 1 on a CPU."""
        found = []
        for _ in range(times):
            self.wait()
            begin = time.perf_counter()
            run()
            started = time.perf_counter()
            self.wait()
            found.append((started - begin) / (time.perf_counter() - begin))
        return statistics.median(found)

    def clock(self) -> HostClock:
        """Return a started clock for one operator."""
        return DeviceClock(self) if self._is_cuda else HostClock(self)

    def occupy(self) -> None:
        """Queue work on a GPU, so that the next operators wait for it and not it for the host.

        Else an operator's measured time would be the host's time to launch it.
        """
        if self._is_cuda:
            filler = torch.ones(4096, 4096, device=self.device)
            for _ in range(_FILLERS):
                torch.mm(filler, filler)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Use the runtime's number of threads within the context, without gradients."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.no_grad():
                yield
        finally:
            torch.set_num_threads(before)

    def operators(self, network: GraphModule, inputs: Inputs, times: int) -> OperatorTimer:
        """Time the operators of a network in several runs."""
        found = OperatorTimer(network, self)
        for _ in range(times):
            found.run(*inputs)
        return found


_FILLERS = 60  # products of 4096×4096 float32: some 0.15 s of a recent GPU


class HostClock:
    """Host clock of one operator, which waits for the device at start and end."""

    def __init__(self, runtime: Eager) -> None:
        self._runtime = runtime
        runtime.wait()
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """Record the end."""
        self._runtime.wait()
        self._spent = 1e3 * (time.perf_counter() - self._begin)

    def milliseconds(self) -> float:
        """Return the time between start and end."""
        return self._spent


class DeviceClock(HostClock):
    """Clock of one operator on a GPU: CUDA events, for which the host does not wait."""

    def __init__(self, runtime: Eager) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()

    def stop(self) -> None:
        """Record the end."""
        self._events[1].record()

    def milliseconds(self) -> float:
        """Return the time between start and end, once the device has reached the end."""
        begin, end = self._events
        return float(begin.elapsed_time(end))


@dataclass
class TimedNode:
    """Operator of a network, with the shapes of its tensors and its clocks."""

    node: Node
    shapes: Shapes
    clocks: list[HostClock] = field(default_factory=list)


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
        self._runtime.occupy()
        result = super().run(*placed, enable_io_processing=False)
        self._runtime.wait()
        return result

    def run_node(self, n: Node) -> Any:
        """Run a node, which is recorded for ``call_function``."""
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and time it."""
        assert self._node is not None
        clock = self._runtime.clock()
        result = super().call_function(target, args, kwargs)
        clock.stop()
        name = self._node.name
        if name not in self.seen:
            leaves = pytree.tree_leaves((args, kwargs, result))
            shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]
            self.seen[name] = TimedNode(self._node, shapes)
        self.seen[name].clocks.append(clock)
        return result

    def times(self, names: Sequence[str]) -> dict[str, float]:
        """Return milliseconds by the number that a node has among ``names``.

        The time of a node that is not in ``names``, since not every network has it, is added to
        that of the node before.
        """
        number = {name: number_of(i) for i, name in enumerate(names)}
        found: dict[str, float] = defaultdict(float)
        last = collect.BEFORE
        for name, seen in self.seen.items():
            last = number.get(name, last)
            found[last] += collect.typical([clock.milliseconds() for clock in seen.clocks])
        return dict(found)


def facts_of(
    found: Sequence[OperatorTimer], finder: SizeFinder
) -> tuple[list[str], list[NodeFacts]]:
    """Return the names of nodes that all networks of the finder's widths have, and their facts."""
    names = [name for name in found[0].seen if all(name in each.seen for each in found)]
    numbers = {name: number for number, name in enumerate(names)}
    return names, [_facts([each.seen[n] for each in found], finder, numbers) for n in names]


def _facts(alike: Sequence[TimedNode], finder: SizeFinder, numbers: Mapping[str, int]) -> NodeFacts:
    """Return the facts of one node in several networks."""
    columns = [seen.shapes for seen in alike]
    tensors = [
        finder.dims(shapes)
        for shapes in zip(*columns, strict=False)
        if len({len(shape) for shape in shapes}) == 1
    ]
    others = [_plain_arguments(seen.node) for seen in alike]
    fixed = [
        found[0] if len(set(map(str, found))) == 1 else "" for found in zip(*others, strict=False)
    ]
    node = alike[0].node
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    reads = tuple(dict.fromkeys(_reads(node, numbers)))
    return facts_of_node(
        (name, without_call(module_of(node)), True, reads),
        tensors,
        fixed,
        () if all(len(each) == len(tensors) for each in columns) else (None,),
    )


def _plain_arguments(node: Node) -> list[Any]:
    """Return the arguments of a node that are no nodes."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if not isinstance(leaf, Node)]


def _reads(node: Node, numbers: Mapping[str, int]) -> Iterator[int]:
    """Yield the numbers of the operators that a node reads, also through nodes without one."""
    for read in node.all_input_nodes:
        if read.name in numbers:
            yield numbers[read.name]
        elif read.op == "placeholder":
            yield INPUT
        else:
            yield from _reads(read, numbers)


class Compiled(Eager):
    """Runtime ``torch.compile``; operators are timed uncompiled, since it would fuse them."""

    name = "compile"

    def prepared(self, network: nn.Module) -> Callable[..., Any]:
        """Return the network, which is compiled at its first call."""
        torch.compiler.reset()
        return torch.compile(network, dynamic=False)


class CudaGraph(Eager):
    """PyTorch on a GPU, recorded as one CUDA graph: the host launches no single operators."""

    name = "cuda-graph"

    def __init__(self, device: str, threads: int) -> None:
        super().__init__(device, threads)
        if not self._is_cuda:
            raise UsageError(
                f"cuda-graph is a runtime of NVIDIA's GPUs, not of {device!r}: time the network "
                "with eager or compile there"
            )

    def prepared(self, network: nn.Module) -> Callable[..., Any]:
        """Return the replay of a network's first call, which reads the tensors of that call."""
        recorded: list[torch.cuda.CUDAGraph] = []

        def call(*args: Any, **kwargs: Any) -> None:
            if not recorded:
                recorded.append(self._record(lambda: network(*args, **kwargs)))
            recorded[0].replay()

        return call

    def _record(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        main, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries choose their kernels in the first calls
                run()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph


class CudaGraphBf16(CudaGraph):
    """A CUDA graph of a network in bfloat16, whose products tensor cores compute."""

    name = "torch-cuda-bf16"
    dtype = torch.bfloat16
