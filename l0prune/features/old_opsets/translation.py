"""ONNX files of opsets before 18, by torch's former exporter.

It traces a forward with TorchScript. Here that is the graph of the program that other files are
made from, with sizes read from the tensors.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from l0prune.capture.compat import EXPORTER_LOG, OpOverload, pytree, replaced
from l0prune.capture.symbolic import inputs_of
from l0prune.errors import L0pruneError
from l0prune.exporting.onnx.external import LARGEST
from l0prune.exporting.onnx.file import FIRST_OF_PRESENT
from l0prune.infer.nodes import has_tensor, operator_name

if TYPE_CHECKING:
    import onnx
    import onnx_ir


_ATEN = torch.ops.aten


def of_older_opset(
    program: ExportedProgram, opset: int, sizes: Sequence[Mapping[int, str]]
) -> onnx_ir.Model:
    """Translate a program, in float32 and of tensors only, to ONNX of an opset before 18.

    Raises:
        L0pruneError: the opset lacks an operator; the message names the lowest one that has all.
    """
    following = _Following(program)
    try:
        return _made(following, opset, sizes)
    except Exception as error:
        operator = _operator(error)
        if not operator:
            raise
        lowest = _lowest(following, opset + 1, sizes)
        raise L0pruneError(
            f"{operator} of this model cannot be written in opset {opset}. The lowest that it can "
            f"be written in is {lowest}: opset={lowest} (--opset {lowest})."
        ) from error


class _Following(nn.Module):
    """Module around a program that TorchScript can trace: from tensors to tensors."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        values = inputs_of(program)
        if any(isinstance(value, SymInt) for value in values) or program.example_inputs is None:
            raise L0pruneError(
                "A part that is told a number, such as that of the examples, cannot be written in "
                f"an opset before {FIRST_OF_PRESENT}."
            )
        leaves, self.structure = pytree.tree_flatten(program.example_inputs)
        self.leaves = leaves
        self.places = [n for n, value in enumerate(values) if isinstance(value, Tensor)]
        given = program.graph_signature.user_inputs
        self.names = [str(given[place]) for place in self.places]
        self.graph_module = _with_plain_sizes(program.module(check_guards=False))

    @property
    def example(self) -> tuple[Tensor, ...]:
        """Return the example tensors that the program was captured with."""
        return tuple(self.leaves[place] for place in self.places)

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Return the leaves of the program's output."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return tuple(pytree.tree_leaves(self.graph_module(*args, **kwargs)))


def _with_plain_sizes(module: GraphModule) -> GraphModule:
    """Return a graph whose sizes TorchScript can trace, without hooks and assertions.

    It traces sizes that are given to functions of torch, but not those given to ATen operators.
    """
    for node in list(module.graph.nodes):
        if node.target is _ATEN._unsafe_view.default:  # unknown to TorchScript
            node.target = _ATEN.view.default
        name = operator_name(node.target).rpartition(".")[2]
        first = node.args[0] if node.args else None
        is_method = isinstance(first, Node) and has_tensor(first) and hasattr(Tensor, name)
        if _takes_sizes(node) and is_method:
            node.op, node.target = "call_method", name
        elif _takes_sizes(node) and node.target is _ATEN.slice.Tensor:
            node.target = _sliced
        elif _takes_sizes(node) and hasattr(torch, name):
            node.target = getattr(torch, name)
        if node.target is _ATEN.sym_size.int:
            with module.graph.inserting_before(node):
                size = module.graph.call_method("size", node.args)
            node.replace_all_uses_with(size)
            module.graph.erase_node(node)
        elif node.target is _ATEN._assert_scalar.default:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    return GraphModule(module, module.graph)


def _sliced(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Slice a tensor by Python's indexing, so that TorchScript can trace the sizes."""
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _takes_sizes(node: Node) -> bool:
    """Check whether an operator is given numbers that the graph computes."""
    given = node.all_input_nodes if isinstance(node.target, OpOverload) else []
    return any(
        isinstance(each.meta.get("val", 0), int | SymInt) for each in given if each.op != "get_attr"
    )


def _made(following: _Following, opset: int, sizes: Sequence[Mapping[int, str]]) -> onnx_ir.Model:
    import onnx
    import onnx_ir

    if sum(p.numel() * p.element_size() for p in following.parameters()) > LARGEST:
        raise L0pruneError(
            f"Weights of more than 2 GB are written in opset {FIRST_OF_PRESENT} or later alone."
        )
    file = io.BytesIO()
    pairs = zip(following.names, sizes, strict=False)
    axes = {name: dict(dims) for name, dims in pairs if dims}
    with replaced(*EXPORTER_LOG, lambda *_: None):
        torch.onnx.export(
            following,
            following.example,
            file,  # type: ignore[arg-type]  # torch's stub lacks what its former exporter takes
            dynamo=False,
            opset_version=opset,
            input_names=following.names,
            dynamic_axes=axes,
        )
    found = onnx.load_from_string(file.getvalue())
    _give_back_unread(found.graph, following, axes)
    return onnx_ir.from_proto(found)


def _give_back_unread(
    graph: onnx.GraphProto, following: _Following, axes: Mapping[str, Mapping[int, str]]
) -> None:
    """Declare inputs that no node reads, in place: the former exporter leaves them out."""
    import onnx

    known = {each.name: each for each in graph.input}
    inputs = []
    for name, tensor in zip(following.names, following.example, strict=True):
        kind = onnx.helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype)
        shape = [axes.get(name, {}).get(dim, size) for dim, size in enumerate(tensor.shape)]
        unread = onnx.helper.make_tensor_value_info(name, kind, shape)
        inputs.append(known.get(name, unread))
    del graph.input[:]
    graph.input.extend(inputs)


def _operator(error: BaseException) -> str:
    """Return the operator that an error of the exporter names; empty if it names none."""
    found = re.search(r"operator '(?:aten::)?([^']+)'", str(error))
    return found[1] if found else ""


def _lowest(following: _Following, start: int, sizes: Sequence[Mapping[int, str]]) -> int:
    for opset in range(start, FIRST_OF_PRESENT):
        try:
            _made(following, opset, sizes)
        except Exception:
            continue
        return opset
    return FIRST_OF_PRESENT
