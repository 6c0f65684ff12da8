"""ONNX operators in torch that keep computations on shapes as numbers.

A value is a tensor, or a numpy array of sizes and constants (``Host``), whose entries may be
symbolic sizes of torch.export. Other operators are converted by onnx2pytorch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Host = np.ndarray[Any, Any]
Value = Any  # a tensor, a Host, or None for an input that is left out
Attributes = Mapping[str, Any]
Operator = Callable[..., Value]

LARGEST_HOST = 64  # entries; an array with more is no list of sizes
OPERATORS: dict[str, Operator] = {}
"""Functions of the attributes and the values, by ONNX's name of the operator."""


def host(value: Any) -> Host:
    """Return a number, a list or an array as an array of sizes."""
    if isinstance(value, np.ndarray):
        return value
    return np.array(value, dtype=None if isinstance(value, bool | int | float) else object)


def _kind(wanted: Any, *, is_wider: bool = False) -> torch.dtype:
    """Return the torch dtype of one of the file's: float64 for float32 where all runs in it.

    Arrays of sizes, which may be symbols, are objects.
    """
    numbers_of = np.int64 if np.dtype(wanted).hasobject else wanted
    kind = torch.from_numpy(np.zeros(0, numbers_of)).dtype
    is_wider |= torch.get_default_dtype() == torch.float64
    return torch.float64 if kind == torch.float32 and is_wider else kind


def tensor(value: Value, like: Tensor | None = None) -> Value:
    """Convert a Host to a tensor, with floats in the dtype of ``like``; return others unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    kind = _kind(value.dtype)
    if kind.is_floating_point and like is not None and like.is_floating_point():
        kind = like.dtype
    return torch.tensor(value.tolist(), dtype=kind, device=None if like is None else like.device)


def numbers(value: Value) -> list[Any]:
    """Return the entries of a list of sizes.

    Raises:
        NotImplementedError: the sizes depend on values of a tensor.
    """
    if isinstance(value, Tensor):
        raise NotImplementedError("a size that depends on the values of a tensor")
    return [each.item() if isinstance(each, np.generic) else each for each in host(value).ravel()]


def _operator(*names: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def _elementwise(on_tensors: Operator, on_hosts: Operator) -> Operator:
    """Return a broadcasting elementwise operator for two or more values."""

    def apply(_: Attributes, *values: Value) -> Value:
        if all(isinstance(value, np.ndarray) for value in values):
            return host(reduce(on_hosts, values))
        like = next(value for value in values if isinstance(value, Tensor))
        return reduce(on_tensors, (_operand(value, like) for value in values))

    return apply


def _operand(value: Value, like: Tensor) -> Value:
    """Return a Host as an operand for torch: a number if it has one entry, else a tensor."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= like.ndim:
        (number,) = numbers(value)
        return number
    return tensor(value, like)


def _quotient(a: Value, b: Value) -> Value:
    has_float = any(torch.is_floating_point(x) for x in (a, b) if isinstance(x, Tensor))
    if has_float or any(isinstance(x, float) for x in (a, b)):
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


def _host_quotient(a: Host, b: Host) -> Host:
    kinds = {a.dtype.kind, b.dtype.kind}
    if "f" in kinds:
        return np.divide(a, b)
    quotient = np.floor_divide(a, b)
    if "O" in kinds:  # free sizes, which are not negative
        return quotient
    return np.where((quotient < 0) & (quotient * b != a), quotient + 1, quotient)  # towards zero


def _extreme(function: Operator, clamp: str) -> Operator:
    def apply(a: Value, b: Value) -> Value:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return function(a, b)
        of, number = (a, b) if isinstance(a, Tensor) else (b, a)
        return torch.clamp(of, **{clamp: number})

    return apply


_TWO: dict[str, tuple[Operator, Operator]] = {
    "Add": (operator.add, operator.add),
    "Sub": (operator.sub, operator.sub),
    "Mul": (operator.mul, operator.mul),
    "Div": (_quotient, _host_quotient),
    "Mod": (operator.mod, operator.mod),
    "Pow": (operator.pow, operator.pow),
    "Equal": (operator.eq, operator.eq),
    "Greater": (operator.gt, operator.gt),
    "GreaterOrEqual": (operator.ge, operator.ge),
    "Less": (operator.lt, operator.lt),
    "LessOrEqual": (operator.le, operator.le),
    "And": (torch.logical_and, np.logical_and),
    "Or": (torch.logical_or, np.logical_or),
    "Sum": (operator.add, operator.add),
    "Max": (_extreme(torch.maximum, "min"), np.maximum),
    "Min": (_extreme(torch.minimum, "max"), np.minimum),
}
OPERATORS.update({name: _elementwise(*pair) for name, pair in _TWO.items()})


def _either(on_tensors: Operator, on_hosts: Operator) -> Operator:
    def apply(_: Attributes, x: Value) -> Value:
        return host(on_hosts(x)) if isinstance(x, np.ndarray) else on_tensors(x)

    return apply


_ONE: dict[str, tuple[Operator, Operator]] = {
    "Identity": (lambda x: x, lambda x: x),
    "Neg": (torch.neg, operator.neg),
    "Not": (torch.logical_not, np.logical_not),
    "Floor": (torch.floor, np.floor),
    "Ceil": (torch.ceil, np.ceil),
    "Sqrt": (torch.sqrt, np.sqrt),
    "Size": (lambda x: host(x.numel()), lambda x: x.size),
}
OPERATORS.update({name: _either(*pair) for name, pair in _ONE.items()})


@_operator("Dropout")
def _dropout(_: Attributes, x: Value, *__: Value) -> Value:
    return x


@_operator("Shape")
def _shape(given: Attributes, x: Value) -> Value:
    return host(list(x.shape))[given.get("start", 0) : given.get("end")]


@_operator("Cast")
def _cast(given: Attributes, x: Value) -> Value:
    import onnx

    wanted = onnx.helper.tensor_dtype_to_np_dtype(given["to"])
    if isinstance(x, np.ndarray):
        is_free = any(isinstance(each, torch.SymInt) for each in x.ravel())
        return x if is_free else x.astype(wanted)
    return x.to(_kind(wanted, is_wider=x.dtype == torch.float64))


@_operator("Concat")
def _concat(given: Attributes, *values: Value) -> Value:
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(values, given["axis"])
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.cat([tensor(value, like) for value in values], given["axis"])


@_operator("Gather")
def _gather(given: Attributes, x: Value, index: Value) -> Value:
    axis = given.get("axis", 0)
    if isinstance(x, np.ndarray) and isinstance(index, np.ndarray):
        return host(np.take(x, index.astype(np.int64), axis))
    x = tensor(x)
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return x.select(axis, numbers(index)[0])
    index = tensor(index, x)
    if axis == 0 and x.ndim == 2:
        return F.embedding(index, x)
    index = torch.where(index < 0, index + x.shape[axis], index)
    axis %= x.ndim
    found = x.index_select(axis, index.reshape(-1))
    return found.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@_operator("Slice")
def _slice(
    given: Attributes,
    x: Value,
    starts: Value = None,
    ends: Value = None,
    axes: Value = None,
    steps: Value = None,
) -> Value:
    first = numbers(given["starts"] if starts is None else starts)
    last = numbers(given["ends"] if ends is None else ends)
    dims = given.get("axes", range(len(first))) if axes is None else numbers(axes)
    strides = [1] * len(first) if steps is None else numbers(steps)
    index: list[Any] = [slice(None)] * x.ndim
    for start, end, dim, stride in zip(first, last, dims, strides, strict=True):
        if stride < 0 and isinstance(x, Tensor):
            if stride != -1 or start not in (-1, x.shape[dim] - 1) or end > -x.shape[dim]:
                raise NotImplementedError("a slice backwards that is not of the whole axis")
            x = x.flip(dim)
        else:
            index[dim] = slice(start, None if _is_end(end, stride) else end, stride)
    return x[tuple(index)]


def _is_end(end: Any, stride: int) -> bool:
    """Return whether a slice's end is a sentinel for the end of the dim: as a number, it would be
    the largest size of a free dim.
    """
    return isinstance(end, int) and (end >= _ENDS if stride > 0 else end <= -_ENDS)


_ENDS = 10**9  # exporters of TensorFlow write this, others the largest int32 or int64


@_operator("Reshape")
def _reshape(given: Attributes, x: Value, shape: Value = None) -> Value:
    sizes = numbers(given["shape"] if shape is None else shape)
    if not given.get("allowzero"):
        sizes = [x.shape[n] if _is(size, 0) else size for n, size in enumerate(sizes)]
    return x.reshape(sizes)


def _is(size: Any, number: int) -> bool:
    """Return whether a size is this number; False for a symbolic size, which gets no guard."""
    return isinstance(size, int) and size == number


@_operator("Expand")
def _expand(_: Attributes, x: Value, shape: Value) -> Value:
    sizes = numbers(shape)
    if isinstance(x, np.ndarray):
        if _are_few(sizes):
            return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(sizes)))
        if x.size == 1:
            return _filled([1] * (x.ndim - len(sizes)) + sizes, x)
        x = tensor(x)
    sizes = [1] * (x.ndim - len(sizes)) + sizes
    own = len(sizes) - x.ndim
    kept = [-1 if n >= own and _is(size, 1) else size for n, size in enumerate(sizes)]
    return x.expand(kept)


@_operator("Unsqueeze")
def _unsqueeze(given: Attributes, x: Value, axes: Value = None) -> Value:
    dims = numbers(given["axes"] if axes is None else axes)
    rank = x.ndim + len(dims)
    places = sorted(dim % rank for dim in dims)
    if isinstance(x, np.ndarray):
        return np.expand_dims(x, tuple(places))
    return reduce(torch.unsqueeze, places, x)


@_operator("Squeeze")
def _squeeze(given: Attributes, x: Value, axes: Value = None) -> Value:
    dims = given.get("axes") if axes is None else numbers(axes)
    if dims is None:
        dims = [dim for dim, size in enumerate(x.shape) if size == 1]
    places = tuple(dim % x.ndim for dim in dims)
    return np.squeeze(x, places) if isinstance(x, np.ndarray) else x.squeeze(places)


@_operator("Split")
def _split(given: Attributes, x: Value, sizes: Value = None) -> Value:
    axis = given.get("axis", 0)
    known = given.get("split") if sizes is None else numbers(sizes)
    if known is None:
        parts = given["outputs"]
        each = -(-x.shape[axis] // parts)
        known = [each] * (parts - 1) + [x.shape[axis] - each * (parts - 1)]
    if isinstance(x, np.ndarray):
        return tuple(np.split(x, np.cumsum(known)[:-1], axis))
    return torch.split(x, known, axis)


@_operator("Transpose")
def _transpose(given: Attributes, x: Value) -> Value:
    dims = given.get("perm", range(x.ndim)[::-1])
    return x.transpose(dims) if isinstance(x, np.ndarray) else x.permute(*dims)


@_operator("Flatten")
def _flatten(given: Attributes, x: Value) -> Value:
    axis = given.get("axis", 1) % (x.ndim + 1)
    if axis == 1:
        return x.flatten(1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@_operator("Where")
def _where(_: Attributes, condition: Value, a: Value, b: Value) -> Value:
    given = (condition, a, b)
    if all(isinstance(each, np.ndarray) for each in given):
        return np.where(condition.astype(bool), a, b)
    like = next(each for each in (a, b, condition) if isinstance(each, Tensor))
    return torch.where(tensor(condition, like), _operand(a, like), _operand(b, like))


@_operator("Clip")
def _clip(given: Attributes, x: Value, low: Value = None, high: Value = None) -> Value:
    like = tensor(x)
    least = given.get("min") if low is None else _operand(low, like)
    most = given.get("max") if high is None else _operand(high, like)
    return torch.clamp(like, least, most)


@_operator("MatMul")
def _matmul(_: Attributes, a: Value, b: Value) -> Value:
    return torch.matmul(tensor(a), tensor(b))


@_operator("Gemm")
def _gemm(given: Attributes, a: Value, b: Value, c: Value = None) -> Value:
    a, b = (a.t() if given.get("transA") else a), (b.t() if given.get("transB") else b)
    product = given.get("alpha", 1.0) * torch.matmul(a, b)
    return product if c is None else product + given.get("beta", 1.0) * tensor(c, a)


@_operator("Tile")
def _tile(_: Attributes, x: Value, repeats: Value) -> Value:
    times = numbers(repeats)
    return np.tile(x, times) if isinstance(x, np.ndarray) else x.repeat(*times)


@_operator("ConstantOfShape")
def _constant_of_shape(given: Attributes, shape: Value) -> Value:
    sizes = numbers(shape)
    value = given.get("value", np.zeros(1, np.float32))
    return np.full(sizes, value.item(), value.dtype) if _are_few(sizes) else _filled(sizes, value)


def _are_few(sizes: list[Any]) -> bool:
    """Return whether an array of these sizes may be a Host: none is a symbol."""
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= LARGEST_HOST


def _filled(sizes: list[Any], value: Host) -> Tensor:
    """Return a tensor of these sizes filled with an array's only entry."""
    return torch.full(sizes, value.item(), dtype=_kind(value.dtype))


@_operator("Range")
def _range(_: Attributes, start: Value, limit: Value, delta: Value) -> Value:
    (first,), (end,), (step,) = map(numbers, (start, limit, delta))
    return torch.arange(first, end, step)


def _product(x: Tensor, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    for each in sorted(dim, reverse=True):
        x = x.prod(each, keepdim)
    return x


_REDUCTIONS: dict[str, tuple[Operator, Operator]] = {
    "ReduceMean": (torch.mean, np.mean),
    "ReduceSum": (torch.sum, np.sum),
    "ReduceMax": (torch.amax, np.max),
    "ReduceMin": (torch.amin, np.min),
    "ReduceProd": (_product, np.prod),
    "ReduceL1": (
        partial(torch.linalg.vector_norm, ord=1),
        lambda x, axis, keepdims: np.sum(np.abs(x), axis, keepdims=keepdims),
    ),
    "ReduceL2": (
        torch.linalg.vector_norm,
        lambda x, axis, keepdims: np.sqrt(np.sum(x**2, axis, keepdims=keepdims)).astype(x.dtype),
    ),
    "ReduceLogSumExp": (torch.logsumexp, np.logaddexp.reduce),
    "ReduceSumSquare": (
        lambda x, dim, keepdim: x.square().sum(dim, keepdim),
        lambda x, axis, keepdims: np.sum(x**2, axis, keepdims=keepdims),
    ),
}


def _reduction(on_tensors: Operator, on_hosts: Operator) -> Operator:
    def apply(given: Attributes, x: Value, axes: Value = None) -> Value:
        named = given.get("axes") if axes is None else numbers(axes)
        if not named and given.get("noop_with_empty_axes"):
            return x
        dims, keeps = tuple(d % x.ndim for d in named or range(x.ndim)), given.get("keepdims", 1)
        if isinstance(x, np.ndarray):
            return host(on_hosts(x, axis=dims, keepdims=bool(keeps)))
        return on_tensors(x, dim=dims, keepdim=bool(keeps))

    return apply


OPERATORS.update({name: _reduction(*pair) for name, pair in _REDUCTIONS.items()})
