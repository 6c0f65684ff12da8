"""Choice of gates under which an export can be of the model's own class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from torch import nn

from l0prune.errors import UsageError
from l0prune.plan.layout import Both, Layout, axes_of
from l0prune.plan.plan import Plan

KeepClass = bool | Literal["native"]


def for_class(plan: Plan, model: nn.Module, keep_class: KeepClass) -> Plan:
    """The plan with no other axes, and none kept alike, than this asks for.

    Raises:
        UsageError: ``keep_class`` is something else.
    """
    if keep_class is True:
        return plan
    if keep_class is False:
        return replace(plan, alike=())
    if keep_class != "native":
        raise UsageError(f"keep_class must be True, False or 'native', not {keep_class!r}")
    left_out = {axis for dim in _not_native(plan, model) for axis in axes_of(dim)}
    return plan.select({axis.name for i, axis in enumerate(plan.axes) if i not in left_out})


def _not_native(plan: Plan, model: nn.Module) -> Iterator[Layout]:
    """Dims that a layer of torch, or the user's code, has to have whole."""
    for path, dims in plan.code.averages.items():
        if isinstance(model.get_submodule(path), nn.LayerNorm | nn.GroupNorm):
            yield from dims
    for reused in plan.code.reused:
        yield from (dim for dim in (reused.read, reused.used) if dim is not None)
    for path, calls in plan.code.calls.items():
        has_epsilon = any("eps" in name for name in vars(model.get_submodule(path)))
        for call in calls:
            is_mean = call.name == "mean" and not has_epsilon
            if is_mean or call.name in ("layer_norm", "scaled_dot_product_attention"):
                yield from (dim for dim in call.sizes if dim is not None)
    for name, dims in plan.tensors.items():
        yield from (dim.fine for dim in dims if isinstance(dim, Both))
        path = name.rpartition(".")[0].removesuffix(".out_proj")
        if isinstance(model.get_submodule(path), nn.MultiheadAttention):
            yield from dims
