"""ONNX file in which all nodes after an exit are nested in an ``If``.

The source is a file that computes every exit. The nodes that an exit needs and no earlier exit did
are one level, and each level is the ``else_branch`` of the one before. Branches read values of the
enclosing levels, as ONNX allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import onnx

OUTPUTS = ("logits", "exit", "margin")
THRESHOLDS = "thresholds"


class Level(NamedTuple):
    """Names of the outputs of one exit in a file that computes all exits.

    Attributes:
        answer: of the exit.
        passes: whether the score reaches the threshold; one bool.
        margin: the least margin of this decision and those before.
    """

    answer: str
    passes: str
    margin: str


@dataclass
class _Source:
    """Graph that computes all exits, with the nodes that are not placed yet."""

    graph: onnx.GraphProto
    shape: Sequence[int]

    def __post_init__(self) -> None:
        self._left = list(self.graph.node)
        self._maker = {name: node for node in self._left for name in node.output}

    def take(self, wanted: Iterable[str]) -> list[onnx.NodeProto]:
        """Remove and return, in order, the remaining nodes that these values depend on."""
        needed, pending = set[int](), list(wanted)
        while pending:
            node = self._maker.get(pending.pop())
            if node is not None and id(node) not in needed:
                needed.add(id(node))
                pending += read_by(node)
        taken = [node for node in self._left if id(node) in needed]
        self._left = [node for node in self._left if id(node) not in needed]
        return taken


def read_by(node: onnx.NodeProto) -> list[str]:
    """Return the names of the values that a node and its subgraphs read."""
    inner = [each for a in node.attribute if a.HasField("g") for each in a.g.node]
    return [*node.input, *(name for each in inner for name in read_by(each))]


def nested(
    model: onnx.ModelProto, levels: Sequence[Level], last: str, answer: str
) -> onnx.ModelProto:
    """Return the file that stops at the first exit whose score reaches its threshold.

    Outputs of the file are the answer, the number of the exit (at the network's end, the number of
    early exits) and the margin.

    Args:
        model: computes all exits of one example.
        levels: outputs of the model, by exit.
        last: output of the model at the network's end.
        answer: name of the answer in the new file.
    """
    import onnx

    result = onnx.ModelProto()
    result.CopyFrom(model)
    (shape,) = (_shape(value) for value in model.graph.output if value.name == last)
    source = _Source(model.graph, shape)
    nodes = _level(source, levels, last, 0, "")
    names = dict(zip((f"{name}_0" for name in OUTPUTS), (answer, *OUTPUTS[1:]), strict=True))
    for node in nodes:
        node.output[:] = [names.get(name, name) for name in node.output]
    graph = result.graph
    del graph.node[:], graph.output[:], graph.value_info[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.output.extend(_values(shape, (answer, *OUTPUTS[1:])))
    moved = move_in(graph, {each.name: each for each in model.graph.initializer})
    kept = [each for each in model.graph.initializer if each.name not in moved]
    graph.initializer.extend(kept)
    onnx.checker.check_model(result)
    return result


def _level(
    source: _Source, levels: Sequence[Level], last: str, number: int, above: str
) -> list[onnx.NodeProto]:
    """Return the nodes of one level, which end in its three outputs.

    Args:
        source: graph with the nodes left to place.
        levels: all exits.
        last: the value at the network's end.
        number: of this level.
        above: the margin of the enclosing level.
    """
    from onnx import helper

    outputs = [f"{name}_{number}" for name in OUTPUTS]
    if number == len(levels):
        return [*source.take([last]), *_given(last, number, above, outputs)]
    level = levels[number]
    own = source.take(level)
    inside, beyond = (
        [f"{name}_{where}" for name in OUTPUTS] for where in (f"at_{number}", number + 1)
    )
    branches = [
        helper.make_graph(nodes, f"{name}_{number}", [], _values(source.shape, ends))
        for name, ends, nodes in (
            ("exit", inside, _given(level.answer, number, level.margin, inside)),
            ("rest", beyond, _level(source, levels, last, number + 1, level.margin)),
        )
    ]
    leave = helper.make_node(
        "If",
        [level.passes],
        outputs,
        f"exit_{number}_or_rest",
        then_branch=branches[0],
        else_branch=branches[1],
    )
    return [*own, leave]


def _given(answer: str, number: int, margin: str, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """Return the nodes that write the outputs of an exit."""
    from onnx import helper, numpy_helper

    told = numpy_helper.from_array(np.array([number], dtype=np.int64))
    return [
        helper.make_node("Identity", [answer], [outputs[0]]),
        helper.make_node("Constant", [], [outputs[1]], value=told),
        helper.make_node("Identity", [margin], [outputs[2]]),
    ]


def _values(shape: Sequence[int], names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    from onnx import TensorProto, helper

    kinds = ((TensorProto.FLOAT, shape), (TensorProto.INT64, (1,)), (TensorProto.FLOAT, (1,)))
    return [
        helper.make_tensor_value_info(name, kind, sizes)
        for name, (kind, sizes) in zip(names, kinds, strict=True)
    ]


def _shape(value: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def move_in(graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto]) -> set[str]:
    """Move weights into the one branch that reads them; return the names of those that were moved.

    So a runtime that optimises each graph separately finds them.
    """
    moved: set[str] = set()
    branches = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    readers: dict[str, set[int]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(0)
    for number, branch in enumerate(branches, start=1):
        for name in {name for node in branch.node for name in read_by(node)}:
            readers.setdefault(name, set()).add(number)
    for number, branch in enumerate(branches, start=1):
        own = {n: w for n, w in weights.items() if readers.get(n) == {number} and n != THRESHOLDS}
        deeper = move_in(branch, own)
        branch.initializer.extend(weight for name, weight in own.items() if name not in deeper)
        moved |= own.keys()
    return moved
