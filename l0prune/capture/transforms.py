"""Parts of a forward that run under transforms of torch.func, as the operators that they amount to.

A captured graph has ``torch.vmap`` and ``torch.func.jvp`` as calls that begin and end them, and in
between operators whose tensors lack a dim, or carry a tangent. Traced once more, such a part
becomes operators on whole tensors, which is what torch itself runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from l0prune.capture.compat import FakeTensor
from l0prune.capture.inlining import finish, put_in_line
from l0prune.capture.provenance import origin_of
from l0prune.errors import CaptureError


def write_out_transforms(program: ExportedProgram) -> None:
    """Put in place of each part under transforms the operators that it amounts to.

    A part that torch cannot trace stays as it is.

    Raises:
        CaptureError: torch.export has lost what a transform computes.
    """
    _check_constants(program)
    module = program.graph_module
    renamed = [pair for part in list(_parts(module.graph)) for pair in _written_out(module, part)]
    finish(program, renamed)


def _check_constants(program: ExportedProgram) -> None:
    """Refuse a program with a tensor of torch.func among its constants: it is what it lost."""
    for constant in program.constants.values():
        try:
            if isinstance(constant, Tensor) and constant.layout is torch.strided:
                constant.untyped_storage()
        except NotImplementedError as error:
            raise CaptureError(
                "torch.export does not follow a gradient that a forward takes of itself "
                "(torch.func.grad or vjp). Give l0prune the submodules before and after it."
            ) from error


def _parts(graph: Graph) -> Iterator[list[Node]]:
    """The calls from the beginning of each outermost transform to its end, both included."""
    part: list[Node] = []
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        depth += name.endswith("_increment_nesting")
        if depth:
            part.append(node)
        if depth and name.endswith("_decrement_nesting"):
            depth -= 1
            if not depth:
                yield part
                part = []


def _written_out(module: GraphModule, part: list[Node]) -> list[tuple[str, str]]:
    """Replace one part in the module's graph; the old and new names of what others read of it."""
    inside = set(part)
    operands = [o for node in part for o in node.all_input_nodes if o not in inside]
    operands = list(dict.fromkeys(operands))
    ends = [node for node in part if any(user not in inside for user in node.users)]
    traced = _traced(part, operands, ends)
    if traced is None:
        return []
    with module.graph.inserting_before(part[0]):
        call = module.graph.call_function(_written_out, tuple(operands))
        results = [
            module.graph.call_function(operator.getitem, (call, n)) for n in range(len(ends))
        ]
    origin, names = origin_of(ends[-1] if ends else part[-1]), [end.name for end in ends]
    for end, result in zip(ends, results, strict=True):
        end.replace_all_uses_with(result)
    for node in reversed(part):
        module.graph.erase_node(node)
    new, renamed = put_in_line(module, call, traced, operands)
    for node in new:
        node.meta |= origin
    return [(old, to) for old, (_, to) in zip(names, renamed, strict=True)]


def _traced(part: list[Node], operands: list[Node], ends: list[Node]) -> GraphModule | None:
    """The part as a graph of operators on whole tensors; None where torch cannot trace it."""
    graph = Graph()
    known: dict[Node, Any] = {operand: graph.placeholder(operand.name) for operand in operands}
    for node in part:
        known[node] = graph.node_copy(node, lambda old: known[old])
    graph.output(tuple(known[end] for end in ends))
    values = [operand.meta.get("val") for operand in operands]
    fakes = [value for value in values if isinstance(value, FakeTensor)]
    if not fakes or any(value is None for value in values):
        return None
    try:
        with fakes[0].fake_mode, torch.no_grad():
            traced = make_fx(GraphModule({}, graph))(*values)
    except Exception:  # a use of it that torch has no account of
        return None
    return None if any(node.op == "get_attr" for node in traced.graph.nodes) else traced
