"""Conversion of models, inputs and captured graphs to one dtype, in which they run throughout.

Per-channel fake quantization has separate operators in float64, since torch's require float32
scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from l0prune.capture.compat import pytree
from l0prune.capture.copying import Model, copied
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import one_at_a_time
from l0prune.exporting.certify.lending import Borrowing, Lent, borrowed, move, settle

_OWN = "l0prune_dtypes"  # key in a graph's meta: the captured model's ``Dtypes``
CPU = torch.device("cpu")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Dtypes:
    """The floating-point dtypes of a model's tensors.

    Attributes:
        main: dtype of the first float parameter, or else of the first complex one's parts.
        others: dtypes of tensors that differ from it, by name (norms of float32 among layers of
            bfloat16, complex numbers of float32 beside layers of float64).
    """

    main: torch.dtype
    others: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Dtypes:
        """Return the dtypes of a module's tensors."""
        main = dtype_of(module)
        found = {name: tensor.dtype for name, tensor in _floats(module)}
        return cls(main, {n: dtype for n, dtype in found.items() if dtype != in_terms(dtype, main)})

    @property
    def are_one(self) -> bool:
        """True if all tensors are float32, or all float64: no file is then more precise."""
        return not self.others and self.main in (torch.float32, torch.float64)

    def under(self, names: Mapping[str, str]) -> Dtypes:
        """Dtypes for a graph, where ``names`` gives the model's name of each tensor."""
        others = {n: self.others[name] for n, name in names.items() if name in self.others}
        return replace(self, others=others)

    def below(self, path: str) -> Dtypes:
        """Dtypes for the submodule at ``path``, by tensor names relative to it."""
        start = f"{path}." if path else ""
        inside = {name: dtype for name, dtype in self.others.items() if name.startswith(start)}
        others = {name.removeprefix(start): dtype for name, dtype in inside.items()}
        return replace(self, others=others)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Dtype of the first parameter of floats, or else of the parts of the first complex one."""
    dtypes = [parameter.dtype for parameter in module.parameters()]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    floats += [dtype.to_real() for dtype in dtypes if dtype.is_complex]
    return next(iter(floats), torch.float32)


def in_terms(dtype: torch.dtype, of: torch.dtype) -> torch.dtype:
    """Return the counterpart of ``dtype`` in a model of float dtype ``of``; integers keep theirs.

    Half precision has complex64 as its complex dtype: torch's operators take no smaller one.
    """
    if dtype.is_complex:
        return torch.complex128 if of == torch.float64 else torch.complex64
    return of if dtype.is_floating_point else dtype


def _floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield float and complex parameters and buffers, under each of their names."""
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        if tensor.is_floating_point() or tensor.is_complex():
            yield name, tensor


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def marked(graph: GraphModule, dtypes: Dtypes) -> GraphModule:
    """Record the dtypes of the graph's model in its meta, and return the graph."""
    graph.meta[_OWN] = dtypes
    return graph


def lifted(to: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """Return the replacement of each float and complex dtype that is less precise than ``to``."""
    most = torch.finfo(to).bits
    found = {dtype: to for dtype in _FLOATS if torch.finfo(dtype).bits < most}
    # bfloat16 has no complex numbers, and those of float16 are float32's in torch's operators
    pairs = {dtype.to_complex(): to.to_complex() for dtype in found if dtype != torch.bfloat16}
    return found | pairs


def converted(model: Model, dtype: torch.dtype) -> Model:
    """Return a copy in ``dtype``, its graphs included.

    A capture records ``x.dtype`` as a constant.
    """
    return follow(copied(model), dtype)


def follow(module: Model, dtype: torch.dtype) -> Model:
    """Convert the module and the dtypes in its graphs to ``dtype``, in place.

    Casts in graphs to less precise dtypes (as under autocast) become casts to ``dtype``.
    """
    for graph in _graphs(module):
        old = graph.meta[_OWN].main
        _replace(graph, lifted(dtype) | _instead(old, dtype) | _limits(old, dtype))
        marked(graph, Dtypes(dtype))
    return _moved(module, dtype)


def _moved(module: Model, dtype: torch.dtype) -> Model:
    """Convert in place like ``module.to(dtype)``, but keep imaginary parts of complex tensors."""
    if any(isinstance(p, Lent) and p.dtype != dtype for p in module.parameters()):
        settle(module, dtype)
    module._apply(lambda tensor: tensor.to(in_terms(tensor.dtype, dtype)))
    return module


def placed(module: Model, device: torch.device) -> Model:
    """Move the module and the devices in its graphs to ``device``, in place."""
    tensors = (*module.parameters(), *module.buffers())
    others = {tensor.device for tensor in tensors} - {device}
    if others:
        for graph in _graphs(module):
            _replace(graph, dict.fromkeys(others, device))
        move(module, device)
        module.to(device)
    return module


def restored(module: Model, dtypes: Dtypes, twin: nn.Module | None = None) -> Model:
    """Convert the module back to its model's dtypes, in place; names are its own or its graphs'.

    Each tensor is rounded once. For ``twin`` see ``settle``.
    """
    others = dict(dtypes.others)
    for path, part in module.named_modules():
        if isinstance(part, GraphModule) and _OWN in part.meta:
            own = part.meta[_OWN].others  # type: ignore[index, union-attr]
            others |= {f"{path}.{name}" if path else name: dtype for name, dtype in own.items()}
    exact = {
        name: tensor.detach().to(others[name], copy=True)  # a lent tensor has no memory
        for name, tensor in _floats(module)
        if name in others
    }
    settle(module, dtypes.main, twin)
    _moved(module, dtypes.main)
    for name, tensor in exact.items():
        path, _, leaf = name.rpartition(".")
        getattr(module.get_submodule(path), leaf).data = tensor
    return module


def asks_for_less(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether the module has tensors or graph casts of less precision than ``dtype``."""
    less = lifted(dtype)
    casts = any(casts_to_less(graph, dtype) for graph in _graphs(module))
    return casts or any(tensor.dtype in less for _, tensor in _floats(module))


def casts_to_less(graph: GraphModule, dtype: torch.dtype) -> bool:
    """Return whether the graph names a dtype less precise than ``dtype``."""
    less = lifted(dtype)
    return any(found in less for found in _dtypes_in(graph))


def _graphs(module: nn.Module) -> list[GraphModule]:
    parts = module.modules()
    return [part for part in parts if isinstance(part, GraphModule) and _OWN in part.meta]


def _dtypes_in(graph: GraphModule) -> Iterator[torch.dtype]:
    for node in graph.graph.nodes:
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, torch.dtype):
                yield leaf


def cast(inputs: Inputs, dtype: torch.dtype | None, device: torch.device = CPU) -> Inputs:
    """Copy the inputs, since a forward may write into them, with floats in ``dtype``.

    With None they keep their dtypes.
    """

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, in_terms(leaf.dtype, dtype) if dtype else None, copy=True)

    args, kwargs = pytree.tree_map(to, inputs)
    return args, kwargs


def _instead(old: torch.dtype, new: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """Return the replacements of ``old`` and its complex dtype; bfloat16 has none."""
    if torch.bfloat16 in (old, new):
        return {old: new}
    return {old: new, old.to_complex(): new.to_complex()}


def _limits(old: torch.dtype, new: torch.dtype) -> dict[float, float]:
    """Return the replacements of ±max of ``old``, if ``new`` has a smaller range.

    A mask's fill value (``torch.finfo(x.dtype).min``) is a number in the graph.
    """
    most, limit = torch.finfo(old).max, torch.finfo(new).max
    return {most: limit, -most: -limit} if most > limit else {}


def _replace(graph: GraphModule, others: Mapping[Any, Any]) -> None:
    """Replace these dtypes, limits (floats) or devices in the arguments of the graph's nodes."""

    def other(leaf: Any) -> Any:
        is_named = type(leaf) in (torch.dtype, torch.device, float)
        return others.get(leaf, leaf) if is_named else leaf

    for node in graph.graph.nodes:
        node.args = map_aggregate(node.args, other)
        node.kwargs = map_aggregate(node.kwargs, other)
    graph.recompile()


def lent(model: Model, dtype: torch.dtype | None = None) -> Model:
    """Return a temporary copy that computes in ``dtype``, or in the model's dtypes.

    It reads the model's parameters without a copy; its writes go to private copies.
    """
    loans = {id(p): loan for p in model.parameters() if (loan := borrowed(p, dtype)) is not None}
    result = copied(model, loans)
    return result if dtype is None else follow(result, dtype)


_ATEN = torch.ops.aten


def in_float64(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's replacement for float64, or the operator itself."""
    return _INSTEAD.get(operator, operator)


def _with_mask(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """``scale·(clamp(q) − zero_point)`` with ``q`` the nearest level, and the mask of q in range.

    As in torch, an integer zero point is added after rounding, a float one before.
    """
    shape = [-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)]
    scale, zero_point = scale.view(shape), zero_point.view(shape)
    steps = x * scale.reciprocal()
    is_whole = not zero_point.is_floating_point()
    level = steps.round() + zero_point if is_whole else (steps + zero_point).round()
    return (level.clamp(low, high) - zero_point) * scale, (level >= low) & (level <= high)


def _learned(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int, *_: Any
) -> Tensor:
    """Fake-quantize per channel with a learned float zero point, rounded to a level."""
    rounded = zero_point.round().clamp(low, high).long()
    return _with_mask(x, scale, rounded, axis, low, high)[0]


def _grouped(x: Tensor, weight: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """Multiply the rows of each group by its matrix: ``(rows, in)``, ``(groups, in, out)``, ends.

    torch has no such product in float64. Rows after the last end belong to no group and give 0.
    """
    result = x.new_zeros(x.shape[0], weight.shape[-1])
    start = 0
    for matrix, end in zip(weight, offsets.tolist(), strict=True):
        result[start:end] = x[start:end] @ matrix
        start = end
    return result


_INSTEAD: dict[Any, Callable[..., Any]] = {
    _ATEN._grouped_mm.default: _grouped,
    _ATEN.fake_quantize_per_channel_affine_cachemask.default: _with_mask,
    _ATEN._fake_quantize_learnable_per_channel_affine.default: _learned,
}


class InOneDtype(Borrowing):
    """Context in which operators that are given a less precise float dtype use this one.

    Many networks cast inside: to float32 before a norm, to bfloat16 under ``torch.autocast``. The
    rounding of those casts would hide an error of the cut in a comparison; and with weights in
    this dtype, an operator would get inputs of two dtypes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype`` is float64 or float32."""
        super().__init__()
        self._dtype = dtype
        self._lifted = lifted(dtype)

    def __enter__(self) -> InOneDtype:
        """Set the default dtype (of ``torch.ones(8)``) to this one, too, if that is less precise.

        The default dtype is a setting of the process, so that threads take turns.
        """
        self._turn = one_at_a_time()
        self._turn.__enter__()
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(self._lifted.get(self._default, self._default))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Put the default dtype back."""
        super().__exit__(*error)
        torch.set_default_dtype(self._default)
        self._turn.__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, or its float64 one, with a less precise ``dtype`` argument replaced."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in self._lifted:
            kwargs["dtype"] = self._lifted[kwargs["dtype"]]
        operator = in_float64(func) if self._dtype == torch.float64 else func
        return super().__torch_dispatch__(operator, types, args, kwargs)
