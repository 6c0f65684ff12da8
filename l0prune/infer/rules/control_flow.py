"""Control flow: conditions and loops, whose operands stay whole and whose work is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node
from torch.utils.flop_counter import FlopCounterMode

from l0prune.capture.compat import pytree
from l0prune.infer.nodes import called, hint, operator_name, shape_of
from l0prune.infer.registry import Value, rule

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference

# The argument whose first dim is the number of turns.
_TURNS = {"scan": 2, "associative_scan": 1, "map_impl": 1}


@rule("cond", "while_loop", "scan", "associative_scan", "map_impl")
def control_flow(infer: Inference, node: Node) -> Value:
    """Pin the operands, and record the work of the turns."""
    why = f"operator {called(node)} is control flow: what it takes stays whole"
    for operand in node.all_input_nodes:
        infer.pin_all(operand, why)
    infer.work(node, (), times=_macs_inside(node))
    return infer.opaque(node, f"a result of operator {called(node)}, control flow")


def _macs_inside(node: Node) -> float:
    """Multiply-accumulates of a call: of the costlier branch, of each turn whose number is known.

    A ``while_loop`` counts one turn.
    """
    name = operator_name(node.target)
    bodies = [
        _macs_of(getattr(node.graph.owning_module, str(operand.target)))
        for operand in node.all_input_nodes
        if operand.op == "get_attr"
    ]
    turns = 1
    if name in _TURNS:
        first = next(iter(pytree.tree_leaves(node.args[_TURNS[name]])), None)
        shape = shape_of(first) if isinstance(first, Node) else None
        turns = shape[0] if shape else 1
    return turns * (max(bodies, default=0.0) if name == "cond" else sum(bodies))


def _macs_of(body: GraphModule) -> float:
    """Multiply-accumulates of a body, as torch counts its operators."""
    macs = 0.0
    for node in body.graph.nodes:
        if node.op != "call_function":
            continue
        if any(operand.op == "get_attr" for operand in node.all_input_nodes):
            macs += _macs_inside(node)
            continue
        args, kwargs = pytree.tree_map(_value, (node.args, node.kwargs))
        with FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)
        macs += hint(counter.get_total_flops()) / 2
    return macs


def _value(argument: Any) -> Any:
    """The tensor without data that stands for a node's value; other arguments as they are."""
    return argument.meta["val"] if isinstance(argument, Node) else argument
