"""Places of a captured graph at which one value carries all results so far.

A network can exit early there: later steps need that value and no other. So the ends of the
blocks of a residual network are places, and values within its blocks are not, since the shortcut
bypasses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.fx import Node

from l0prune.capture.capture import Captured
from l0prune.capture.provenance import is_within, modules_of, without_call
from l0prune.infer.dataflow import macs_of
from l0prune.infer.inference import Inference
from l0prune.infer.nodes import shape_of
from l0prune.infer.solver import variables


@dataclass(frozen=True)
class Place:
    """One value that carries all results so far, and that modules return.

    Attributes:
        paths: of these modules, the outermost first.
        share: the share of the network's MACs up to the value.
        shape: of the value.
        dim: the dim that holds its channels.
        ends_block: whether one of the modules is a block of several layers, of a kind that occurs
            more than once.
    """

    paths: tuple[str, ...]
    share: float
    shape: tuple[int, ...]
    dim: int
    ends_block: bool = False


def places(model: nn.Module, captured: Captured) -> tuple[Place, ...]:
    """Return the places of a model, in the order of its forward.

    Args:
        model: the model that was captured as a whole.
        captured: its graph.
    """
    infer = Inference(captured)
    infer.run()
    macs, outputs = macs_of(infer), _outputs(captured)
    total = sum(macs.values()) or 1.0
    last_read, computed = _last_reads(captured), _computed(infer)
    done, needed_until, found = 0.0, -1, []
    for number, node in enumerate(captured.graph.nodes):
        done += macs.get(node, 0.0)
        if node in outputs and node in computed and needed_until <= number:
            shape = shape_of(node)
            if shape is not None and len(shape) > 1:
                found.append(Place(outputs[node], done / total, tuple(shape), _dim(infer, node)))
        if node in computed:
            needed_until = max(needed_until, last_read[node])
    return tuple(_with_blocks(model, found))


def _last_reads(captured: Captured) -> dict[Node, int]:
    """Return for each node the number of the last node that reads its value."""
    order = {node: number for number, node in enumerate(captured.graph.nodes)}
    return {node: max((order[user] for user in node.users), default=-1) for node in order}


def _computed(infer: Inference) -> set[Node]:
    """Return the values that depend on both inputs and stored tensors, unlike masks."""
    found: set[Node] = set()
    of_inputs, of_stored = set[Node](), set[Node]()
    for node in infer.captured.graph.nodes:
        above = node.all_input_nodes
        if node.name in infer.captured.inputs or any(each in of_inputs for each in above):
            of_inputs.add(node)
        if node.name in infer.captured.names or any(each in of_stored for each in above):
            of_stored.add(node)
        is_value = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
        if is_value and node in of_inputs and node in of_stored:
            found.add(node)
    return found


def _outputs(captured: Captured) -> dict[Node, tuple[str, ...]]:
    """Return for each node the paths of the modules of which it is the only output."""
    nodes = [node for node in captured.graph.nodes if node.op == "call_function"]
    inside: dict[str, list[Node]] = {}
    for node in nodes:
        for path in modules_of(node):
            inside.setdefault(path, []).append(node)
    again = {without_call(path) for path in inside if "@" in path}
    found: dict[Node, tuple[str, ...]] = {}
    for path, of in inside.items():
        own = set(of)
        leaving = [node for node in of if any(user not in own for user in node.users)]
        if path and "@" not in path and path not in again and len(leaving) == 1:
            found[leaving[0]] = (*found.get(leaving[0], ()), path)
    return found


def _dim(infer: Inference, node: Node) -> int:
    """Return the dim that holds channels: the one with slots, else the usual one."""
    dims = infer.dims(node)
    slots = [number for number, dim in enumerate(dims) if any(True for _ in variables(dim))]
    if len(slots) == 1 and slots[0] > 0:
        return slots[0]
    return 1 if len(dims) > 3 else len(dims) - 1


def _with_blocks(model: nn.Module, found: list[Place]) -> Iterator[Place]:
    """Yield the places, with ``ends_block`` set where a repeated block ends.

    Repeated parts within such a block, such as a pair of layers, are not blocks themselves.
    """
    kinds = {
        path: kind_of_block(model.get_submodule(path)) for place in found for path in place.paths
    }
    counts: Mapping[Hashable, int] = Counter(kinds.values())
    repeated = {path for path, kind in kinds.items() if kind is not None and counts[kind] > 1}
    around = {path for path in repeated if type(model.get_submodule(path)) is not nn.Sequential}
    blocks = {
        path
        for path in repeated
        if not any(path != each and is_within(path, each) for each in around)
    }
    for place in found:
        yield replace(place, ends_block=not blocks.isdisjoint(place.paths))


def kind_of_block(module: nn.Module) -> Hashable:
    """Return a key that repeated blocks have in common; None for a single layer."""
    children = tuple(type(child) for child in module.children())
    if not children:
        return None
    return (type(module), children if isinstance(module, nn.Sequential) else ())
