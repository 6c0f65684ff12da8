"""Folding of ONNX graphs: constant conditions, sizes, and weights that are computed.

Numbers and sizes are folded by onnxscript, which also puts the branch of an ``If`` in its place
where the condition is constant. What a file computes from its weights alone is evaluated by ONNX's
reference, unless that would store a weight twice: shared weights stay shared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from l0prune.capture.threads import muted, one_at_a_time

if TYPE_CHECKING:
    import onnx
    import onnx_ir

_ROUNDS = 8  # most branches within branches
_FEWEST = 64  # elements of a weight; smaller arrays are numbers, and may be stored twice
_GROWTH = 1 << 18  # elements by which a computation may exceed what it reads
_RECURRENT, _STATES = ("RNN", "GRU", "LSTM"), (5, 6)  # and the places of their initial states
_MOVING = ("Cast", "Concat", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Tile",
           "Transpose", "Unsqueeze")  # fmt: skip
_RANDOM = ("Random", "Multinomial", "Bernoulli")


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without what does not depend on its inputs."""
    with one_at_a_time(), muted():
        model = _without_conditions(model)
        return _with_computed_weights(model)


def _without_conditions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fold numbers and sizes, and branches whose condition is one of them."""
    import onnx_ir
    import onnxscript.optimizer
    from onnx_ir.passes.common import NameFixPass, RemoveUnusedNodesPass

    _name(model.graph)
    made = onnx_ir.serde.deserialize_model(model)
    NameFixPass()(made)  # branches may have names in common
    for _ in range(_ROUNDS):
        found = onnxscript.optimizer.fold_constants(
            made,
            onnx_shape_inference=True,
            should_fold=lambda node: False if any(map(_is_weight, node.inputs)) else None,
        )
        if not _fold_sizes(made) and not found:
            break
    _drop_zero_states(made)
    RemoveUnusedNodesPass()(made)
    return onnx_ir.serde.serialize_model(made)


def _name(graph: onnx.GraphProto) -> None:
    """Name nodes without a name by their first output; else they would be numbered."""
    for node in graph.node:
        node.name = node.name or node.output[0]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _name(inner)


def _is_weight(value: object) -> bool:
    tensor = getattr(value, "const_value", None)
    return tensor is not None and tensor.size > _FEWEST and tensor.dtype.is_floating_point()


def _fold_sizes(model: onnx_ir.Model) -> bool:
    """Fold known entries of shapes that have free ones beside them; return whether there were any.

    Onnxscript folds whole shapes.
    """
    import onnx_ir

    found = False
    for node in model.graph:
        sizes = _picked(node) if node.outputs[0].uses() else None
        if sizes is not None:
            name = f"{node.outputs[0].name} known"
            known = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(sizes, name=name))
            model.graph.register_initializer(known)
            node.outputs[0].replace_all_uses_with(known, replace_graph_outputs=True)
            found = True
    return found


def _picked(node: onnx_ir.Node) -> np.ndarray[Any, Any] | None:
    """Return the entries of a shape that a Gather or Slice gives; None if not known."""
    of = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    read = of.inputs[0] if of is not None and of.op_type == "Shape" else None
    if of is None or read is None or read.shape is None or node.op_type not in ("Gather", "Slice"):
        return None
    begin, end = (of.attributes.get(name) for name in ("start", "end"))
    sizes = np.array(list(read.shape), object)
    sizes = sizes[begin and begin.as_int() : end and end.as_int()]
    given = [None if each is None else each.const_value for each in node.inputs[1:]]
    numbers = [each.numpy() for each in given if each is not None]
    if len(numbers) < len(given):
        return None
    if node.op_type == "Gather":
        sizes = sizes.take(numbers[0])
    else:
        step = int(numbers[3][0]) if len(numbers) > 3 else 1
        sizes = sizes[int(numbers[0][0]) : int(numbers[1][0]) : step]
    is_known = all(isinstance(each, int) for each in np.array(sizes, object).ravel())
    return np.array(sizes, np.int64) if is_known else None


def _drop_zero_states(model: onnx_ir.Model) -> None:
    """Leave out initial states that are zero, as they are where none is given, in place."""
    for node in model.graph:
        if node.op_type in _RECURRENT:
            for place, value in enumerate(node.inputs):
                if place in _STATES and value is not None and _is_zero(value):
                    node.replace_input_with(place, None)


def _is_zero(value: onnx_ir.Value) -> bool:
    """Return whether a value is zero, of whatever shape."""
    if value.const_value is not None:
        return not value.const_value.numpy().any()
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "ConstantOfShape":
        given = node.attributes.get("value")
        return given is None or not given.as_tensor().numpy().any()
    made_of = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return node.op_type in _MOVING and all(each is not None and _is_zero(each) for each in made_of)


def _with_computed_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Evaluate what is computed from weights alone."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    nodes, sizes = list(model.graph.node), _sizes(model)
    constants = [node for node in nodes if node.op_type == "Constant"]
    weights = {each.name for each in model.graph.initializer}
    weights -= {each.name for each in model.graph.input}  # these are defaults
    weights |= {node.output[0] for node in constants}
    computed = _without_copies(model, _computed(nodes, weights, sizes), weights, sizes)
    made = {name for node in computed for name in node.output}
    read = sorted(made & _read_beside(model, made))
    if not read:
        return model
    part = onnx.helper.make_graph(
        [*constants, *computed],
        "weights",
        [],
        [onnx.helper.make_empty_tensor_value_info(name) for name in read],
        initializer=model.graph.initializer,
    )
    alone = onnx.helper.make_model(
        part, opset_imports=model.opset_import, ir_version=model.ir_version
    )
    values = ReferenceEvaluator(alone).run(None, {})
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(node for node in nodes if made.isdisjoint(node.output))
    result.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.ascontiguousarray(value), name)
        for name, value in zip(read, values, strict=True)
    )
    return result


def _sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Return the number of elements of each value of a known shape."""
    import onnx

    found = {each.name: math.prod(each.dims) for each in model.graph.initializer}
    try:
        values = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
    except Exception:  # such as files above 2 GB
        return found
    for value in values:
        of = value.type.tensor_type
        if of.HasField("shape") and all(dim.HasField("dim_value") for dim in of.shape.dim):
            found[value.name] = math.prod(dim.dim_value for dim in of.shape.dim)
    return found


def _computed(
    nodes: Iterable[onnx.NodeProto], weights: Collection[str], sizes: dict[str, int]
) -> list[onnx.NodeProto]:
    """Return the nodes that read weights alone, and give no more than about as many numbers."""
    known, found = {*weights, ""}, []
    for node in nodes:
        reads = set(node.input) - {""}
        if not reads or node.op_type.startswith(_RANDOM) or not known.issuperset(node.input):
            continue
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            continue
        outputs = [name for name in node.output if name]
        most = sum(sizes.get(name, 0) for name in reads) + _GROWTH
        if all(sizes.get(name, most + 1) <= most for name in outputs):
            found.append(node)
            known.update(outputs)
    return found


def _without_copies(
    model: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    weights: Collection[str],
    sizes: dict[str, int],
) -> list[onnx.NodeProto]:
    """Leave out nodes by which numbers of a weight would be stored more than once."""
    sources = {name: {name} for name in weights if sizes.get(name, 0) > _FEWEST}
    for node in nodes:
        of = {source for name in node.input for source in sources.get(name, ())}
        sources.update((name, of) for name in node.output)
    stored = {name for node in nodes for name in node.output}
    stored = {name for name in _read_beside(model, stored) if sources.get(name)}
    shared = set()
    for source in set().union(*sources.values()):
        values = [name for name in stored if source in sources[name]]
        whole = set().union(*(sources[name] for name in values))
        if sum(sizes.get(name, 0) for name in values) > sum(sizes[name] for name in whole):
            shared.add(source)
    return [node for node in nodes if shared.isdisjoint(sources[node.output[0]])]


def _read_beside(model: onnx.ModelProto, made: Collection[str]) -> set[str]:
    """Return the names of the values that the graph gives, or that nodes read which make others."""
    others = (node for node in model.graph.node if not any(name in made for name in node.output))
    return {name for node in others for name in _inputs(node)} | {
        value.name for value in model.graph.output
    }


def _inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the values that a node and its branches read."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _inputs(inner)
            yield from (value.name for value in graph.output)
