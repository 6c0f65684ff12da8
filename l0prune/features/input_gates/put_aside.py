"""Subgraphs of an ONNX file, each moved into an ``If`` whose other side is a constant."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from l0prune.exporting.onnx.file import rename_values
from l0prune.features.exits.nested import move_in, read_by

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

_WORK = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum")


class Branch(NamedTuple):
    """Factor and ends of a skip, by their names in a file that computes everything.

    Attributes:
        factor: one number.
        ends: the values that other nodes read.
        values: the constants of the ends if the factor is zero.
    """

    factor: str
    ends: tuple[str, ...]
    values: tuple[Tensor, ...]


def put_aside(model: onnx.ModelProto, branches: Sequence[Branch], count: int) -> list[Branch]:
    """Move the nodes that only the ends of a branch need into an ``If``, in place.

    Args:
        model: computes everything for one example. Outputs are those of the network, then factors
            and ends.
        branches: in the order of the graph.
        count: outputs of the network.

    Returns:
        The branches that were moved: those with convolutions or matrix products.
    """
    import onnx

    graph = model.graph
    outputs = [output.name for output in graph.output][:count]
    nodes, written = [copy.deepcopy(node) for node in graph.node], []
    roots = [*outputs, *(branch.factor for branch in branches)]
    for branch in branches:
        others = _needed(nodes, roots, stop=branch.ends)
        own = [node for node in _needed(nodes, branch.ends) if not _has(others, node)]
        if any(kind in _WORK for node in own for kind in _kinds(node)):
            left = [node for node in nodes if not _has(own, node)]
            nodes = _ordered([*left, *_if(branch, own)])
            written.append(branch)
    del graph.output[count:], graph.value_info[:], graph.node[:]
    graph.node.extend(_needed(nodes, outputs))
    weights = {each.name: copy.deepcopy(each) for each in graph.initializer}
    moved = move_in(graph, weights)
    read = {name for node in graph.node for name in read_by(node)}
    del graph.initializer[:]
    graph.initializer.extend(w for n, w in weights.items() if n in read and n not in moved)
    onnx.checker.check_model(model)
    return written


def _has(nodes: Sequence[onnx.NodeProto], node: onnx.NodeProto) -> bool:
    return any(each is node for each in nodes)


def _needed(
    nodes: Sequence[onnx.NodeProto], names: Sequence[str], stop: Sequence[str] = ()
) -> list[onnx.NodeProto]:
    """Return, in order, the nodes that these values depend on; ``stop`` counts as given."""
    maker = {name: number for number, node in enumerate(nodes) for name in node.output}
    found, pending, done = set[int](), list(names), set(stop)
    while pending:
        name = pending.pop()
        if name in maker and name not in done:
            done.add(name)
            found.add(maker[name])
            pending += read_by(nodes[maker[name]])
    return [nodes[number] for number in sorted(found)]


def _ordered(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes in topological order."""
    maker = {name: number for number, node in enumerate(nodes) for name in node.output}
    found: list[int] = []
    done = set[int]()
    pending = list(reversed(range(len(nodes))))
    while pending:
        number = pending[-1]
        above = [maker[name] for name in read_by(nodes[number]) if name in maker]
        missing = [each for each in above if each not in done]
        if missing and number not in done:
            pending += missing
            continue
        pending.pop()
        if number not in done:
            done.add(number)
            found.append(number)
    return [nodes[number] for number in found]


def _kinds(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the operator types of a node and of its subgraphs."""
    yield node.op_type
    for attribute in node.attribute:
        for inner in attribute.g.node if attribute.HasField("g") else ():
            yield from _kinds(inner)


def _if(branch: Branch, own: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes of an ``If`` that computes a branch's ends or gives their constants."""
    from onnx import TensorProto, helper

    values = [
        helper.make_tensor_value_info(end, TensorProto.FLOAT, list(value.shape))
        for end, value in zip(branch.ends, branch.values, strict=True)
    ]
    known = [
        node
        for end, value in zip(branch.ends, branch.values, strict=True)
        for node in _constant(end, value)
    ]
    sides = {}
    for side, nodes in (("computed", own), ("known", known)):
        graph = helper.make_graph(nodes, f"{branch.factor}_{side}", [], values)
        rename_values(graph, {end: f"{end}_{side}" for end in branch.ends})
        sides[side] = graph
    is_there = f"{branch.factor}_is_there"
    return [
        helper.make_node("Cast", [branch.factor], [is_there], to=TensorProto.BOOL),
        helper.make_node(
            "If",
            [is_there],
            list(branch.ends),
            then_branch=sides["computed"],
            else_branch=sides["known"],
        ),
    ]


def _constant(name: str, value: Tensor) -> list[onnx.NodeProto]:
    """Return nodes that give a constant; a dim along which it repeats is stored once."""
    from onnx import helper, numpy_helper

    array = value.detach().numpy().astype(np.float32)
    small = array
    for dim in range(array.ndim):
        first = np.take(small, [0], axis=dim)
        small = first if (small == first).all() else small
    stored = numpy_helper.from_array(np.ascontiguousarray(small))
    if small.shape == array.shape:
        return [helper.make_node("Constant", [], [name], value=stored)]
    shape = numpy_helper.from_array(np.array(array.shape, dtype=np.int64))
    return [
        helper.make_node("Constant", [], [f"{name}_value"], value=stored),
        helper.make_node("Constant", [], [f"{name}_shape"], value=shape),
        helper.make_node("Expand", [f"{name}_value", f"{name}_shape"], [name]),
    ]


def forced_to(path: Path, branches: Sequence[Branch], number: float) -> bytes:
    """Return the file with all factors replaced by a constant."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(path)
    factors = {branch.factor for branch in branches}
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        for place, name in enumerate(node.output):
            if name in factors:
                node.output[place] = f"{name}_as_it_is"
                one = numpy_helper.from_array(np.full((1, 1), number, dtype=np.float32))
                nodes.append(helper.make_node("Constant", [], [name], value=one))
    kept = [copy.deepcopy(node) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return bytes(model.SerializeToString())
