"""One form for the files of a network at several widths.

Exporters fold constants up to a size, and write a Split by the number of its parts where these are
equal: both depend on the widths. For a runtime it is the same, since it folds constants itself.
"""

from __future__ import annotations

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper

from l0prune.files.onnx_session import session_of

# Nodes that stay, whatever they read: weights of files in eight bits, and random numbers.
_STAY = ("QuantizeLinear", "DequantizeLinear", "Random", "Bernoulli", "Multinomial")


def in_normal_form(model: ModelProto) -> ModelProto:
    """Return a copy without nodes of constants alone, and with the sizes of all splits."""
    result = ModelProto()
    result.CopyFrom(model)
    _fold(result)
    _give_sizes_of_splits(result)
    return result


def _fold(model: ModelProto) -> None:
    """Replace what does not depend on the inputs by its values."""
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    folded: list[NodeProto] = []
    for node in graph.node:
        if constants.issuperset(filter(None, node.input)) and _may_go(node):
            folded.append(node)
            constants.update(node.output)
    gone = {name for node in folded for name in node.output}
    left = [node for node in graph.node if not gone.intersection(node.output)]
    read = {name for node in left for name in node.input} | {value.name for value in graph.output}
    wanted = [name for name in sorted(gone & read) if name]
    if not wanted:
        return
    taken = {name for node in folded for name in node.input}
    made = helper.make_graph(
        folded, "constants", [], [helper.make_empty_tensor_value_info(name) for name in wanted],
        [tensor for tensor in graph.initializer if tensor.name in taken],
    )  # fmt: skip
    alone = helper.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version)
    values = session_of(alone.SerializeToString()).run(wanted, {})
    for name, value in zip(wanted, values, strict=True):
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    del graph.node[:]
    graph.node.extend(left)
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _may_go(node: NodeProto) -> bool:
    has_graph = any(
        each.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for each in node.attribute
    )
    return not (has_graph or node.domain or node.op_type.startswith(_STAY))


def _give_sizes_of_splits(model: ModelProto) -> None:
    """Write the sizes of the parts of each Split in the place of their number."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.value_info}
    for number, node in enumerate(model.graph.node):
        given = {attribute.name: attribute for attribute in node.attribute}
        if "num_outputs" not in given or any(name not in shapes for name in node.output):
            continue
        axis = given["axis"].i if "axis" in given else 0
        sizes = [shapes[name][axis].dim_value for name in node.output]
        if 0 in sizes:  # a free size
            continue
        tensor = numpy_helper.from_array(np.array(sizes), f"sizes_of_split_{number}")
        model.graph.initializer.append(tensor)
        node.input.append(tensor.name)
        node.attribute.remove(given["num_outputs"])
