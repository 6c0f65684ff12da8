"""Layers that need another forward, or other numbers, after some of their inputs are removed.

A module that averages over an axis would divide by fewer values. Which of its numbers have to
change is unknown for a user's class; but there are few ways to write a norm, and each is tried on
the module alone, on random values that are zero in removed slots: it has to compute what the uncut
module does. Query weights are rescaled if code derives the attention scale from the cut head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.capture.provenance import is_within, within
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import InOneDtype
from l0prune.exporting.own_class.sizes import changed_attributes, given_sizes, resized
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.tensors import cut
from l0prune.files.cut_layers import PickedLinear, become
from l0prune.files.given_sizes import PADDED, GivenSizes, PaddedNorm
from l0prune.plan.layout import Gated, Layout, Layouts, axes_of, outer
from l0prune.running.device import device_of

_ROUNDING = 1e-10


@dataclass(frozen=True)
class Layer:
    """Change that makes one module right for its remaining inputs.

    Attributes:
        attributes: new values of its attributes.
        kind: name of the class of ``cut_layers`` that it becomes; empty if it keeps its class.
        buffers: tensors that it gains.
        scale, offset: its parameters p become ``scale · (p + offset) − offset``.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    offset: float = 0.0

    def put_on(self, module: nn.Module) -> None:
        """Change the module's class, attributes and buffers in place, not its parameters."""
        if self.kind:
            become(module, self.kind)
        for name, value in self.attributes.items():
            setattr(module, name, value)
        device = device_of(module)
        for name, tensor in self.buffers.items():
            module.register_buffer(name, tensor.to(device))

    def scaled(self, tensor: Tensor) -> Tensor:
        """Return ``scale · (p + offset) − offset`` of a parameter p."""
        return tensor if self.scale == 1 else self.scale * (tensor + self.offset) - self.offset


def layers_for(plain: nn.Module, chosen: KeptSlots) -> dict[str, Layer]:
    """Return changes of the modules that are wrong with cut tensors alone, by path."""
    found = {**dict(_picked(plain, chosen)), **dict(_attention(plain, chosen))}
    given = given_sizes(plain, chosen.plan, chosen.kept)
    for path, dims in chosen.plan.code.averages.items():
        if any(not chosen.plan.mask(dim, chosen.kept).all() for dim in dims if axes_of(dim)):
            calls = given.get(path, {})
            layer = _averaging(plain.get_submodule(path), path, dims, chosen, calls)
            if layer is not None:
                found[path] = layer
    return _in_encoders(plain, found)


def _in_encoders(plain: nn.Module, found: dict[str, Layer]) -> dict[str, Layer]:
    """Adapt the changes to torch's transformer encoders around the changed layers.

    A TransformerEncoderLayer has a fast path that reads the weights of its layers, whatever their
    class: it is turned off. A TransformerEncoder may pass padded tokens as nested tensors, which
    other layers do not accept, and returns zeros for padding: inside it no layer is changed.
    """
    for path, module in plain.named_modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", True):
            found = {each: layer for each, layer in found.items() if not is_within(each, path)}
    for path, module in plain.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            is_within(each, path) for each in found
        ):
            found[path] = Layer({"activation_relu_or_gelu": 0})
    return found


def _picked(plain: nn.Module, chosen: KeptSlots) -> Iterator[tuple[str, Layer]]:
    """Yield Linear layers that read only some of their remaining inputs, as ``PickedLinear``."""
    for name, dims in chosen.plan.tensors.items():
        path, _, leaf = name.rpartition(".")
        picked = _kept_inputs(dims[1], chosen) if leaf == "weight" and len(dims) == 2 else None
        module = plain.get_submodule(path)
        if picked is not None and type(module) in (nn.Linear, PickedLinear):
            kept = module.kept[picked] if isinstance(module, PickedLinear) else picked
            yield path, Layer(kind=PickedLinear.__name__, buffers={"kept": kept})


def _attention(plain: nn.Module, chosen: KeptSlots) -> Iterator[tuple[str, Layer]]:
    """Yield cut MultiheadAttention layers, whose forward derives head_dim from embed_dim."""
    plan, kept = chosen.plan, chosen.kept
    for path, module in plain.named_modules():
        values = plan.tensors.get(within(path, "out_proj.weight"))
        if type(module) is not nn.MultiheadAttention or values is None:
            continue
        if module.bias_k is not None or module.add_zero_attn:
            continue
        is_packed = module.in_proj_weight is not None
        rows, columns = plan.tensors[
            within(path, "in_proj_weight" if is_packed else "q_proj_weight")
        ]
        left = [int(plan.mask(dim, kept).sum()) for dim in (rows, columns, *values)]
        if left == [dim.size for dim in (rows, columns, *values)]:
            continue
        heads = int(plan.mask(outer(values[1], module.num_heads), kept).sum())
        keys = (left[0] - left[3]) // 2 if is_packed else left[0]
        settings = {
            "num_heads": heads,
            "head_dim": keys // heads,
            "embed_dim": left[1],
            "scale": module.head_dim**-0.5,
        }
        picked = _kept_inputs(columns, chosen) if is_packed else None
        if picked is None:
            yield path, Layer(settings, kind="CutAttention")
        else:
            yield path, Layer(settings, kind="PickedAttention", buffers={"kept": picked})


def _kept_inputs(columns: Layout, chosen: KeptSlots) -> Tensor | None:
    """Return indices of the remaining inputs that are read; None if all are."""
    if not isinstance(columns, Gated):
        return None
    plan, kept = chosen.plan, chosen.kept
    fine = plan.mask(columns, kept)[plan.mask(columns.base, kept)]
    return None if fine.all() else fine.nonzero().flatten()


def _averaging(
    module: nn.Module, path: str, dims: Layouts, chosen: KeptSlots, calls: Mapping[str, Any]
) -> Layer | None:
    """Return the change that makes a module right that averages over ``dims``, None if unknown."""
    plan, kept = chosen.plan, chosen.kept
    generator = torch.Generator().manual_seed(0)
    module = copied(module).cpu()
    whole = copied(module).double().eval()
    tensors = {}
    for name, parameter in whole.named_parameters():
        layouts = plan.tensors.get(within(path, name))
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if layouts is not None:
            tensors[name] = cut(plan, layouts, parameter.detach(), kept)
    x = torch.randn([dim.size for dim in dims], generator=generator, dtype=torch.float64)
    for number, dim in enumerate(dims):
        mask = plan.mask(dim, kept).view([-1 if d == number else 1 for d in range(len(dims))])
        x = x * mask
    exact = InOneDtype(torch.float64)
    with torch.no_grad(), exact, suppress(Exception):  # another input or output than one tensor
        expected = cut(plan, dims, whole(x), kept)
        given = cut(plan, dims, x, kept)
        for layer in _ways(module, dims, chosen, tensors, calls):
            with suppress(Exception):  # a change that does not fit this module
                if difference([expected], [_tried(module, layer, tensors)(given)]) < _ROUNDING:
                    return layer
    return None


def _tried(module: nn.Module, layer: Layer, tensors: Mapping[str, Tensor]) -> nn.Module:
    scaled = {name: layer.scaled(tensor) for name, tensor in tensors.items()}
    changes = changed_attributes(module, tensors, {})
    result = resized(module, changes, scaled).double().eval()
    layer.put_on(result)
    return result


def _ways(
    module: nn.Module,
    dims: Layouts,
    chosen: KeptSlots,
    tensors: Mapping[str, Tensor],
    calls: Mapping[str, Any],
) -> Iterator[Layer]:
    """Yield changes for common forms of norms, the smallest first; ``calls``: its ``GIVEN``."""
    plan = chosen.plan
    left = [int(plan.mask(dim, chosen.kept).sum()) for dim in dims]
    gone = [number for number, dim in enumerate(dims) if left[number] != dim.size]
    shape = tuple(next(iter(tensors.values())).shape) if tensors else (left[-1],)
    yield Layer()
    # x/√(Σx²/n + ε) = √(n/k) · x/√(Σx²/k + ε·n/k); and x/(Σx/n + ε) = n/k · x/(Σx/k + ε·n/k)
    for over in (gone, *([number] for number in gone if len(gone) > 1)):
        by = math.prod(dims[d].size for d in over) / math.prod(left[d] for d in over)
        small: dict[str, Any] = {
            name: value * by
            for name, value in vars(module).items()
            if isinstance(value, float) and "eps" in name
        }
        if isinstance(module, nn.RMSNorm):
            small["normalized_shape"] = shape
        for scale in (by**0.5, 1 / by, by) if small else ():
            for offset in (0.0, 1.0):
                yield Layer(small, scale=scale, offset=offset)
    if isinstance(module, nn.GroupNorm):
        settings: dict[str, Any] = {
            "num_channels": left[1],
            "num_groups": 1,
            "inputs": dims[1].size,
        }
        yield Layer(settings, kind="CutGroupNorm")
    if isinstance(module, nn.LayerNorm):
        for first in (-len(shape), 1):
            inputs = math.prod(dims[d].size for d in ([1] if first == 1 else range(first, 0)))
            values: dict[str, Any] = {"normalized_shape": shape, "inputs": inputs, "dim": first}
            yield Layer(values, kind="CutLayerNorm")
    if calls:
        yield Layer(calls, kind=GivenSizes.__name__)
    yield Layer({PADDED: list(_whole_sizes(module, dims, gone, tensors))}, kind=PaddedNorm.__name__)


def _whole_sizes(
    module: nn.Module, dims: Layouts, gone: Sequence[int], tensors: Mapping[str, Tensor]
) -> Iterator[list[Any]]:
    """Yield a PaddedNorm's old sizes; the last dim is counted from the end, for any rank."""
    for number in gone:
        place = -1 if number == len(dims) - 1 else number
        yield ["", place, dims[number].size]
    for name, new in tensors.items():
        for dim, before in enumerate(module.get_parameter(name).shape):
            if before != new.shape[dim]:
                yield [name, dim, before]


def query_scales(chosen: KeptSlots) -> dict[str, Tensor]:
    """Return factors of cut query parameters, by name; float64, broadcastable to the parameter.

    Code scales q·k of k remaining dims by ``1/√k`` instead of ``1/√n``; ``√(k/n)`` corrects that.
    """
    plan, kept = chosen.plan, chosen.kept
    scales: dict[str, Tensor] = {}
    for query in plan.code.queries:
        by = (int(plan.mask(query.head, kept).sum()) / query.head.size) ** 0.5
        dims = plan.tensors[query.tensor]
        rows = dims[query.dim]
        scale = torch.ones(rows.size, dtype=torch.float64)
        for start, stop in query.ranges:
            scale[start:stop] = by
        if by != 1:
            shape = [-1 if dim == query.dim else 1 for dim in range(len(dims))]
            scales[query.tensor] = scale[plan.mask(rows, kept)].view(shape)
    return scales
