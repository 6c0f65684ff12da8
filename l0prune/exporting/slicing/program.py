"""From an analysed capture and folded, sliced tensors to a dense module and its program."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from l0prune.capture.capture import batch_shapes, widened
from l0prune.capture.hints import without_hints
from l0prune.capture.recording import Inputs
from l0prune.exporting.certify.certificate import cast
from l0prune.exporting.slicing import layernorm, standardised_weights  # noqa: F401  (register their rewrites)
from l0prune.exporting.slicing.dtypes import converted
from l0prune.exporting.slicing.literals import picked, rewrite_literals
from l0prune.exporting.slicing.sizes import Sizes
from l0prune.infer.build import Analysis
from l0prune.infer.nodes import operator_name
from l0prune.plan.layout import Both

# What the capture noted about this example's dtypes and strides; no part of the function.
KEPT_INPUTS = "kept_inputs_of_"  # how buffers are called that say which inputs are picked

_ASSERTIONS = ("aten._assert_tensor_metadata",)


def dense_module(analysis: Analysis, tensors: Mapping[str, Tensor], kept: Tensor) -> GraphModule:
    """The captured graph with cut tensors and rewritten shapes.

    Args:
        analysis: the capture of the ungated model.
        tensors: cut tensors by name.
        kept: the slots that stayed, bool, flat.
    """
    module = analysis.captured.program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    for name in ("train", "eval"):  # torch puts methods there that raise; the plain ones will do
        module.__dict__.pop(name, None)
    layouts = dict(analysis.layouts)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, name in zip(inputs, analysis.captured.inputs, strict=True):
        if name in analysis.layouts:  # the module's graph may call it otherwise: input_1 for input
            layouts[node.name] = analysis.layouts[name]
    for node in module.graph.nodes:
        if node.op == "get_attr":  # the program calls them placeholders, by other names
            name = analysis.captured.stored(str(node.target))
            if name in analysis.plan.tensors:
                layouts[node.name] = analysis.plan.tensors[name]
    sizes = Sizes(analysis.plan, kept, layouts)
    rewrite_literals(module, sizes)
    _set_tensors(module, analysis, tensors)
    _insert_gathers(module, sizes)
    _drop_stale(module)
    return module.eval()


def _set_tensors(module: GraphModule, analysis: Analysis, tensors: Mapping[str, Tensor]) -> None:
    """Put the cut tensors where the graph reads them; tied ones stay one object."""
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


def _insert_gathers(module: GraphModule, sizes: Sizes) -> None:
    """Before a Linear with gates on single columns: pick the columns that stayed."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or operator_name(node.target) != "aten.linear":
            continue
        source, weight = node.args[:2]
        columns = sizes.dims(weight)[1] if weight.name in sizes.layouts else None
        if not isinstance(columns, Both):
            continue
        fine = sizes.mask(columns)[sizes.mask(columns.base)]
        if bool(fine.all()):
            continue
        with module.graph.inserting_before(node):
            gather = picked(source, -1, fine, f"{KEPT_INPUTS}{weight.name}")
        node.replace_input_with(source, gather)


def _drop_stale(module: GraphModule) -> None:
    """Remove what nobody reads, and the old shapes and dtypes that export would believe."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and operator_name(node.target) in _ASSERTIONS:
            module.graph.erase_node(node)
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


def reexport(module: nn.Module, example: Inputs, dynamic: bool) -> tuple[ExportedProgram, bool]:
    """The dense module as a program of its own, and whether its batch is dynamic."""
    args, kwargs = widened(*example)
    shapes = partial(batch_shapes, module, args, kwargs) if dynamic else None
    return _exported(module, (args, kwargs), shapes)


def programs(
    module: nn.Module,
    dtype: torch.dtype,
    example: Inputs,
    export: Callable[[nn.Module, Inputs], tuple[ExportedProgram, bool]],
) -> tuple[ExportedProgram, ExportedProgram, bool]:
    """The module, which becomes one of ``dtype``, as a program; and one of float32, for ONNX.

    The last says whether the batch is free in both.
    """
    if dtype == torch.float32:
        single, is_free = export(module.to(dtype), cast(example, dtype))
        return single, single, is_free
    single, is_free = export(converted(module, torch.float32), cast(example, torch.float32))
    program, dynamic = export(module.to(dtype), cast(example, dtype))
    return program, single, dynamic and is_free


def reexport_part(module: nn.Module, example: Inputs) -> tuple[ExportedProgram, bool]:
    """A part as a program of its own, with every dim free that its forward leaves free.

    What a part receives has a size of the data's making: an image's, the number of proposals.
    """

    def free(leaf: Any) -> Any:
        return dict.fromkeys(range(leaf.ndim), Dim.AUTO) if isinstance(leaf, Tensor) else None

    def shapes(wide: Inputs) -> Any:
        arguments = inspect.signature(module.forward).bind(*wide[0], **wide[1]).arguments
        return {name: pytree.tree_map(free, value) for name, value in arguments.items()}

    wide = widened(*example)
    with suppress(Exception):  # one row may be all that it takes
        return _exported(module, wide, partial(shapes, wide))
    return _exported(module, example, partial(shapes, example))


def _exported(
    module: nn.Module, example: Inputs, shapes: Callable[[], Any] | None
) -> tuple[ExportedProgram, bool]:
    """The program with these dynamic shapes, or static where the module does not allow them."""
    args, kwargs = example
    with warnings.catch_warnings(), torch.no_grad(), without_hints():
        warnings.simplefilter("ignore")
        if shapes is not None:
            with suppress(Exception):  # the static shapes come next, and the result says so
                return torch.export.export(module, args, kwargs, dynamic_shapes=shapes()), True
        return torch.export.export(module, args, kwargs), False
