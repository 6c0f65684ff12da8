"""What the values of an ONNX file are called: outputs as in the model's own code, sizes by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument

from l0prune.exporting.output_names import leaf_names

if TYPE_CHECKING:
    import onnx

_NAME = r"[A-Za-z_]\w*"


def output_names(program: ExportedProgram) -> list[str]:
    """A name for each tensor that a program returns: its key or field, else its place.

    ``logits`` of a dict or a dataclass, ``output`` of a tensor, ``output_0`` of a tuple.
    """
    specs = program.graph_signature.output_specs
    given = [spec.arg for spec in specs if spec.kind == OutputKind.USER_OUTPUT]
    structure = program.call_spec.out_spec
    if structure is None or structure.num_leaves != len(given):
        return []
    names = leaf_names(structure)
    return list(compress(names, (isinstance(arg, TensorArgument) for arg in given)))


def rename(
    model: onnx.ModelProto, outputs: Sequence[str], sizes: Sequence[Mapping[int, str]]
) -> None:
    """Give outputs these names, and the free dims of inputs; in place.

    Args:
        model: the file's content.
        outputs: a name for each output; none where they keep theirs.
        sizes: for each input the names of its free dims.
    """
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {given.name for given in (*graph.input, *graph.initializer)}
    names: dict[str, str] = {}
    for output, name in zip(graph.output, outputs, strict=False):
        while name in taken and name != output.name:
            name += "_out"
        taken.add(name)
        names.setdefault(output.name, name)
    _rename_values(graph, names)
    symbols = {
        symbol[0]: name  # of a multiple, what it is one of
        for given, dims in zip(graph.input, sizes, strict=False)
        for dim, name in dims.items()
        if (symbol := re.search(_NAME, given.type.tensor_type.shape.dim[dim].dim_param))
    }
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = re.sub(
                    _NAME, lambda found: symbols.get(found[0], found[0]), size.dim_param
                )


def _rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Call values otherwise, also where a branch of the graph reads them."""
    for node in graph.node:
        for values in (node.input, node.output):
            for number, value in enumerate(values):
                values[number] = names.get(value, value)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_values(attribute.g, names)
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
