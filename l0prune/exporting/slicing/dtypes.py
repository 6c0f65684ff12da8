"""Copies of models and inputs in another dtype, with captured graphs that ask for that one, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from l0prune.capture.copying import Model, copied
from l0prune.capture.recording import Inputs

_OWN = "l0prune_dtype"  # in a graph's meta: what stands in it for the model's own dtype


def dtype_of(module: nn.Module) -> torch.dtype:
    """That of its first parameter of floats."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def marked(module: GraphModule, dtype: torch.dtype) -> GraphModule:
    """The graph of a model of this dtype, which knows it from here on."""
    module.meta[_OWN] = dtype
    return module


def converted(model: Model, dtype: torch.dtype) -> Model:
    """A copy on the CPU, in ``dtype``.

    A capture writes down as a constant what the code calls ``x.dtype``.
    """
    return follow(copied(model), dtype)


def follow(module: Model, dtype: torch.dtype) -> Model:
    """The module itself, moved to the CPU and into ``dtype`` with all that its graphs ask for."""
    for part in module.modules():
        if isinstance(part, GraphModule) and part.meta.get(_OWN, dtype) != dtype:
            _replace(part, part.meta[_OWN], dtype)
            marked(part, dtype)
    return module.to("cpu", dtype)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Copies of the inputs, as a forward may write into them, on the CPU; floats in ``dtype``."""

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("cpu", dtype if leaf.is_floating_point() else None, copy=True)

    args, kwargs = pytree.tree_map(to, inputs)
    return args, kwargs


def _replace(module: GraphModule, old: torch.dtype, new: torch.dtype) -> None:
    """Ask for ``new`` where the graph asks for ``old``, also for its limits where they are less.

    What hides something (``torch.finfo(x.dtype).min``) is a number in the graph.
    """
    most, limit = torch.finfo(old).max, torch.finfo(new).max
    limits = {most: limit, -most: -limit} if most > limit else {}
    dtypes = {old: new}
    if torch.bfloat16 not in (old, new):  # which has no complex numbers
        dtypes[old.to_complex()] = new.to_complex()

    def other(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return dtypes.get(leaf, leaf)
        return limits.get(leaf, leaf) if type(leaf) is float else leaf

    for node in module.graph.nodes:
        node.args = map_aggregate(node.args, other)
        node.kwargs = map_aggregate(node.kwargs, other)
    module.recompile()
