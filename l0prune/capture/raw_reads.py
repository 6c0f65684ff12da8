"""Reads of stored tensors that a forward does not get as attributes of its modules.

``named_parameters()`` and ``state_dict()`` hand out the stored tensors, as a rule for
``functional_call``. In a captured graph they look like any ``module.weight``. So what is handed out
while a model is traced is a view of the tensor by itself: the reads of these views are noted on the
nodes that read, and the views are taken out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from l0prune.capture.compat import replaced

# By the operator that marks a read, the key of its note in a node's meta: names of operands.
BY_NAME, OF_STATE = "by_name", "of_state"  # by named_parameters(); by state_dict()
_MARKS: dict[Any, str] = {
    torch.ops.aten.view_as.default: BY_NAME,
    torch.ops.aten.expand_as.default: OF_STATE,
}
_VIEW, _EXPANSION = _MARKS
_WRAPPERS = (
    torch.ops.higher_order.wrap_with_autocast,
    torch.ops.higher_order.wrap_with_set_grad_enabled,
)


@contextmanager
def mark_raw_reads(model: nn.Module) -> Iterator[None]:
    """Mark the stored tensors that modules hand out while the model's forward runs."""
    running = False

    def begin(*_: Any) -> None:
        nonlocal running
        running = True

    def end(*_: Any) -> None:
        nonlocal running
        running = False

    def pairs(method: Any) -> Any:
        @wraps(method)
        def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for name, tensor in method(self, *args, **kwargs):
                yield name, _marked(tensor, _VIEW) if running else tensor

        return marked

    def state(method: Any) -> Any:
        @wraps(method)
        def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = method(self, *args, **kwargs)
            for name in found if running else ():
                found[name] = _marked(found[name], _EXPANSION)
            return found

        return marked

    hooks = (
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(end, always_call=True),
    )
    kind = nn.Module
    try:
        with (
            replaced(kind, "named_parameters", pairs(kind.named_parameters)),
            replaced(kind, "named_buffers", pairs(kind.named_buffers)),
            replaced(kind, "state_dict", state(kind.state_dict)),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _marked(value: Any, mark: Any) -> Any:
    is_plain = isinstance(value, Tensor) and value.layout == torch.strided
    return mark(value, value) if is_plain else value


def take_out_marks(program: ExportedProgram) -> None:
    """Remove the marks from all graphs of a program, and note what reads them."""
    signature = program.graph_signature
    stored = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    names = {n: n.name for n in program.graph.find_nodes(op="placeholder") if n.name in stored}
    _take_out(program.graph_module, names, {})


def _take_out(
    module: GraphModule, stored: Mapping[Node, str], raw: dict[Node, tuple[str, str]]
) -> None:
    """Remove the marks from one graph; ``stored`` are its inputs by name, ``raw`` those marked."""
    marks = []
    for node in module.graph.nodes:
        source = _marked_by(node)
        if source in stored or source in raw:
            raw[node] = _MARKS[node.target], stored.get(source) or raw[source][1]
            marks.append(node)
        elif node.target in _WRAPPERS:
            inner, given = _wrapped(module, node)
            _take_out(inner, _of(given, stored), _of(given, raw))
        else:
            for key, name in (raw[each] for each in node.all_input_nodes if each in raw):
                node.meta[key] = (*node.meta.get(key, ()), name)
    for node in reversed(marks):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)


def _marked_by(node: Node) -> Any:
    """Return the tensor of which a node is a mark; None for other nodes."""
    is_mark = node.target in _MARKS and node.args[0] is node.args[1]
    return _attached(node.args[0]) if is_mark else None


def _attached(node: Any) -> Any:
    while node.target is torch.ops.aten.detach.default:  # as state_dict() does
        node = node.args[0]
    return node


def _wrapped(module: GraphModule, node: Node) -> tuple[GraphModule, dict[Node, Any]]:
    """Return the graph that a node runs under a mode, and what its inputs are given."""
    (of,) = (each for each in node.all_input_nodes if each.op == "get_attr")
    inner = getattr(module, str(of.target))
    taken = inner.graph.find_nodes(op="placeholder")
    return inner, dict(zip(taken, node.args[len(node.args) - len(taken) :], strict=True))


Found = TypeVar("Found")


def _of(given: Mapping[Node, Any], known: Mapping[Node, Found]) -> dict[Node, Found]:
    return {own: known[node] for own, node in given.items() if node in known}


def raw_reads(node: Node, key: str) -> dict[Node, Node]:
    """Return the operands that a node reads as they were handed out, with the stored tensors."""
    names = node.meta.get(key, ())
    stored = {operand: _attached(operand) for operand in node.all_input_nodes if names}
    return {operand: of for operand, of in stored.items() if of.name in names}
