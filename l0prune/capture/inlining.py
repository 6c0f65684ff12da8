"""Parts of a forward that run under a mode of their own, put back in line with the rest.

torch.export wraps what a forward does under ``torch.autocast`` or ``torch.set_grad_enabled`` into
a graph of its own, behind one opaque operator. A captured graph runs in neither mode. With the
casts of autocast written out, the inner operators mean the same in line, where rules see them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from l0prune.capture.autocast import Autocast, write_casts

_HIGHER = torch.ops.higher_order


def inline_modes(program: ExportedProgram) -> None:
    """Inline every part of the program's graph that says all it does without its mode."""
    changed = _inline_all(program.graph_module, None)
    for old, new in changed:
        program.graph_signature.replace_all_uses(old, new)


def _inline_all(module: GraphModule, autocast: Autocast | None) -> list[tuple[str, str]]:
    """Inline what can be of a graph under this autocast; the old and new names of all results."""
    renamed: list[tuple[str, str]] = []
    for node in list(module.graph.nodes):
        found = _inner(module, node, autocast)
        if found is None:
            continue
        inner, operands, its_own = found
        is_written = its_own is None or not its_own.enabled or write_casts(inner, its_own)
        _inline_all(inner, its_own)
        if is_written and not any(n.op == "get_attr" for n in inner.graph.nodes):
            renamed += put_in_line(module, node, inner, operands)[1]
    if renamed:
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        module.graph.lint()
        module.recompile()
    return renamed


def finish(program: ExportedProgram, renamed: Sequence[tuple[str, str]]) -> None:
    """Make a program consistent again after parts of its graph were put in line.

    Args:
        program: changed in place.
        renamed: the old and new names of results; none if nothing was put in line.
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
    """The inner graph, its operands, and the autocast it is under, if the node wraps one."""
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


def put_in_line(
    module: GraphModule, node: Node, inner: GraphModule, operands: Sequence[Any]
) -> tuple[list[Node], list[tuple[str, str]]]:
    """Put the inner graph where ``node`` is, which calls it.

    Args:
        module: whose graph the node is in; to be linted and recompiled when all is done.
        node: with one result, or with several that its users pick by number.
        inner: without tensors of its own.
        operands: one for each input of the inner graph.

    Returns:
        The nodes that are new, and the old and new names of the results.
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
