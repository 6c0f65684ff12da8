"""Replacement of the operators that torch's ONNX exporter does not translate.

The exporter traces a whole program again to replace a few operators and all writes in place: up to
half of the time of a file. Here these alone are replaced, one by one. A write becomes the operator
without it, whose result every later reader of that memory gets; a write through a view is scattered
into the tensor that the view is of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from l0prune.capture.compat import (
    OpOverload,
    Table,
    enable_python_dispatcher,
    is_composite,
    memory_of,
    schema_of,
)
from l0prune.capture.inlining import decomposed, inline_graph
from l0prune.exporting.onnx.operators import around_its_tensors, views_that_may_copy
from l0prune.infer.dataflow import Memory
from l0prune.infer.nodes import argument, is_assertion, is_writer, may_view, written

_ATEN = torch.ops.aten


def replaced_alone(
    program: ExportedProgram, translated: Collection[Any], table: Table
) -> ExportedProgram | None:
    """Return a copy of the program, which shares its tensors, of operators that are translated.

    None if it has control flow, writes into an input, or writes through a view of unknown kind.

    Args:
        program: the program.
        translated: operators that the exporter translates.
        table: decompositions of others.
    """
    copied = around_its_tensors(program)
    try:
        _without_translation(copied, translated, table)
        _Writes(copied, translated, table).run()
        _finish(copied)
    except _Unknown:
        return None
    return copied


class _Unknown(Exception):
    """Raised where a program has what is not replaced here."""


def _without_translation(
    program: ExportedProgram, translated: Collection[Any], table: Table
) -> None:
    """Replace the calls of operators that are not translated, in place, but no writes."""
    graph, mode = program.graph, _mode_of(program.graph.nodes)
    for node in graph.nodes:
        _evaluate(node, mode)
        if node.op == "call_function" and not is_writer(node):
            _settle(node, mode, translated, table)


def _settle(node: Node, mode: Any, translated: Collection[Any], table: Table) -> Any:
    """Replace a call if its operator is not translated; return what stands for its result."""
    target = node.target
    if is_assertion(node) or target is _ATEN.reshape.default:
        return node
    if not isinstance(target, OpOverload):
        if not _is_of_numbers(target):  # control flow
            raise _Unknown
        return node
    if target.namespace == "onnx_symbolic":  # an operator of ONNX itself
        return node
    is_off = target is _ATEN.dropout.default and argument(node, 2, "train") is False
    if target is _ATEN.contiguous.default or is_off:
        return _same(node)
    is_kept = target in translated and target not in table
    if is_kept and not (may_view(node) and is_composite(target)):
        return node
    return _decompose(node, mode, translated, table)


def _is_of_numbers(target: Any) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "math", "torch")


def _same(node: Node) -> Node:
    """Replace a call whose result has the values of its first operand."""
    given = node.args[0]
    assert isinstance(given, Node)
    if not _are_one(_value(node), _value(given)):
        node.target, node.args, node.kwargs = _ATEN.clone.default, (given,), {}
        return node
    node.replace_all_uses_with(given)
    node.graph.erase_node(node)
    return given


def _decompose(node: Node, mode: Any, translated: Collection[Any], table: Table) -> Any:
    """Replace a call by those of a decomposition."""
    inputs = node.all_input_nodes
    values = list(map(_value, inputs))
    try:
        traced = decomposed(node, values, table, mode)
        if any(map(is_writer, traced.graph.nodes)):
            with mode, enable_python_dispatcher(), torch.no_grad():
                traced = make_fx(torch.func.functionalize(traced))(*values)
    except Exception as error:
        raise _Unknown from error
    if traced.graph.find_nodes(op="get_attr"):
        raise _Unknown
    for each in traced.graph.nodes:
        is_known = each.target in translated or _is_of_numbers(each.target)
        if each.op == "call_function" and (not is_known or is_writer(each)):
            raise _Unknown
    is_one = isinstance(traced.graph.output_node().args[0], Node)
    if not is_one and any(user.target is not operator.getitem for user in node.users):
        raise _Unknown
    results = [node] if is_one else list(node.users)
    meta, of_results = node.meta, {each.name: _value(each) for each in results}
    module = node.graph.owning_module
    assert module is not None
    new, renamed = inline_graph(module, node, traced, inputs)
    known = {each.name: each for each in (*inputs, *new)}
    for each in new:
        each.meta = {**meta, **each.meta}
    for old, name in renamed:
        if known[name] not in inputs:
            known[name].meta["val"] = of_results[old]
    return known[renamed[0][1]] if is_one else node


class _Writes:
    """Replacement of the writes of a program, in place.

    A value of memory that is written to is known after each number of writes.
    """

    def __init__(self, program: ExportedProgram, translated: Collection[Any], table: Table) -> None:
        self._graph, self._known = program.graph, (translated, table)
        memory = Memory(self._graph)
        self._base = dict[Node, Node]()
        for node in self._graph.nodes:
            is_own = memory.base(node) is node or _is_copy(node)
            self._base[node] = node if is_own else self._base_of_source(node)
        writers = [node for node in self._graph.nodes if is_writer(node)]
        self._count = {self._base[_target_of(node)]: 0 for node in writers}
        self._latest = {base: (0, base) for base in self._count}
        self._source = dict[Node, Node]()  # of each view of these, what it is a view of
        if any(base.op != "call_function" for base in self._count):
            raise _Unknown

    def run(self) -> None:
        """Replace them all."""
        if not self._count:
            return
        for node in list(self._graph.nodes):
            if node.op not in ("call_function", "output"):
                continue
            base = self._base[node]
            if node is not base and base in self._count:
                self._source[node] = self._source_of(node)
            with self._graph.inserting_before(node):
                if is_writer(node):
                    self._write(node)
                    continue
                node.args, node.kwargs = map_arg((node.args, node.kwargs), self._now)
            if node in self._source:
                self._latest[node] = (self._count[base], node)

    def _base_of_source(self, node: Node) -> Node:
        source = node.args[0] if node.args else None
        return self._base[source] if isinstance(source, Node) else node

    def _source_of(self, node: Node) -> Node:
        source: Any = node.args[0]
        is_one = isinstance(source, Node) and isinstance(_value(node), Tensor)
        if not is_one or self._base.get(source) is not self._base[node]:
            raise _Unknown
        found: Node = source
        return found

    def _now(self, node: Node) -> Node:
        """Return the value of a node after all writes so far."""
        base = self._base.get(node)
        if base not in self._count:
            return node
        version, found = self._latest.get(node, (-1, node))
        if version == self._count[base]:
            return found
        source = self._source[node]
        found = self._now(source)
        if not is_writer(node) and not _are_one(_value(node), _value(source)):
            found = self._call(node.target, (found, *node.args[1:]), node.kwargs, node)
        self._latest[node] = (self._count[base], found)
        return found

    def _write(self, node: Node) -> None:
        """Replace a write by the operator without it, up to the tensor that its target is of."""
        target = _target_of(node)
        base, views = self._base[target], [target]
        while views[-1] is not base:
            views.append(self._source[views[-1]])
        before = [self._now(view) for view in views]
        args, kwargs = map_arg((node.args, node.kwargs), self._now)
        new = self._without_write(node, args, kwargs)
        self._count[base] += 1
        self._latest[node] = (self._count[base], new)
        for number, view in enumerate(views):
            self._latest[view] = (self._count[base], new)
            if view is not base:
                new = self._scattered(view, views[number + 1], before[number + 1], new)

    def _scattered(self, view: Node, whole: Node, held: Node, part: Node) -> Node:
        """Insert the values of ``whole``, which ``held`` were, with those of a view changed."""
        if is_writer(view) or _are_one(_value(view), _value(whole)):
            return part
        if view.target not in _SCATTERED:
            raise _Unknown
        found = _SCATTERED[view.target](view.args[1:], held, part)
        return self._call(*found, {}, whole)

    def _call(self, target: Any, args: Any, kwargs: Any, like: Node) -> Node:
        """Insert a call whose value is like that of another node."""
        made: Node = self._graph.call_function(target, args, kwargs)
        made.meta = dict(like.meta)
        return made

    def _without_write(self, node: Node, args: Any, kwargs: Any) -> Node:
        """Insert the operator that a write is the form in place of."""
        value, other = _value(args[0]), args[1] if len(args) > 1 else None
        if node.target is _ATEN.copy_.default and isinstance(other, Node):
            given = _value(other)
            if given.dtype == value.dtype and _sizes(given) == _sizes(value):
                return other
        schema = schema_of(node.target)
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
        twin = getattr(getattr(_ATEN, name.removesuffix("_"), None), overload, None)
        if twin is None or not name.endswith("_"):
            raise _Unknown
        made = self._call(twin, args, kwargs, args[0])
        del made.meta["val"]
        mode = _mode_of(self._graph.nodes)
        _evaluate(made, mode)
        found = _value(made)
        if found.dtype != value.dtype or _sizes(found) != _sizes(value):
            raise _Unknown
        result: Node = _settle(made, mode, *self._known)
        return result


def _finish(program: ExportedProgram) -> None:
    """Remove what nothing reads any more, and name inputs and outputs as the signature does."""
    graph = program.graph
    for given, node in zip(
        program.graph_signature.input_specs, graph.find_nodes(op="placeholder"), strict=True
    ):
        node.name = given.arg.name  # a copy of a graph has other names where Python has them
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not is_assertion(node):
            graph.erase_node(node)
    (results,) = graph.output_node().args
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(spec.arg, TensorArgument) and isinstance(result, Node):
            spec.arg = TensorArgument(name=result.name)
    views_that_may_copy(program)  # values that were in one memory are apart
    program.graph_module.recompile()


def _evaluate(node: Node, mode: Any) -> None:
    """Compute the example's value of a node that has none."""
    if node.op != "call_function" or "val" in node.meta:
        return
    operator_: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    try:
        with mode, enable_python_dispatcher(), torch.no_grad():
            node.meta["val"] = operator_(*args, **kwargs)
    except Exception as error:  # each operator has its own
        raise _Unknown from error


def _mode_of(nodes: Collection[Node]) -> Any:
    values = (node.meta.get("val") for node in nodes)
    found = next((value for value in values if hasattr(value, "fake_mode")), None)
    if found is None:
        raise _Unknown
    return found.fake_mode


def _value(node: Node) -> Any:
    try:
        return node.meta["val"]
    except KeyError:
        raise _Unknown from None


def _target_of(node: Node) -> Node:
    """Return what a write writes to, if that is its first operand alone."""
    found = written(node)
    aliases = [each.alias_info for each in schema_of(node.target).arguments]
    places = [number for number, alias in enumerate(aliases) if alias and alias.is_write]
    if found is None or places != [0]:
        raise _Unknown
    return found


def _sizes(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value.shape))


def _is_copy(node: Node) -> bool:
    """Return whether the result of an operator that may return a view is a copy here."""
    source = node.args[0] if node.args else None
    if is_writer(node) or not isinstance(source, Node):
        return False
    one, other = _value(node), _value(source)
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return are_tensors and memory_of(one) != memory_of(other)


def _are_one(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    places = [(memory_of(each), each.dtype) for each in (one, other)]
    steps = [(*each.shape, *each.stride(), each.storage_offset()) for each in (one, other)]
    return places[0] == places[1] and [*map(str, steps[0])] == [*map(str, steps[1])]


_Call = tuple[Any, tuple[Any, ...]]


# How a part is written back to the whole that it is a view of, by the operator of the view: the
# call that makes the whole, of the operator's further operands, the whole as it was and the part.
def _parts(scatter: Any) -> Callable[..., _Call]:
    return lambda further, whole, part: (scatter, (whole, part, *further))


def _turned(operator: Any) -> Callable[..., _Call]:
    return lambda further, whole, part: (operator, (part, *further))


def _permuted(further: Any, whole: Node, part: Node) -> _Call:
    order = [dim % len(further[0]) for dim in further[0]]
    return _ATEN.permute.default, (part, [order.index(dim) for dim in range(len(order))])


def _reshaped(further: Any, whole: Node, part: Node) -> _Call:
    sizes = [size if isinstance(size, int) else -1 for size in _value(whole).shape]
    if sizes.count(-1) > 1:
        raise _Unknown
    return _ATEN.reshape.default, (part, sizes)


_SCATTERED: Mapping[Any, Callable[..., _Call]] = {
    _ATEN.permute.default: _permuted,
    _ATEN.reshape.default: _reshaped,
    _ATEN.select.int: _parts(_ATEN.select_scatter.default),
    _ATEN.slice.Tensor: _parts(_ATEN.slice_scatter.default),
    _ATEN.transpose.int: _turned(_ATEN.transpose.int),
    _ATEN.unsqueeze.default: _turned(_ATEN.squeeze.dim),
    _ATEN.view.default: _reshaped,
}
