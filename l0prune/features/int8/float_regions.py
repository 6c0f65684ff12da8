"""Choice of the nodes of an int8 file that are computed in float32, by the times of nodes.

A node takes one time on integers and another in float32, and between the two a value is converted.
The nodes that make the sum of all these times least are one side of a minimum cut: each node hangs
on both ends by its two times, and nodes hang together by the conversion of the value between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from onnx import GraphProto

from l0prune.exporting.onnx.profile import Event, FileNode, nodes_of
from l0prune.features.int8.quantizer import read_by

_WORTH = 0.95  # nodes are in float32 if that takes at most this share of their time on integers
_BYTES = {"uint8", "int8"}
_CONVERTING = ("QuantizeLinear", "DequantizeLinear")
_BEFORE = "ReorderInput"  # a change of the layout that the next node needs
_INTEGERS, _FLOAT32 = ("integers", ""), ("float32", "")  # the ends of the cut

Key = tuple[str, str]


@dataclass(frozen=True)
class Conversion:
    """Milliseconds that a conversion of a value takes: ``start + rate * elements``."""

    start: float = 0.0
    rate: float = 0.0

    @classmethod
    def of(cls, seen: Sequence[tuple[int, float]]) -> Conversion:
        """Return the time of conversions, from the elements and milliseconds of some."""
        if not seen:
            return cls()
        start, elements = min(ms for _, ms in seen), sum(size for size, _ in seen)
        rest = sum(ms - start for _, ms in seen)
        return cls(start, rest / elements if elements else 0.0)

    def ms(self, size: int) -> float:
        """Return the milliseconds for a value of so many elements."""
        return self.start + self.rate * size


@dataclass
class NodeTimes:
    """Times of a file's nodes in a call, by name.

    Attributes:
        ms: milliseconds, with changes of the memory layout beside the node.
        on_integers: nodes that read or write bytes.
        others: nodes that write neither float32 nor bytes.
        sizes: elements that nodes write.
        conversions: elements and milliseconds of those between integers and float32.
        layouts: the same of changes of the memory layout.
    """

    ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    on_integers: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    conversions: list[tuple[int, float]] = field(default_factory=list)
    layouts: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[Event], nodes: Sequence[FileNode], call: float) -> NodeTimes:
        """Return the times by the events of a call, without what each event takes by itself.

        Args:
            events: of a typical call.
            nodes: of the file.
            call: milliseconds of a call without a profile.
        """
        found, last, waiting = cls(), "", 0.0
        all_ms = [event["dur"] / 1e3 for event in events]
        spare = max(0.0, min([(sum(all_ms) - call) / max(1, len(events)), *all_ms]))
        for event, number, ms in zip(events, nodes_of(events, nodes), all_ms, strict=True):
            ms, written = ms - spare, _values(event, "output")
            size = max((size for _, size in written), default=0)
            if number is None:
                found.layouts.append((size, ms))
                if last and not event["args"]["op_name"].endswith(_BEFORE):
                    found.ms[last] += ms
                else:
                    waiting += ms
                continue
            if nodes[number].operator in _CONVERTING:
                found.conversions.append((size, ms))
                continue
            last = nodes[number].name
            found.ms[last] += ms + waiting
            found.sizes[last], waiting = size, 0.0
            kinds = {kind for kind, _ in (*written, *_values(event, "input"))}
            if kinds & _BYTES:
                found.on_integers.add(last)
            elif "float" not in {kind for kind, _ in written}:
                found.others.add(last)
        return found


@dataclass(frozen=True)
class Operator:
    """Node of a file with its two times.

    Attributes:
        name: of the node.
        reads, writes: names of its values, without constants.
        size: elements of a value that it writes.
        single: milliseconds in float32.
        whole: milliseconds on integers; None where it has to be in float32.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    size: int
    single: float
    whole: float | None


def operators_of(
    graph: GraphProto, single: NodeTimes, whole: NodeTimes, fixed: Collection[str]
) -> list[Operator]:
    """Return the nodes of a file in float32 with their times in both files.

    A node that has no time of its own is computed within another one.

    Args:
        graph: of the file in float32.
        single: times in float32.
        whole: times in eight bits.
        fixed: names of nodes that have to be in float32.
    """
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {name for n in graph.node if n.name in single.others for name in n.output}
    sizes, found = dict[str, int](), list[Operator]()
    for node in graph.node:
        reads = tuple(dict.fromkeys(each for each in read_by(node) if each not in constants))
        own = single.sizes.get(node.name) or whole.sizes.get(node.name)
        size = own or max((sizes.get(name, 0) for name in reads), default=0)
        sizes |= dict.fromkeys(node.output, size)
        writes = tuple(name for name in node.output if name and name not in constants)
        may = node.name not in fixed
        may &= node.name in whole.on_integers or node.name not in whole.ms
        found.append(
            Operator(
                node.name,
                reads,
                writes,
                size,
                single.ms.get(node.name, 0.0),
                whole.ms.get(node.name, 0.0) if may else None,
            )
        )
    return found


def in_float32(
    operators: Sequence[Operator],
    conversions: Sequence[Conversion],
    inputs: Mapping[str, int],
    outputs: Collection[str],
) -> frozenset[str]:
    """Return the names of the nodes that are in float32 in the fastest file.

    Args:
        operators: nodes of the file.
        conversions: that a value needs between a node on integers and one in float32.
        inputs: elements of the inputs in float32, by name.
        outputs: names of the values that are outputs, in float32.
    """
    import networkx  # loads slowly

    graph = networkx.DiGraph()
    graph.add_nodes_from((_INTEGERS, _FLOAT32))
    writers, readers = dict[str, Operator](), defaultdict[str, list[Key]](list)
    for operator in operators:
        key = ("node", operator.name)
        graph.add_edge(_INTEGERS, key, capacity=_ns(operator.single))
        if operator.whole is None:
            graph.add_edge(key, _FLOAT32)  # without a capacity: no cut goes through it
        else:
            graph.add_edge(key, _FLOAT32, capacity=_ns(_WORTH * operator.whole))
        writers |= dict.fromkeys(operator.writes, operator)
        for name in operator.reads:
            readers[name].append(key)
    for name in outputs:
        readers[name].append(_FLOAT32)
    sizes = {name: writer.size for name, writer in writers.items()} | dict(inputs)
    for name, size in sizes.items():
        key = ("node", writers[name].name) if name in writers else _FLOAT32
        cost = _ns(sum(each.ms(size) for each in conversions))
        graph.add_edge(("to integers", name), key, capacity=cost)
        graph.add_edge(key, ("to float32", name), capacity=cost)
        for reader in readers[name]:
            graph.add_edge(reader, ("to integers", name))
            graph.add_edge(("to float32", name), reader)
    _, (_, single) = networkx.minimum_cut(graph, _INTEGERS, _FLOAT32)
    return frozenset(name for kind, name in single if kind == "node")


def _ns(ms: float) -> int:
    """Return whole nanoseconds, of which sums are exact."""
    return round(ms * 1e6)


def _values(event: Event, side: str) -> list[tuple[str, int]]:
    """Return type and elements of the values of an event."""
    values: Sequence[Mapping[str, Sequence[int]]] = event["args"].get(f"{side}_type_shape") or ()
    return [(kind, prod(shape)) for value in values for kind, shape in value.items()]
