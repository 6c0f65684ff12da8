"""Folding of gates into weights, and slicing of every stored tensor by its layout.

A ``Place`` cuts one tensor and makes it whole again. Subnormal results of a fold become zero: a
subnormal operand may cost a CPU more than a hundred cycles instead of one. Training leaves many,
since weights without a gradient decay by a constant factor a step. Zero instead of a subnormal
changes a sum by less than 1.2e-38 times the other operand, which is far within rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from l0prune.exporting.certify.dtypes import in_terms
from l0prune.exporting.certify.lending import folded
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.infer.parts import Part, Parts
from l0prune.infer.rewrites.statistics import standardised_weights
from l0prune.plan.layout import Layout, Layouts, axes_of
from l0prune.plan.plan import Plan, Site
from l0prune.progress.stages import stage

SMALLEST = torch.finfo(torch.float32).smallest_normal
_SMALLEST_OF_DOUBLE = torch.finfo(torch.float64).smallest_normal


def flush(tensor: Tensor, dtype: torch.dtype) -> None:
    """Set values to zero, in place, that would be subnormal after rounding to ``dtype``.

    float32's bound is used for bfloat16, too, which has the same, and for float16, which CPUs
    convert to float32 for computation: its subnormal numbers are normal there.

    Args:
        tensor: of float64 or complex128; one of another dtype is not changed.
        dtype: to which it will be rounded.
    """
    if tensor.is_complex():
        flush(torch.view_as_real(tensor), dtype.to_real())
    elif tensor.is_floating_point():
        bound = _SMALLEST_OF_DOUBLE if dtype == torch.float64 else SMALLEST
        tensor.masked_fill_(tensor.abs() < bound, 0)


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Place:
    """Shape, strides and remaining positions of a tensor of the model that is cut.

    Gradient, moments and averages of a tensor have the same strides as the tensor: fused optimizers
    require that.

    Attributes:
        shape: of the whole tensor.
        stride: of the whole tensor.
        left: for each dim the remaining positions, or None for all.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    left: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, tensor: Tensor, left: tuple[Tensor | None, ...]) -> Place:
        """Make the place of a whole tensor with these remaining positions."""
        dense = torch.empty_like(tensor, device="meta", requires_grad=False)
        return cls(tensor.shape, dense.stride(), left)

    @property
    def small(self) -> torch.Size:
        """The shape of the cut tensor."""
        pairs = zip(self.shape, self.left, strict=True)
        return torch.Size(size if left is None else len(left) for size, left in pairs)

    @cached_property
    def small_stride(self) -> tuple[int, ...]:
        """The strides of a tensor of shape ``small`` in the whole tensor's memory format."""
        for memory in (torch.contiguous_format, _FORMATS.get(len(self.shape))):
            if memory and _strides(self.shape, memory) == self.stride:
                return _strides(self.small, memory)
        order = sorted(range(len(self.shape)), key=lambda dim: self.stride[dim])
        found, step = dict.fromkeys(order, 1), 1
        for dim in order:
            found[dim], step = step, step * max(1, self.small[dim])
        return tuple(found[dim] for dim in range(len(order)))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the remaining positions of a tensor of the whole shape."""
        result = tensor
        for dim, left in enumerate(self.left):
            if left is not None:
                result = result.index_select(dim, left.to(tensor.device))
        return _laid_out(result, self.small_stride)

    def put(self, small: Tensor, whole: Tensor | None = None) -> Tensor:
        """Return a copy of ``whole`` (default: zeros) with ``small`` at the remaining positions."""
        copy = small.new_empty_strided(self.shape, self.stride)
        copy = copy.zero_() if whole is None else copy.copy_(whole)
        return _put(self.left, 0, small, copy)


def _strides(shape: torch.Size, memory: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory).stride()


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the tensor with these strides; sparse tensors, which have none, unchanged."""
    if tensor.layout != torch.strided or tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _put(left: Sequence[Tensor | None], dim: int, small: Tensor, whole: Tensor) -> Tensor:
    """Write ``small`` into ``whole`` at the positions ``left``, from ``dim`` on, in place."""
    while dim < len(left) and left[dim] is None:
        dim += 1
    if dim == len(left):
        return whole.copy_(small)
    positions = left[dim]
    assert positions is not None
    positions = positions.to(whole.device)
    inner = _put(left, dim + 1, small, whole.index_select(dim, positions))
    return whole.index_copy_(dim, positions, inner)


@stage("folding gates into the tensors, and cutting these")
def cut_tensors(
    plain: nn.Module, parts: Parts, chosen: Mapping[str, KeptSlots]
) -> dict[str, Tensor]:
    """Fold and cut every stored tensor that the parts use; return them in float64, by name."""
    tensors: dict[str, Tensor] = {}
    for part in parts.found:
        tensors |= _of_part(plain, part, chosen[part.path])
    return tensors


@stage("folding gates into the tensors, and cutting these")
def cut_by_plan(plain: nn.Module, chosen: KeptSlots) -> dict[str, Tensor] | None:
    """Cut the tensors of a model that was captured whole, by the plan of its gates.

    None if its tensors have other shapes than in the plan. A weight that the forward standardises
    is cut as stored: for the model's own class that is wrong, and its comparison shows it.
    """
    stored = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name in chosen.plan.tensors.keys() - stored.keys():
        constant = stored_in(plain, name)
        if constant is not None:  # else the forward computes it, and so will the class
            stored[name] = constant
    fits = all(
        name not in stored or [dim.size for dim in dims] == list(stored[name].shape)
        for name, dims in chosen.plan.tensors.items()
    )
    return _cut(chosen, stored, {}) if fits else None


def _of_part(plain: nn.Module, part: Part, chosen: KeptSlots) -> dict[str, Tensor]:
    captured = part.analysis.captured
    stored = {captured.stored(name): value for name, value in captured.program.constants.items()}
    stored |= {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    return _cut(chosen, stored, standardised_weights(part.analysis, chosen.kept))


@torch.no_grad()
def _cut(
    chosen: KeptSlots,
    stored: Mapping[str, Tensor],
    standardise: Mapping[str, Callable[[Tensor], Tensor]],
) -> dict[str, Tensor]:
    """Cut tensors and fold their gates in float64; parameters are folded when they are read.

    A standardised weight is folded first, for statistics of the whole weight. Subnormal values are
    flushed in tensors that are no divisors: parameters, gated tensors and those with a role.
    """
    plan = chosen.plan
    sites: dict[str, list[Site]] = defaultdict(list)
    for site in plan.sites:
        sites[site.tensor].append(site)
    tensors = {}
    for name, tensor in stored.items():
        if name in plan.tensors:
            own = tensor.detach()
            left = [_index(plan, layout, chosen.kept) for layout in plan.tensors[name]]
            place = Place.of(own, tuple(left))
            if name in standardise:
                by = _factors(plan, sites[name], chosen.z, [None] * own.ndim, own)
                whole = _folded(doubled(own), by, None)
                tensors[name] = place.cut(standardise[name](whole))
                flush(tensors[name], tensor.dtype)
                continue
            part, by = place.cut(own), _factors(plan, sites[name], chosen.z, left, own)
            flushes = isinstance(tensor, nn.Parameter) or bool(by) or name in plan.roles
            make = partial(_folded, by=by, flushes=own.dtype if flushes else None)
            if type(tensor) is nn.Parameter and own.is_floating_point():
                tensors[name] = folded(part.clone() if part is own else part, make)
            else:
                tensors[name] = make(doubled(part))
    return tensors


def _folded(wide: Tensor, by: Sequence[Tensor], flushes: torch.dtype | None) -> Tensor:
    """Multiply a float64 or complex128 tensor by its gates in place, flush it, and return it."""
    for factor in by:
        wide *= factor.to(wide.device)
    if flushes is not None:
        flush(wide, flushes)
    return wide


def _factors(
    plan: Plan,
    sites: Iterable[Site],
    z: Tensor,
    left: Sequence[Tensor | None],
    tensor: Tensor,
) -> list[Tensor]:
    """Return the gates of remaining positions, broadcastable to the tensor, without all-1 sites."""
    found = []
    for site in sites:
        factor, positions = plan.spread(site.layout, z), left[site.dim]
        factor = factor if positions is None else factor[positions]
        if not bool((factor == 1).all()):
            shape = [-1 if dim == site.dim else 1 for dim in range(tensor.ndim)]
            found.append(factor.view(shape).to(tensor.device))
    return found


def stored_in(model: nn.Module, name: str) -> Tensor | None:
    """Return the parameter, buffer or plain tensor attribute of this name; None if missing."""
    path, _, leaf = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), leaf)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def under_all_names(
    plain: nn.Module, plan: Plan, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the model's state_dict with cut tensors under all of their keys, others uncut."""
    names = {key: plan.aliases.get(key, key) for key in plain.state_dict()}
    return {key: tensors.get(names[key], old) for key, old in plain.state_dict().items()}


def cut_state(
    plain: nn.Module, plan: Plan, tensors: Mapping[str, Tensor], held: Container[str]
) -> dict[str, Tensor]:
    """Return the model's state_dict at the new sizes, in its dtypes, as copies on the CPU.

    Those of the ``held`` names are on the meta device.
    """
    cut_ones, found = under_all_names(plain, plan, tensors), {}
    for key, old in plain.state_dict().items():
        if key in held or plan.aliases.get(key, key) in held:
            found[key] = torch.empty(cut_ones[key].shape, dtype=old.dtype, device="meta")
        else:
            found[key] = cut_ones[key].to("cpu", old.dtype, copy=True)
    return found


def doubled(tensor: Tensor) -> Tensor:
    """Return a copy in float64; in complex128 if complex, in its own dtype if of integers."""
    return tensor.to(in_terms(tensor.dtype, torch.float64), copy=True)


def cut(plan: Plan, dims: Layouts, tensor: Tensor, kept: Tensor) -> Tensor:
    """Slice the slots that are not kept out of each dim of a tensor."""
    for dim, layout in enumerate(dims):
        index = _index(plan, layout, kept)
        if index is not None:
            tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


def _index(plan: Plan, layout: Layout, kept: Tensor) -> Tensor | None:
    """Return the positions of a dim that stay; None if it has no axis."""
    return plan.mask(layout, kept).nonzero().flatten() if axes_of(layout) else None
