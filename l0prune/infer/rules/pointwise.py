"""Elementwise operators: every operand's dims are tied under broadcasting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from l0prune.infer.nodes import argument, operands, operator_name, shape_of
from l0prune.infer.registry import NotFollowed, Value, of_operand, rule
from l0prune.infer.rules.movement import source
from l0prune.infer.solver import Expr
from l0prune.plan.layout import Const

if TYPE_CHECKING:
    from l0prune.infer.inference import Inference


def pointwise(infer: Inference, node: Node) -> Value:
    """Tie the operands dim by dim, aligned at the last; a broadcast dim ties nothing."""
    shape = shape_of(node)
    if shape is None:  # torch.where of a condition alone
        raise NotFollowed("the data decide how many positions it returns")
    out: list[Expr | None] = [None] * len(shape)
    for operand in node.all_input_nodes:
        if not isinstance(infer.values.get(operand), tuple):
            continue
        dims = infer.dims(operand)
        for position, dim in enumerate(dims, start=len(shape) - len(dims)):
            if dim.size != shape[position] or dim.size == 1:
                continue
            known = out[position]
            if known is None:
                out[position] = dim
            else:
                infer.solver.unify(known, dim)
    return tuple(dim if dim is not None else Const(1) for dim in out)


@dataclass(frozen=True)
class _Operand:
    """A tensor operand of an operator.

    Attributes:
        dtype: of the tensor.
        number: the value of all its entries; None where it is unknown.
    """

    dtype: torch.dtype
    number: float | None


@dataclass(frozen=True)
class _Call:
    """A call of an operator; ``text`` tells its arguments apart, also 0 from -0 and 1 from True."""

    target: Any
    text: str
    args: Any = field(compare=False)
    kwargs: Any = field(compare=False)


def tried(node: Node, at: Mapping[Node, float]) -> float | None:
    """Run the operator on constant operands ``at`` these numbers; return its constant result.

    It runs on small tensors, with the node's settings, and random numbers for the other operands.
    So ``masked_fill(x, mask, 0)`` keeps zeros, and with a 1 it does not; a clamp to (0, 6) does, to
    (0.2, 1) gives 0.2; zero by zero is nan. A result without a finite gradient, such as the root of
    zero, is nan, too: no network learns with it. None if the result is not constant.
    """

    def operand(of: Node) -> Any:
        value = of.meta.get("val")
        return _Operand(value.dtype if isinstance(value, Tensor) else torch.float32, at.get(of))

    args, kwargs = map_arg((node.args, node.kwargs), operand)
    return _tried(_Call(node.target, f"{args}{kwargs}", args, kwargs))


@lru_cache(maxsize=4096)  # the blocks of a network make the same calls
def _tried(call: _Call) -> float | None:
    generator = torch.Generator().manual_seed(0)
    leaves: list[Tensor] = []

    def number(of: Any) -> Any:
        if not isinstance(of, _Operand):
            return of
        known = _numbers(of, generator)
        if of.number is not None and (known.is_floating_point() or known.is_complex()):
            leaves.append(known.requires_grad_())
            return known * 1  # in-place operators do not write into leaves
        return known

    try:
        # on the CPU even where the caller plans on the meta device, which has no numbers
        with torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            args, kwargs = map_aggregate((call.args, call.kwargs), number)
            result = call.target(*args, **{k: v for k, v in kwargs.items() if k != "device"})
            return _one_number(result, leaves)
    except Exception:  # an operator that does not run on these shapes is not known to keep zeros
        return None


def _one_number(result: Any, leaves: Sequence[Tensor]) -> float | None:
    """Return a result's constant value; None if it varies, nan if it or a gradient is undefined."""
    if not isinstance(result, Tensor):
        return None
    first = result.detach().flatten()[0].item()
    if not torch.equal(result, torch.full_like(result, first)):
        return None if bool(result.isfinite().all()) else nan
    if result.requires_grad:
        parts = torch.view_as_real(result) if result.is_complex() else result
        slopes = torch.autograd.grad(parts.sum(), leaves, allow_unused=True)
        if any(slope is not None and not bool(slope.isfinite().all()) for slope in slopes):
            return nan
    return first


def zero_when_tried(node: Node, operands: Sequence[bool | None]) -> bool:
    """Check, by running the operator, that zero operands make the output zero."""
    zeros = [o for o, is_zero in zip(node.all_input_nodes, operands, strict=True) if is_zero]
    return bool(zeros) and tried(node, dict.fromkeys(zeros, 0.0)) == 0


def _numbers(operand: _Operand, generator: torch.Generator) -> Tensor:
    """Return a tensor of an operand's dtype, with its number where it is known, else random."""
    drawn = torch.randn(8, 8, generator=generator) * 3
    if operand.number is not None:
        return torch.full((8, 8), operand.number, dtype=operand.dtype)
    return (drawn > 0) if operand.dtype == torch.bool else drawn.to(operand.dtype)


# Elementwise operators without torch's tag, by which others are found.
_UNTAGGED = (
    "dropout alpha_dropout feature_dropout feature_alpha_dropout multiply true_divide subtract "
    "rrelu selu relu6 celu hardswish mish silu tanhshrink softsign masked_fill where lerp "
    "logical_and logical_or logical_not clip square nan_to_num threshold"
)
rule(*(f"aten.{name}" for name in _UNTAGGED.split()), zero=zero_when_tried)(pointwise)


# The former values of the target do not matter.
rule("aten.copy_", zero=of_operand(1))(pointwise)


@rule("aten.prelu", zero=of_operand(0))
def prelu(infer: Inference, node: Node) -> Value:
    """One slope for all, or one for each channel, which is dim 1."""
    x, slope = operands(node, 2)
    dims = infer.dims(x)
    (slopes,) = infer.dims(slope) or (Const(1),)
    if slopes.size > 1:
        infer.solver.unify(dims[1], slopes)
    return dims


_LEARNED = "aten._fake_quantize_learnable_per_channel_affine"

rule("aten.fake_quantize_per_tensor_affine", zero=zero_when_tried)(pointwise)


def _on_the_grid(node: Node, operands: Sequence[bool | None]) -> bool:
    """Zero stays zero where the grid has a point there: where the zero point is a whole number.

    torch requires a whole one to be among the grid's points, and rounds a learned one.
    """
    point = node.args[2]
    value = point.meta.get("val") if isinstance(point, Node) else None
    is_whole = isinstance(value, Tensor) and not value.is_floating_point()
    learned = operator_name(node.target) == _LEARNED
    return (is_whole or learned) and operands[0] is True


@rule("aten.fake_quantize_per_channel_affine", _LEARNED, zero=_on_the_grid)
def by_channel(infer: Inference, node: Node) -> Value:
    """Per-channel fake quantization: scale and zero point share the axis of dim ``axis``."""
    axis = int(argument(node, 3, "axis"))
    dims = infer.dims(source(node))
    for grid in node.args[1:3]:
        if isinstance(grid, Node):
            infer.solver.unify(dims[axis], infer.dims(grid)[0])
    return infer.dims(source(node))
