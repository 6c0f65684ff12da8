"""Operators that contract a weight, each as products of matrices: rows of inputs times the weight.

A product is ``out = x @ W + b`` with x of shape (groups, rows, features), W (groups, features,
outputs) and out (groups, rows, outputs). A row of a convolution is a patch of its input, and its
features are channels times places of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Product:
    """One call of an operator that contracts a weight.

    Attributes:
        weight: position of the weight among the arguments.
        bias: position of the bias; None where the operator takes none.
        inputs: function from the arguments, and the wanted rows (None for all), to x.
        outputs: function from the result, and the rows, to out.
        matrix: function from the weight, or a tensor of its shape, to W.
        unmatrix: the inverse of ``matrix``.
        form: equal for products that make the same matrix of the same weight.
        is_shared: whether the weight is one matrix that is expanded to all examples of a batch,
            whose rows are those of one group.
    """

    weight: int
    bias: int | None
    inputs: Callable[[Sequence[Any], Tensor | None], Tensor]
    outputs: Callable[[Tensor, Tensor | None], Tensor]
    matrix: Callable[[Tensor], Tensor]
    unmatrix: Callable[[Tensor], Tensor]
    form: tuple[Any, ...]
    is_shared: bool = False

    def read(self, args: Sequence[Any]) -> Tensor:
        """Return the weight that the product reads, once where it is shared."""
        found: Tensor = args[self.weight]
        return found[:1] if self.is_shared else found


_FIRST = {  # position of the first factor among the arguments
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}


def product_of(
    operator: Any, args: Sequence[Any], is_weight: Callable[[Any], bool]
) -> Product | None:
    """Return how a call of an ATen operator multiplies with a weight; None where it does not."""
    if operator in _FIRST:
        at = _FIRST[operator]
        left, right = args[at], args[at + 1]
        if is_weight(left) == is_weight(right):
            return None
        return _matmul(args, at, is_left=is_weight(left))
    if operator == aten.convolution.default and is_weight(args[1]) and not is_weight(args[0]):
        return _convolution(args)
    return None


def by_channel(rows: Tensor, places: int) -> Tensor:
    """Return a row of channels for each place of a kernel or a flatten.

    Shape: rows (groups, rows, channels · places), result (groups, rows · places, channels).
    """
    split: Tensor = rows.unflatten(2, (-1, places))
    return split.mT.flatten(1, 2)


def _matmul(args: Sequence[Any], at: int, *, is_left: bool) -> Product:
    weight, other = (at, at + 1) if is_left else (at + 1, at)
    read: Tensor = args[weight]
    is_shared = read.dim() == 3 and len(read) > 1 and not read.stride(0)

    def grouped(matrix: Tensor) -> Tensor:
        matrix = matrix.mT if is_left else matrix
        return matrix if matrix.dim() == 3 else matrix[None]

    def rows(matrix: Tensor, wanted: Tensor | None) -> Tensor:
        found = grouped(matrix)
        found = found.flatten(0, 1)[None] if is_shared else found
        return found if wanted is None else found[:, wanted]

    def unmatrix(matrix: Tensor) -> Tensor:
        return matrix.mT if is_left else matrix

    return Product(
        weight=weight,
        bias=0 if at and not is_left else None,
        inputs=lambda args, wanted: rows(args[other], wanted),
        outputs=rows,
        matrix=grouped,
        unmatrix=unmatrix,
        form=("matmul", is_left),
        is_shared=is_shared,
    )


def _convolution(args: Sequence[Any]) -> Product:
    weight, groups, is_transposed = args[1], args[8], args[6]
    kernel = tuple(weight.shape[2:])

    def inputs(given: Sequence[Any], wanted: Tensor | None) -> Tensor:
        found = _stuffed(given) if is_transposed else _padded(given)
        stride = [1] * len(kernel) if is_transposed else given[3]
        return _patches(found, kernel, stride, given[5], groups, wanted)

    def outputs(out: Tensor, wanted: Tensor | None) -> Tensor:
        split: Tensor
        # (batch, groups · o, places) → (groups, batch · places, o)
        split = out.flatten(2).unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        return split if wanted is None else split[:, wanted]

    def matrix(tensor: Tensor) -> Tensor:
        split: Tensor
        if is_transposed:  # (groups · i, o, kernel)
            split = tensor.unflatten(0, (groups, -1)).flip(tuple(range(3, tensor.dim() + 1)))
            split = split.flatten(3).permute(0, 1, 3, 2).flatten(1, 2)
            return split
        split = tensor.unflatten(0, (groups, -1)).flatten(2).mT
        return split

    def unmatrix(matrix: Tensor) -> Tensor:
        split: Tensor
        if is_transposed:
            split = matrix.unflatten(1, (-1, prod(kernel))).permute(0, 1, 3, 2)
            split = split.unflatten(3, kernel)
            split = split.flip(tuple(range(3, split.dim()))).flatten(0, 1)
            return split
        split = matrix.mT.unflatten(2, (-1, *kernel)).flatten(0, 1)
        return split

    return Product(1, 2, inputs, outputs, matrix, unmatrix, ("convolution", groups, is_transposed))


def _padded(args: Sequence[Any]) -> Tensor:
    x, padding = args[0], args[4]
    return F.pad(x, [p for each in reversed(padding) for p in (each, each)])


def _stuffed(args: Sequence[Any]) -> Tensor:
    """Return the input as the equivalent plain convolution reads it: zeros between and around."""
    x, weight, _, stride, padding, dilation, _, more, _ = args
    sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    wide[(..., *(slice(None, None, step) for step in stride))] = x
    around = []
    for size, pad, dil, extra in zip(weight.shape[2:], padding, dilation, more, strict=True):
        around.append((dil * (size - 1) - pad, dil * (size - 1) - pad + extra))
    return F.pad(wide, [p for each in reversed(around) for p in each])


def _patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    wanted: Tensor | None,
) -> Tensor:
    """Return the patches of a padded input, shape (groups, rows, channels · kernel)."""
    for dim, (size, step, dil) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(dim, dil * (size - 1) + 1, step)[..., ::dil]
    dims = len(kernel)
    x = x.unflatten(1, (groups, -1))  # batch, groups, channels, places, kernel
    places = range(3, 3 + dims)
    x = x.permute(1, 0, *places, 2, *range(3 + dims, 3 + 2 * dims))
    if wanted is None:
        return x.flatten(1, 1 + dims).flatten(2)
    index = torch.unravel_index(wanted, x.shape[1 : 2 + dims])
    some: Tensor = x[(slice(None), *index)]  # type: ignore[index]
    return some.flatten(2)
