"""Products of all gated weights of a model as one custom operator in the graph of torch.compile.

The compiler generates separate kernels for each product and for each sum of its gates' gradient. So
a compiled forward begins as an eager one: one operator multiplies all weights, another computes all
gradients, with one or a few launches of the same kernels each. The weights, and the offsets of
their gates in the multipliers, are found while the compiler traces, and put in the graph as text.

A CUDA graph may record both: the table is already on the device, no address is kept for longer than
a call, and a kernel writes the weights' addresses, which it gets as arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from l0prune.capture.compat import constant_for_compiler, filled
from l0prune.gating import products
from l0prune.gating.multiplying import LINK, GateValues
from l0prune.gating.products import Made, autocast_dtype, is_joined
from l0prune.gating.weight_tables import Line, Table, flat, line_of, parts


@cache
def table_of(lines: str, of: torch.dtype, dtype: torch.dtype, device: torch.device) -> Table:
    """Return the table of some lines; cached, since a CUDA graph may have recorded its address.

    Args:
        lines: the numbers of each, as JSON.
        of: dtype of the weights.
        dtype: of their products.
        device: of both.
    """
    found = [Line(lambda: None, (), dtype, (of,), *numbers) for numbers in json.loads(lines)]
    return Table(found, device)


def _addresses(weights: Sequence[Tensor]) -> Tensor:
    return filled([weight.data_ptr() for weight in weights], weights[0].device)


@torch.library.custom_op("l0prune::multiply", mutates_args=())
def multiply(z: Tensor, weights: Sequence[Tensor], lines: str, dtype: torch.dtype) -> Tensor:
    """Return W ∘ z of all weights, one after another.

    Shape: z flat; weights of one dtype, each as its line of ``table_of`` says.
    """
    (group,) = table_of(lines, weights[0].dtype, dtype, z.device).groups
    return group.multiply(z, _addresses(weights))


@torch.library.custom_op("l0prune::differentiate", mutates_args=())
def differentiate(
    z: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], lines: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of all weights, one after another, and that of z.

    Shape: as for ``multiply``; grads as the weights.
    """
    table = table_of(lines, weights[0].dtype, dtype, z.device)
    (group,) = table.groups
    partial = torch.empty(table.partial, dtype=z.dtype, device=z.device)
    grad = flat(grads, weights, dtype)
    return group.differentiate(z, _addresses(weights), grad, partial), table.add_up(partial, z)


@multiply.register_fake
def _(z: Tensor, weights: Sequence[Tensor], lines: str, dtype: torch.dtype) -> Tensor:
    return z.new_empty(sum(weight.numel() for weight in weights), dtype=dtype)


@differentiate.register_fake
def _(
    z: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], lines: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    count = sum(weight.numel() for weight in weights)
    return z.new_empty(count, dtype=weights[0].dtype), torch.empty_like(z)


class CompiledWeights(Function):
    """``GatedWeights`` of one dtype in a graph, by operators that are opaque to the compiler.

    The operators return all weights in one tensor: results of an operator may not share memory.
    """

    @staticmethod
    def forward(
        ctx: Any, lines: str, dtype: torch.dtype, z: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Shape: z flat, the multipliers of all layouts; each product as its weight."""
        # If backward read the strides, the compiler would make every gradient contiguous.
        ctx.lines, ctx.dtype, ctx.strides = lines, dtype, [w.stride() for w in weights]
        ctx.save_for_backward(z, *weights)
        return tuple(parts(multiply(z, weights, lines, dtype), weights, ctx.strides))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Shape: grads as the products; results as the arguments of ``forward``."""
        z, *weights = ctx.saved_tensors
        of_weights, of_z = differentiate(z, weights, grads, ctx.lines, ctx.dtype)
        return None, None, of_z, *parts(of_weights, weights, ctx.strides)


# A weight that is read: name of the tensor, shape, strides, dtype, and dtype of the product.
Form = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, torch.dtype]
# Weights that one operator multiplies: their names, their lines as text, and dtype of products.
Launch = tuple[tuple[str, ...], str, torch.dtype]


class CompiledProducts:
    """Products of the gated tensors of a model whose forward is traced.

    A new object is made whenever the offsets of multipliers may have changed.
    """

    def __init__(self, sites: Sequence[tuple[str, GateValues, int]]) -> None:
        """Store the sites, each a tensor's name, its multipliers and their dim, by tensor."""
        self._sites: dict[str, list[tuple[GateValues, int]]] = {}
        for name, values, dim in sites:
            self._sites.setdefault(name, []).append((values, dim))

    def made(self, model: nn.Module, z: Tensor) -> dict[int, Made]:
        """Return the products of a compiled forward that begins, by the ``id`` of the weight.

        Shape: z flat, the multipliers of all layouts.
        """
        if not self.act(z.device):
            return {}
        id(self)  # so that the compiler guards on this object, and recompiles for another
        weights: dict[str, Tensor] = {}
        forms: list[Form] = []
        for path, name in self.places():
            module = model.get_submodule(path)
            weight, link = module._parameters.get(name), module.__dict__.get(LINK)
            if weight is None or link is None or name in link.scales or weight.device != z.device:
                continue
            dtype = weight.dtype
            if hasattr(type(module), "_l0prune_casts") and not link.quantizes(name):
                cast = None if dtype == torch.float64 else autocast_dtype(weight.device)
                dtype = cast or dtype
            weights[f"{path}.{name}"] = weight
            forms.append((f"{path}.{name}", weight.shape, weight.stride(), weight.dtype, dtype))
        found: dict[int, Made] = {}
        for names, lines, dtype in self.launches(tuple(forms), z.device, z.dtype):
            own = [weights[name] for name in names]
            of_own = CompiledWeights.apply(lines, dtype, z, *own)
            found |= {id(w): (w, None, made) for w, made in zip(own, of_own, strict=True)}
        return found

    @constant_for_compiler
    def act(self, device: torch.device) -> bool:
        """Return whether the kernels run on the device, in no export and no distributed run."""
        return products.runs_on(device) and not (torch.compiler.is_exporting() or is_joined())

    @constant_for_compiler
    def places(self) -> tuple[tuple[str, str], ...]:
        """Return module path and attribute name of each gated tensor."""
        return tuple((path, leaf) for path, _, leaf in (n.rpartition(".") for n in self._sites))

    @constant_for_compiler
    def launches(
        self, forms: tuple[Form, ...], device: torch.device, of_z: torch.dtype
    ) -> tuple[Launch, ...]:
        """Return the weights that each operator multiplies, and move its table to the device."""
        groups: dict[tuple[torch.dtype, torch.dtype], dict[str, Line]] = {}
        for name, shape, stride, of, dtype in forms:
            like = torch.empty_strided(shape, stride, dtype=of, device="meta")
            line = line_of(like, self._sites[name.removeprefix(".")], dtype)
            if line is not None and torch.promote_types(of, of_z) == of_z:
                groups.setdefault((of, dtype), {})[name] = line
        found = []
        for (of, dtype), lines in groups.items():
            text = json.dumps([line.numbers for line in lines.values()])
            table_of(text, of, dtype, device)
            found.append((tuple(lines), text, dtype))
        return tuple(found)
