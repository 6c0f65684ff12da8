"""ONNX files of opsets before 18, by torch's former exporter, and weights in separate files.

The former exporter traces a forward with TorchScript. Here it traces the graph of the program that
other files are made from, with sizes read from the tensors. Weights are in a separate file where
both would be larger than 2 GB, which protobuf does not allow.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from l0prune.capture.compat import EXPORTER_LOG, OpOverload, pytree, replaced
from l0prune.capture.symbolic import inputs_of
from l0prune.errors import L0pruneError, UsageError
from l0prune.infer.nodes import has_tensor, operator_name

if TYPE_CHECKING:
    import onnx
    import onnx_ir


LARGEST = 2**31 - 1  # a protobuf file cannot be larger
_ROOM = 0.95  # share of it for weights; the rest is for the graph


@contextmanager
def data_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new path for the weights of an ONNX file, if they need a separate file.

    Enter the context before the ONNX file is made, leave it after the file has its name. So a kill
    leaves the old file with its weights, or the new file with the new ones. On exit weights that
    the file does not name are deleted: the old ones, or the new ones if it was not replaced.
    """
    target = Path(os.path.realpath(path))
    ours = re.compile(re.escape(target.name) + r"\.[0-9a-f]{8}\.data")
    try:
        yield target.with_name(f"{target.name}.{secrets.token_hex(4)}.data")
    finally:
        with contextlib.suppress(OSError):  # leftovers only take space
            found = [file for file in target.parent.iterdir() if ours.fullmatch(file.name)]
            content = target.read_bytes() if found and target.exists() else b""
            for file in found:
                if file.name.encode() not in content:
                    file.unlink()


def is_large(model: onnx_ir.Model) -> bool:
    """Check whether the weights of a model are too large for one file."""
    weights = {id(value.const_value): value.const_value for value in _weights(model)}
    return sum(tensor.nbytes for tensor in weights.values() if tensor) > _ROOM * LARGEST


def move_out(model: onnx_ir.Model, data: Path) -> None:
    """Move the weights of a model to an external data file, in place."""
    import onnx_ir

    onnx_ir.external_data.unload_from_model(model, data.parent, data.name)
    with open(data, "rb+") as file:
        os.fsync(file.fileno())


def _weights(model: onnx_ir.Model) -> list[onnx_ir.Value]:
    return [value for graph in model.graphs() for value in graph.initializers.values()]


FIRST_OF_PRESENT = 18
_FIRST = 7  # the oldest that ONNX Runtime reads
_ATEN = torch.ops.aten


def check_opset(opset: int | None) -> None:
    """Raise UsageError for an opset that neither exporter has."""
    import onnx

    latest = onnx.defs.onnx_opset_version()
    if opset is not None and (type(opset) is not int or not _FIRST <= opset <= latest):
        raise UsageError(
            f"opset={opset!r}: give a number from {_FIRST} to {latest}, the latest that the "
            f"installed onnx {onnx.__version__} knows"
        )


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
