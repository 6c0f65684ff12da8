"""Construction of the small network as a graph from a capture and folded, sliced tensors.

The graph is a module whose copies and pickles keep its guards and structure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from l0prune.capture.compat import PRESERVED, pytree, size_expression
from l0prune.capture.sizes import ANY, Batches, Inputs
from l0prune.errors import warn
from l0prune.exporting.certify.dtypes import Dtypes, marked
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.infer.build import Analysis
from l0prune.infer.parts import Parts
from l0prune.infer.rewrites.literals import Sizes
from l0prune.infer.rewrites.resized import rewritten
from l0prune.plan.layout import axes_of

_ATEN = torch.ops.aten


class DenseGraph(GraphModule):
    """Captured graph that checks its inputs against the assumptions of the capture.

    The module of a torch.export program checks these in hooks, which copies lose and pickle
    refuses. Here they are nodes of the graph (``add_guards``), so that copies, pickles and new
    exports of it check the same.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the graph as fx does, with the structure of inputs and outputs and its meta."""
        warn(
            "this pickle holds a captured graph, and loads only where l0prune is installed: "
            'save("model.pt2") of the export writes a file that torch alone loads.'
        )
        flat = Graph()
        flat.output(flat.graph_copy(self.graph, {}))
        kept = (PRESERVED, *(key for key in self.meta if str(key).startswith("l0prune_")))
        meta = {key: self.meta[key] for key in kept if key in self.meta}
        return _restored, (GraphModule(self, flat), self.graph._codegen, meta, self.training)


def _restored(flat: GraphModule, codegen: CodeGen, meta: dict[str, Any], mode: bool) -> DenseGraph:
    flat.graph.set_codegen(codegen)
    module = DenseGraph(flat, flat.graph)
    module.meta.update(meta)
    for name, value in meta.get(PRESERVED, {}).items():
        setattr(module, name, value)
    module.train(mode)
    return module


def add_guards(graph: Graph, values: Iterable[Any], batches: Batches = ANY) -> None:
    """Add nodes that raise a RuntimeError on inputs that the graph was not captured for.

    ``values`` has for each placeholder the value at capture: a number, a text, None, or a (fake)
    tensor whose symbolic sizes are free. The caller has to recompile the graph's module.
    """
    inputs = graph.find_nodes(op="placeholder")
    sizes: dict[Any, Node] = {}
    with graph.inserting_before(inputs[-1].next):
        for node, value in zip(inputs, values, strict=True):
            if isinstance(value, Tensor):
                _guard_shape(graph, node, value, sizes, batches)
            else:
                _assert(graph, operator.eq, node, value, f"{node.name} has to be {value!r}")


def _guard_shape(
    graph: Graph, node: Node, value: Tensor, sizes: dict[Any, Node], batches: Batches
) -> None:
    """Add assertions on rank and sizes; dims of equal symbols must have equal sizes."""
    rank = graph.call_method("dim", (node,))
    _assert(graph, operator.eq, rank, value.ndim, f"{node.name} has to have {value.ndim} dims")
    for dim, expected in enumerate(value.shape):
        what = f"dim {dim} of {node.name} has to"
        found = graph.call_function(_ATEN.sym_size.int, (node, dim))
        if isinstance(expected, int):
            _assert(graph, operator.eq, found, expected, f"{what} measure {expected}")
            continue
        symbol = size_expression(expected)
        if symbol in sizes:
            other = sizes[symbol].args[0]
            _assert(graph, operator.eq, found, sizes[symbol], f"{what} measure what {other} does")
        elif dim == 0 and batches.least > 1:
            _assert(graph, operator.ge, found, batches.least, f"{what} measure {batches}")
            if batches.multiple > 1:
                rest = graph.call_function(operator.mod, (found, batches.multiple))
                _assert(graph, operator.eq, rest, 0, f"{what} measure {batches}")
        sizes.setdefault(symbol, found)


def _assert(
    graph: Graph, relation: Callable[[Any, Any], Any], found: Node, wanted: Any, text: str
) -> None:
    holds = graph.call_function(relation, (found, wanted))
    why = f"{text}, as when this graph was captured"
    graph.call_function(_ATEN._assert_scalar.default, (holds, why))


def dense_graphs(
    parts: Parts,
    chosen: Mapping[str, KeptSlots],
    tensors: Mapping[str, Tensor],
    dtypes: Dtypes,
    device: torch.device,
) -> dict[str, GraphModule]:
    """Return each part's captured graph at its new sizes, by path, for a model in ``dtypes``."""
    graphs = {}
    for part in parts.found:
        graph = dense_module(part.analysis, tensors, chosen[part.path].kept, device)
        targets = [str(node.target) for node in graph.graph.find_nodes(op="get_attr")]
        names = {target: part.analysis.captured.stored(target) for target in targets}
        graphs[part.path] = marked(graph, dtypes.under(names))
    return graphs


def dense_module(
    analysis: Analysis, tensors: Mapping[str, Tensor], kept: Tensor, device: torch.device
) -> DenseGraph:
    """Return the captured graph with cut tensors, rewritten shapes and guards on its inputs."""
    module = analysis.captured.program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    layouts = dict(analysis.layouts)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, name in zip(inputs, analysis.captured.inputs, strict=True):
        if name in analysis.layouts:  # its name in the module's graph may differ: input_1 for input
            layouts[node.name] = analysis.layouts[name]
    for node in module.graph.nodes:
        if node.op == "get_attr":  # placeholders with other names in the program's graph
            name = analysis.captured.stored(str(node.target))
            if name in analysis.plan.tensors:
                layouts[node.name] = analysis.plan.tensors[name]
    sizes = rewritten(module.graph, analysis, kept, layouts)
    _set_tensors(module, analysis, tensors)
    add_guards(module.graph, _captured_with(analysis, sizes), analysis.captured.batches)
    _drop_stale(module)
    small = DenseGraph(module, module.graph)  # without the hooks and methods of a program's module
    for part in small.modules():  # indices of picked positions were made on the CPU
        part._buffers = {n: None if b is None else b.to(device) for n, b in part._buffers.items()}
    small.eval()
    return small


def _captured_with(analysis: Analysis, sizes: Sizes) -> list[Any]:
    """Return the captured value of each input; fake tensors of memory inputs are cut."""
    nodes = analysis.captured.graph.find_nodes(op="placeholder")
    found = []
    for node in nodes:
        value = node.meta.get("val")
        for dim, layout in enumerate(
            sizes.dims(node) if node.name in analysis.captured.memory else ()
        ):
            value = value.narrow(dim, 0, sizes.of(layout)) if sizes.changes(layout) else value
        found += [] if node.name in analysis.captured.names else [value]
    return found


def narrowing(analysis: Analysis, kept: Tensor) -> Callable[[Inputs], Inputs]:
    """Return a function from the model's inputs to those of the small model.

    They differ only in memory inputs (a cache), which have only the slots that stay.
    """
    captured, cuts = analysis.captured, dict[int, list[tuple[int, Tensor]]]()
    for number, name in enumerate(captured.inputs):
        layouts = enumerate(analysis.layouts[name] if name in captured.memory else ())
        masks = [(dim, analysis.plan.mask(of, kept)) for dim, of in layouts if axes_of(of)]
        cuts[number] = [(dim, mask.nonzero().flatten()) for dim, mask in masks if not mask.all()]

    def narrowed(inputs: Inputs) -> Inputs:
        leaves, structure = pytree.tree_flatten(inputs)
        for number, leaf in enumerate(leaves):
            for dim, index in cuts[number]:
                leaf = leaf.index_select(dim, index.to(leaf.device))
            leaves[number] = leaf
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return args, kwargs

    return narrowed if any(cuts.values()) else lambda inputs: inputs


def _set_tensors(module: GraphModule, analysis: Analysis, tensors: Mapping[str, Tensor]) -> None:
    """Replace the tensors that the graph reads by the cut ones; tied ones stay one object."""
    made: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        target = str(node.target)
        name = analysis.captured.stored(target)
        if name not in tensors:
            continue
        path, _, leaf = target.rpartition(".")
        owner = module.get_submodule(path)
        is_parameter = name in analysis.captured.parameters
        if name not in made and is_parameter:
            made[name] = nn.Parameter(tensors[name], getattr(owner, leaf).requires_grad)
        made.setdefault(name, tensors[name])
        if is_parameter:
            setattr(owner, leaf, made[name])
        elif leaf in owner._buffers:
            owner._buffers[leaf] = made[name]
        else:  # a constant: as a buffer it follows the module to another dtype
            owner.__dict__.pop(leaf, None)
            owner.register_buffer(leaf, made[name])


def _drop_stale(module: GraphModule) -> None:
    """Remove unread nodes and tensors, and old shapes in node meta, which export would trust."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
        if name not in read:
            path, _, leaf = name.rpartition(".")
            delattr(module.get_submodule(path), leaf)
    for node in module.graph.nodes:
        if isinstance(node, Node) and node.op == "call_function":
            node.meta.pop("val", None)
