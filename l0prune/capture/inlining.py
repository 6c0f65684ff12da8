"""Inlining of graph parts that run under a mode or a transform.

torch.export wraps code under ``torch.autocast`` or ``torch.set_grad_enabled`` into a separate
graph, behind one opaque operator. A captured graph runs in neither mode. With the casts of
autocast written out, the inner operators compute the same when inlined, where rules see them.

A captured graph has ``torch.vmap`` and ``torch.func.jvp`` as calls that begin and end them, and in
between operators whose tensors lack a dim, or carry a tangent. Traced again, such a part becomes
operators on whole tensors, which is what torch itself runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from l0prune.capture.compat import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    pytree,
)
from l0prune.capture.example_inputs import tensors_in
from l0prune.capture.provenance import origin_of
from l0prune.errors import CaptureError

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Autocast:
    """Autocast settings of a part of a forward: device type, dtype, and whether it is enabled."""

    device: str
    dtype: torch.dtype | None
    enabled: bool

    def context(self) -> torch.autocast:
        """Return the context manager with these settings."""
        return torch.autocast(self.device, self.dtype, self.enabled)


def write_casts(module: GraphModule, autocast: Autocast) -> bool:
    """Insert autocast's casts into the graph as nodes; return whether they explain all dtypes.

    Each operator is run on fake tensors with autocast and without. Operands that are cast only
    with autocast get a cast node; then the operator must give the captured dtypes without it.
    """
    return all(
        _write(module, node, autocast)
        for node in list(module.graph.nodes)
        if node.op == "call_function" and isinstance(node.target, OpOverload)
    )


@torch.no_grad()
def _write(module: GraphModule, node: Node, autocast: Autocast) -> bool:
    values: dict[Node, Any] = {n: n.meta.get("val") for n in node.all_input_nodes}
    fake = next((value for value in values.values() if isinstance(value, FakeTensor)), None)
    if fake is None:
        return True
    off = replace(autocast, enabled=False)
    with fake.fake_mode:
        casts, usual = _run(node, values, autocast)[1], dict[Node, torch.dtype]()
        result: Any = None
        with suppress(RuntimeError):  # without autocast it may not take operands of these dtypes
            result, usual = _run(node, values, off)
        to = {operand: dtype for operand, dtype in casts.items() if usual.get(operand) != dtype}
        cast = {n: value.to(to[n]) if n in to else value for n, value in values.items()}
        if to:
            result, _ = _run(node, cast, off)
        if _dtypes(result) != _dtypes(node.meta["val"]):
            return False
    for operand, dtype in to.items():
        with module.graph.inserting_before(node):
            new = module.graph.call_function(_ATEN.to.dtype, (operand, dtype))
        new.meta = origin_of(node) | {"val": cast[operand]}
        node.replace_input_with(operand, new)
    return True


def _run(
    node: Node, values: Mapping[Node, Any], autocast: Autocast
) -> tuple[Any, dict[Node, torch.dtype]]:
    """Return the operator's result, and the dtypes that its operands are cast to."""
    args, kwargs = pytree.tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
    operands = {id(value): operand for operand, value in values.items()}
    with _Casts() as casts, autocast.context():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return result, {operands[k]: dtype for k, dtype in casts.seen.items() if k in operands}


def _dtypes(result: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(result)]


class _Casts(TorchDispatchMode):
    """Mode that records the dtype to which each tensor is cast, by the tensor's id."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.dtype] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record a cast, and run the operator."""
        kwargs = kwargs or {}
        if func is _ATEN._to_copy.default and kwargs.get("dtype") is not None:
            self.seen[id(args[0])] = kwargs["dtype"]
        return func(*args, **kwargs)


_HIGHER = torch.ops.higher_order


def inline_modes(program: ExportedProgram) -> None:
    """Inline every subgraph of the program that computes the same without its mode."""
    changed = _inline_all(program.graph_module, None)
    for old, new in changed:
        program.graph_signature.replace_all_uses(old, new)


def _inline_all(module: GraphModule, autocast: Autocast | None) -> list[tuple[str, str]]:
    """Inline subgraphs of a graph under this autocast; return old and new names of results."""
    renamed: list[tuple[str, str]] = []
    for node in list(module.graph.nodes):
        found = _inner(module, node, autocast)
        if found is None:
            continue
        inner, operands, its_own = found
        is_written = its_own is None or not its_own.enabled or write_casts(inner, its_own)
        _inline_all(inner, its_own)
        if is_written and not any(n.op == "get_attr" for n in inner.graph.nodes):
            renamed += inline_graph(module, node, inner, operands)[1]
    if renamed:
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        module.graph.lint()
        module.recompile()
    return renamed


def finish(program: ExportedProgram, renamed: Sequence[tuple[str, str]]) -> None:
    """Make a program consistent again after parts of its graph were inlined.

    ``renamed`` holds old and new names of results; empty if nothing was inlined.
    """
    module = program.graph_module
    if renamed:
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    for old, new in renamed:
        program.graph_signature.replace_all_uses(old, new)


def _inner(
    module: GraphModule, node: Node, autocast: Autocast | None
) -> tuple[GraphModule, tuple[Any, ...], Autocast | None] | None:
    """Return the subgraph that the node wraps, its operands and its autocast; None for others."""
    if node.op != "call_function":
        return None
    if node.target is _HIGHER.wrap_with_autocast:
        device, dtype, enabled, _, graph, *operands = node.args
        autocast = Autocast(device, dtype, enabled)  # type: ignore[arg-type]
    elif node.target is _HIGHER.wrap_with_set_grad_enabled:
        _, graph, *operands = node.args
    else:
        return None
    inner = getattr(module, str(graph.target)) if isinstance(graph, Node) else None
    tuples = all(u.target is operator.getitem for u in node.users)
    if isinstance(inner, GraphModule) and tuples:
        return inner, tuple(operands), autocast
    return None


def inline_graph(
    module: GraphModule, node: Node, inner: GraphModule, operands: Sequence[Any]
) -> tuple[list[Node], list[tuple[str, str]]]:
    """Replace ``node``, which calls the inner graph, by the nodes of that graph.

    Returns:
        The new nodes, and the old and new names of the results.
    """
    inputs = inner.graph.find_nodes(op="placeholder")
    new: dict[Node, Any] = dict(zip(inputs, operands, strict=True))
    taken = {each.name for each in module.graph.nodes}  # torch.export renames behind fx's back
    results: Any = None
    with module.graph.inserting_before(node):
        for each in inner.graph.nodes:
            if each.op == "output":
                results = pytree.tree_map_only(Node, lambda old: new[old], each.args[0])
            elif each.op != "placeholder":
                new[each] = module.graph.node_copy(each, lambda old: new[old])
                while new[each].name in taken:
                    new[each]._rename(f"{new[each].name}_1")
                taken.add(new[each].name)
    if isinstance(results, Node):
        replaced = [(node, results)]
    else:
        replaced = [(user, results[int(user.args[1])]) for user in node.users]  # type: ignore[arg-type]
    renamed = []
    for old, result in replaced:
        old.replace_all_uses_with(result)
        renamed.append((old.name, result.name))
    for old in dict.fromkeys([*node.users, node]):
        module.graph.erase_node(old)
    return [n for key, n in new.items() if key.op != "placeholder"], renamed


def decomposed(
    node: Node, values: Sequence[Any], recipes: Mapping[Any, Any], mode: AbstractContextManager[Any]
) -> GraphModule:
    """Return a call as a graph over its input nodes, with operators replaced by these recipes.

    Args:
        node: the call.
        values: of its ``all_input_nodes``.
        recipes: decompositions, by operator.
        mode: of the fake values.

    Raises:
        Exception: torch cannot trace it.
    """

    def call(*given: Any) -> Any:
        known = dict(zip(node.all_input_nodes, given, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with mode, enable_python_dispatcher(), torch.no_grad():
        return make_fx(call, dict(recipes))(*values)


def inline_transforms(program: ExportedProgram) -> None:
    """Replace each part under transforms of torch.func by equivalent operators.

    A part that torch cannot trace stays as it is.

    Raises:
        CaptureError: torch.export has lost what a transform computes.
    """
    _check_constants(program)
    module = program.graph_module
    renamed = [pair for part in list(_parts(module.graph)) for pair in _written_out(module, part)]
    finish(program, renamed)


LOST_GRADIENT = (
    "torch.export does not follow a gradient that a forward takes of itself (torch.func.grad or "
    "vjp). Give l0prune the submodules before and after it."
)


def _check_constants(program: ExportedProgram) -> None:
    """Refuse a program with a torch.func tensor among its constants: a lost gradient."""
    for constant in program.constants.values():
        try:
            if isinstance(constant, Tensor) and constant.layout is torch.strided:
                constant.untyped_storage()
        except NotImplementedError as error:
            raise CaptureError(LOST_GRADIENT) from error


def _parts(graph: Graph) -> Iterator[list[Node]]:
    """Yield the nodes of each outermost transform, from its begin call to its end call."""
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
    """Replace one part in the module's graph; return the old and new names of its results."""
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
    new, renamed = inline_graph(module, call, traced, operands)
    for node in new:
        node.meta |= origin
    return [(old, to) for old, (_, to) in zip(names, renamed, strict=True)]


def _traced(part: list[Node], operands: list[Node], ends: list[Node]) -> GraphModule | None:
    """Return the part as a graph of operators on whole tensors; None if torch cannot trace it."""
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
            traced = make_fx(GraphModule({}, graph), tracing_mode="symbolic")(*values)
    except Exception:  # a use of the transform that torch cannot trace
        return None
    return None if any(node.op == "get_attr" for node in traced.graph.nodes) else traced
