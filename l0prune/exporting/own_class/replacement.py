"""Replacement of a model's parts by captured graphs, and programs of a model of its own class."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from l0prune.capture.compat import drop_from_state, on_copy, pytree
from l0prune.capture.sizes import ALL_FIXED, ANY, FreeSizes, Inputs
from l0prune.exporting.certify.dtypes import (
    Dtypes,
    cast,
    casts_to_less,
    converted,
    in_terms,
    marked,
    restored,
)
from l0prune.exporting.certify.inputs import with_free_batch
from l0prune.exporting.slicing.program import Exported, reexport
from l0prune.infer.dataflow import drop_unneeded
from l0prune.infer.decomposition import take_apart

_KEPT = "l0prune_modules"  # key in a graph's meta: ``_Kept`` by path in the graph


@dataclass(frozen=True)
class _Kept:
    """Facts about a replaced module that the code around its graph may read.

    Attributes:
        kind: the module's class.
        children: names of its direct submodules, in their order.
        attributes: its plain data.
    """

    kind: type[nn.Module]
    children: tuple[str, ...]
    attributes: dict[str, Any]


def replace_part(model: nn.Module, path: str, graph: GraphModule) -> None:
    """Replace the submodule at ``path`` by the graph wherever the model holds it, in place.

    Code around it still finds the submodule's plain attributes (``self.backbone.out_channels``) on
    the graph, and the modules inside it (``self.layers[0].attn.batch_first``).
    """
    part = model.get_submodule(path)
    graph.meta[_KEPT] = {
        inner: _Kept(type(module), tuple(module._modules), _data_of(module))
        for inner, module in part.named_modules(remove_duplicate=False)
    }
    _put_on(graph)
    on_copy(graph, _put_on)  # fx builds a copy from what the graph reads alone
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is part:
            model.set_submodule(name, graph)


def _put_on(graph: GraphModule) -> None:
    """Give the graph's modules the classes, children and attributes of its meta, in place."""
    for path, kept in graph.meta[_KEPT].items():
        module = graph.get_submodule(path)
        for name in kept.children:
            child = module._modules.pop(name, None)  # added again to restore the order
            module.add_module(name, nn.Module() if child is None else child)
        for name, value in kept.attributes.items():
            if not hasattr(module, name):
                setattr(module, name, value)
        if module is not graph:
            with suppress(TypeError):  # __class__ cannot be set to every class
                module.__class__ = kept.kind


def _data_of(module: nn.Module) -> dict[str, Any]:
    """Return the user's public attributes of the module and its class, without code and modules."""
    own = [kind for kind in type(module).__mro__ if not issubclass(nn.Module, kind)]
    every: dict[str, Any] = {}
    for kind in reversed(own):
        every |= vars(kind)
    every |= vars(module)
    return {n: value for n, value in every.items() if not n.startswith("_") and _is_data(value)}


def _is_data(value: Any) -> bool:
    code = (nn.Module, property, classmethod, staticmethod)
    leaves = pytree.tree_leaves(value)
    return not any(callable(leaf) or isinstance(leaf, code) for leaf in leaves)


def class_programs(
    module: nn.Module, dtypes: Dtypes, example: Inputs, free: FreeSizes = ALL_FIXED
) -> tuple[Exported, ExportedProgram]:
    """Export the module, with a free batch size if possible, and once more in float32 for ONNX.

    The latter is in float32 throughout: its graph is converted, where the code names other dtypes.
    Its weights are the module's before rounding; afterwards the module is in the model's dtypes.

    Raises:
        CaptureError: torch.export cannot follow it.
    """
    single = torch.float32
    exact = {} if dtypes.are_one else _in(single, module.state_dict())
    module = module if dtypes.are_one else restored(module, dtypes)
    made = _program_of(module, cast(example, None if dtypes.others else dtypes.main), free)
    if dtypes == Dtypes(single) and not casts_to_less(made.program.graph_module, single):
        return made, made.program
    graph = converted(marked(made.program.module(check_guards=False), dtypes), single)
    held = graph.state_dict()
    graph.load_state_dict({name: exact.get(name, tensor) for name, tensor in held.items()})
    for_onnx = reexport(
        graph, cast(example, single), made.dynamic, made.batches, free.only(made.free)
    )
    is_free, others = made.dynamic and for_onnx.dynamic, made.free & for_onnx.free
    return made._replace(dynamic=is_free, free=others), for_onnx.program


def _in(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors, those of floats in ``dtype``."""
    return {n: t.detach().to(in_terms(t.dtype, dtype), copy=True) for n, t in tensors.items()}


def _program_of(module: nn.Module, example: Inputs, free: FreeSizes) -> Exported:
    captured = with_free_batch(module, example, free)
    if captured.dynamic and captured.batches != ANY:
        return reexport(module, example, True, captured.batches, free.only(captured.free))
    drop_unneeded(captured.graph)
    take_apart(captured.program)
    _drop_unread(captured.program)
    free_ones, why_fixed = captured.free, captured.why_fixed
    return Exported(captured.program, captured.dynamic, free=free_ones, why_fixed=why_fixed)


def _drop_unread(program: ExportedProgram) -> None:
    """Remove parameters that no operator reads, such as those of a head for training only."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        node = nodes[spec.arg.name]
        if spec.kind == InputKind.PARAMETER and not node.users:
            specs.remove(spec)
            program.graph.erase_node(node)
            drop_from_state(program, str(spec.target))
    program.graph_module.recompile()
