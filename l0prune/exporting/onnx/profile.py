"""Times of the layers in an ONNX file, from ONNX Runtime's profile of some calls."""

from __future__ import annotations

import ast
import json
import tempfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from l0prune.capture.provenance import without_call
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.file import rename_values
from l0prune.exporting.onnx.times import Given, feed_of

if TYPE_CHECKING:
    import onnx

_SECONDS = 0.3  # of the calls, about
_MOST, _FEWEST = 300, 3  # calls
_MULTIPLYING = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
_REORDER = "Reorder"  # beginning of the operators that change between layouts
_BLOCKED = "_nchwc"  # in the names of nodes that compute in blocks of channels

Event = Mapping[str, Any]
"""Entry of ONNX Runtime's profile."""


@dataclass(frozen=True)
class LayerTime:
    """Time of one operator of one module in a call.

    Attributes:
        path: of the module; empty for the model's own forward.
        operator: as in ONNX, also of nodes that the runtime has fused into it.
        ms: milliseconds, with changes of the memory layout beside it.
        work: its MACs; elements that it writes where it has none.
        has_macs: whether ``work`` is MACs.
        widths: channels or neurons that it reads and writes; empty without a weight.
        reorders: milliseconds of ``ms`` for changes of the memory layout.
        is_blocked: whether it computes in the runtime's blocks of channels.
        is_depthwise: whether each of its channels reads one alone.
        nodes: their number.
    """

    path: str
    operator: str
    ms: float
    work: float
    has_macs: bool = False
    widths: tuple[int, ...] = ()
    reorders: float = 0.0
    is_blocked: bool = False
    is_depthwise: bool = False
    nodes: int = 1

    @property
    def key(self) -> tuple[str, str]:
        """Path and operator, by which layers of two files correspond."""
        return self.path, self.operator

    def with_another(self, other: LayerTime) -> LayerTime:
        """Return the sum of two nodes of one operator and module."""
        return replace(
            self,
            ms=self.ms + other.ms,
            work=self.work + other.work,
            widths=tuple(dict.fromkeys((*self.widths, *other.widths))),
            reorders=self.reorders + other.reorders,
            is_blocked=self.is_blocked and other.is_blocked,
            nodes=self.nodes + other.nodes,
        )


@dataclass(frozen=True)
class FileNode:
    """Facts of a node in a file.

    Attributes:
        path: of its module.
        operator: as in ONNX.
        writers: numbers of the nodes whose results it reads.
        weight: shape of the weight that it multiplies by; empty without one.
        groups: of a convolution.
        is_transposed: whether the weight of a Gemm has its outputs first.
        name: that it has in the file.
    """

    path: str
    operator: str
    writers: tuple[int, ...] = ()
    weight: tuple[int, ...] = ()
    groups: int = 1
    is_transposed: bool = False
    name: str = ""

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels or neurons read and written."""
        if not self.weight:
            return ()
        first, second = self.weight[:2] if "Conv" in self.operator else self.weight[-2:]
        if self.operator == "Conv":
            return second * self.groups, first
        if self.operator == "ConvTranspose":
            return first, second * self.groups
        return (second, first) if self.is_transposed else (first, second)

    @property
    def is_depthwise(self) -> bool:
        """Return whether each channel reads one alone."""
        return self.groups > 1 and self.operator == "Conv" and self.weight[1] == 1


def profile_of(path: Path, given: Given, threads: int, ms: float) -> list[LayerTime]:
    """Return the times of a file's layers, those of each operator and module together.

    The arguments are those of ``profiled_call``.
    """
    return layers_of(*profiled_call(path, given, threads, ms))


def profiled_call(
    path: Path, given: Given, threads: int, ms: float, seconds: float = _SECONDS
) -> tuple[list[Event], list[FileNode]]:
    """Return the events of a typical call of a file, and its nodes.

    Args:
        path: of the file, beside which another one is written for a while.
        given: inputs of a call, in order.
        threads: that a call may use.
        ms: milliseconds of a call, about.
        seconds: of all calls, about.
    """
    import onnx  # here, since it loads slowly

    model = onnx.load(str(path), load_external_data=False)
    nodes = numbered(model)
    copy = path.with_name(f"{path.name}.profiled")  # weights apart are found beside it
    calls = min(_MOST, max(_FEWEST, round(seconds * 1e3 / max(ms, 1e-3))))
    try:
        copy.write_bytes(model.SerializeToString())
        del model
        with tempfile.TemporaryDirectory() as folder:
            profile = str(Path(folder) / "profile")
            network = collect.Network(copy, threads, collect.CPU, profile=profile)
            network.median(feed_of(network, given), calls + 1)
            text = Path(network.session.end_profiling()).read_text(encoding="utf-8")
    finally:
        copy.unlink(missing_ok=True)
    return typical_call(json.loads(text), calls), nodes


def owner_of(node: onnx.NodeProto) -> str:
    """Return the path of a node's innermost module, from the exporter's name scopes."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = ast.literal_eval(entry.value)
            return without_call(scopes[-2]) if len(scopes) > 1 else ""
    return ""


def numbered(model: onnx.ModelProto) -> list[FileNode]:
    """Return the facts of a file's nodes, and call nodes and values by number, in place.

    Node 12 is ``n00012_`` and its first output ``n00012_0``: the runtime calls fused nodes by one
    or the other.
    """
    graph, found = model.graph, list[FileNode]()
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    writers: dict[str, int] = {}
    names: dict[str, str] = {}
    for number, node in enumerate(graph.node):
        numbers = {a.name: a.i for a in node.attribute}
        weight = _weight_of(node, shapes)
        layer = weight.rpartition(".")[0] if weight else ""
        found.append(
            FileNode(
                layer or owner_of(node),
                node.op_type,
                tuple(writers[name] for name in node.input if name in writers),
                shapes.get(weight, ()),
                numbers.get("group", 1),
                bool(numbers.get("transB", 0)),
                node.name,
            )
        )
        node.name = f"n{number:05d}_"
        for place, name in enumerate(node.output):
            if name:
                writers[name], names[name] = number, f"{node.name}{place}"
    rename_values(graph, names)
    return found


def _weight_of(node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name of the weight that a node multiplies by; empty without one."""
    if node.op_type not in _MULTIPLYING:
        return ""
    of_matrices = (name for name in node.input[:2] if len(shapes.get(name, ())) > 1)
    return next(of_matrices, "")


def typical_call(events: Sequence[Event], calls: int) -> list[Event]:
    """Return the nodes' events of one call, each with its lower quartile over the last calls."""
    of_nodes = [event for event in events if event.get("cat") == "Node"]
    each = len(of_nodes) // (calls + 1)  # the first one is no typical call
    runs = [of_nodes[len(of_nodes) - each * (n + 1) :][:each] for n in range(calls)]
    return [
        {**alike[0], "dur": collect.typical([event["dur"] for event in alike])}
        for alike in zip(*runs, strict=True)
    ]


def layers_of(events: Sequence[Event], nodes: Sequence[FileNode]) -> list[LayerTime]:
    """Return the times of layers by the events of one call, in the order in which they run.

    Changes of the layout are charged to the node whose input or output changes.
    """
    found: dict[tuple[str, str], LayerTime] = {}
    last, waiting = None, 0.0
    for event, number in zip(events, nodes_of(events, nodes), strict=True):
        operator, ms = _operator(event), event["dur"] / 1e3
        if number is None:
            if operator == f"{_REORDER}Input" or last is None:
                waiting += ms
            else:
                found[last] = replace(
                    found[last], ms=found[last].ms + ms, reorders=found[last].reorders + ms
                )
            continue
        layer = replace(_layer(event, operator, nodes[number]), ms=ms + waiting, reorders=waiting)
        last, waiting = layer.key, 0.0
        found[last] = found[last].with_another(layer) if last in found else layer
    return list(found.values())


def nodes_of(events: Sequence[Event], nodes: Sequence[FileNode]) -> list[int | None]:
    """Return the number of each event's node; None for those that the runtime has added."""
    found = [collect.NODE.search(event["name"]) for event in events]
    numbers = [None if match is None else int(match[1]) for match in found]
    own, result = {number for number in numbers if number is not None}, list[int | None]()
    for event, number in zip(events, numbers, strict=True):
        if number is None or number >= len(nodes):
            result.append(None)
        elif _operator(event) in _MULTIPLYING and nodes[number].operator not in _MULTIPLYING:
            result.append(_multiplying_before(number, nodes, own))
        else:
            result.append(number)
    return result


def _operator(event: Event) -> str:
    """Return the operator of an event, that which others are fused into."""
    return str(event["args"]["op_name"]).removeprefix("Fused")


def _multiplying_before(number: int, nodes: Sequence[FileNode], taken: Collection[int]) -> int:
    """Return the product that the runtime fused into a node after it, which gave it its name."""
    for before in _before(number, nodes):
        if nodes[before].operator in _MULTIPLYING and before not in taken:
            return before
    return number


def _before(number: int, nodes: Sequence[FileNode]) -> Iterator[int]:
    """Yield the nodes that a node depends on, the nearest first."""
    pending, seen = deque([number]), {number}
    while pending:
        for writer in nodes[pending.popleft()].writers:
            if writer not in seen:
                seen.add(writer)
                pending.append(writer)
                yield writer


def _layer(event: Event, operator: str, node: FileNode) -> LayerTime:
    """Return a node's layer, without its time."""
    read, written = (_shapes(event["args"].get(f"{side}_type_shape")) for side in _SIDES)
    elements = float(sum(prod(shape) for shape in written))
    multiplies = operator in _MULTIPLYING
    if multiplies and node.weight and written:
        shape = read[0] if operator == "ConvTranspose" and read else written[0]
        places = shape[0] * prod(shape[2:]) if "Conv" in operator else prod(shape[:-1])
        elements = float(places * prod(node.weight))
    elif multiplies and read:
        elements *= read[0][-1]
    return LayerTime(
        node.path,
        operator,
        0.0,
        elements,
        multiplies,
        tuple(dict.fromkeys(node.widths)),
        is_blocked=_BLOCKED in event["name"],
        is_depthwise=node.is_depthwise,
    )


_SIDES = ("input", "output")


def _shapes(of_values: Any) -> list[list[int]]:
    """Return the shapes in a profile's ``[{"float": [1, 16]}, …]``."""
    return [shape for value in of_values or () for shape in value.values()]
