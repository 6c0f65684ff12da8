"""Multipliers of all layouts, spread from one flat vector of gates in a handful of operations.

The current multipliers of a bank are neither saved nor copied, and are cheap to recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from l0prune.capture.compat import version_of
from l0prune.plan.expected import first_order
from l0prune.plan.layout import Layout
from l0prune.plan.plan import Plan

LINK = "_l0prune"  # the attribute of a module that holds its ``Link``: bank and gated tensors


def held(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter or buffer that the module stores under this name; None without one."""
    table = module._parameters if name in module._parameters else module._buffers
    return table.get(name)


class MultiplierCache:
    """The current multipliers of all gates, and the inputs that they were computed from.

    Attributes:
        noise: the uniform noise of the sample; None if the next sample draws new noise.
        z: the multipliers, flat.
        spread: the multipliers of all layouts, one after another.
        value: the ``log_alpha`` that they were computed from. While it is the same object,
            unchanged, the noise is used again.
        version: version counter of that parameter then.
        mode: everything else that they depend on; see ``SampledGates._mode``.
        stood: a copy of the parameter's values then, if the next forward may reuse the multipliers.
        grad: whether gradients were enabled.
        in_forward: the model is in its forward, so that they are valid without a check.
        own: by module and name, the parameters with which that forward began; None where unknown.
    """

    def __init__(self) -> None:
        self.noise: Tensor | None = None
        self.z: Tensor | None = None
        self.spread: Tensor | None = None
        self.value: Tensor | None = None
        self.version: int | None = None
        self.mode: tuple[object, ...] = ()
        self.stood: Tensor | None = None
        self.grad = False
        self.in_forward = False
        self.own: dict[tuple[int, str], Tensor] | None = None
        self._gated: list[tuple[nn.Module, str]] | None = None

    def note(self, value: Tensor, mode: tuple[object, ...], *, is_fleeting: bool) -> None:
        """Record what the multipliers depend on; ``is_fleeting`` if the next ones differ anyway."""
        self.value, self.version, self.mode, self.stood = value, version_of(value), mode, None
        # On another device the next forward would have to wait to compare the values, and
        # multipliers with a gradient are part of one forward's graph.
        if not (
            is_fleeting or value.device.type != "cpu" or self.z is None or self.z.requires_grad
        ):
            copy = value.detach().clone()
            self.stood = copy if type(copy) is Tensor else None

    def is_still_valid(self, value: Tensor, mode: Callable[[], tuple[object, ...]]) -> bool:
        """Return whether the last forward's multipliers are valid for this one, as in settling.

        Values are compared: a write into ``log_alpha.data`` leaves no other trace.
        """
        return (
            not torch.compiler.is_compiling()  # first: the next checks would break its graph
            and self.stood is not None
            and self.value is value
            and self.mode == mode()
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and torch.equal(self.stood, value)
        )

    def note_own(self, model: nn.Module) -> None:
        """Record which tensor object each gated name refers to when the forward begins."""
        if self._gated is None:
            self._gated = [
                (module, name)
                for module in model.modules()
                for name in getattr(module.__dict__.get(LINK), "sites", ())
            ]
        placed = ((module, name, held(module, name)) for module, name in self._gated)
        self.own = {(id(module), name): t for module, name, t in placed if t is not None}

    def is_own(self, module: nn.Module, name: str, parameter: Tensor) -> bool:
        """Return whether the forward began with this parameter, or with shards of it.

        True if that is unknown.
        """
        before = (self.own or {}).get((id(module), name))
        return before is None or before is parameter or hasattr(before, "placements")

    def __reduce__(self) -> tuple[type[MultiplierCache], tuple[()]]:
        return MultiplierCache, ()


class GateValues:
    """The current multipliers along one layout, for the modules that use them.

    An object rather than an index into a list, so that torch.compile sees equal blocks of a model
    as equal.

    Attributes:
        values: the multipliers; None where nothing is computed.
        begin: their offset in the vector of all layouts.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.begin = 0

    def __getstate__(self) -> Mapping[str, Any]:
        return {"values": None, "begin": self.begin}


def scale(tensor: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return ``tensor`` times ``values`` along ``dim``; dtype and device are the tensor's.

    Where the values are the more precise of the two (float32 gates of a bfloat16 model), the
    product and its gradients are computed in their dtype.

    Shape: tensor any; values ``(tensor.shape[dim],)``.
    """
    if not tensor.numel():  # of a removed branch
        return tensor
    if values.device != tensor.device:
        values = values.to(tensor.device)
    product = tensor * along(tensor, values, dim)
    return product if product.dtype == tensor.dtype else product.to(tensor.dtype)


def along(tensor: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return ``values`` shaped to broadcast against ``tensor``.

    Where short dimensions follow ``dim`` (a 3×3 kernel), repeating each value over them makes
    rows, which the CPU multiplies, and sums in backward, four times as fast as it broadcasts.

    No call here takes a size: the code around may be a module whose sizes are given call by call
    (see ``GivenSizes``).
    """
    after = tensor.shape[dim + 1 :]
    if not after:
        return values
    for _ in range(dim):
        values = values.unsqueeze(0)
    for _ in after:
        values = values.unsqueeze(-1)
    is_on_cpu = tensor.device.type == "cpu"
    if dim == 0 or prod(after) == 1 or not (is_on_cpu and tensor.is_contiguous()):
        return values
    one = tensor.detach()
    for before in range(dim):
        one = one.narrow(before, 0, 1)
    return values.expand_as(one).contiguous()


_Row = tuple[int, Tensor]


class Spreader:
    """``plan.spread(layout, z)`` for all layouts at once, at a cost that hardly grows with them.

    Each position of a layout is a product of entries of z, given by rows of indices. Layouts are
    sorted by their number of factors, so that the row of each further factor begins at some
    position: one gather per factor, then one split into a view for each layout.
    """

    def __init__(self, plan: Plan, layouts: Sequence[tuple[Layout, Tensor | None]]) -> None:
        """Build rows of indices for layouts, each with its remaining positions (None for all)."""
        tables = [_left(plan.gate_table(layout), left) for layout, left in layouts]
        order = sorted(range(len(layouts)), key=lambda number: tables[number].shape[0])
        sizes = [tables[number].shape[1] for number in order]
        self._sizes = sizes
        self._place = [order.index(number) for number in range(len(layouts))]
        self.begins = [sum(sizes[:place]) for place in self._place]
        # A layout without rows is a factor of 1, encoded as the index past the last gate.
        in_order = [
            tables[number] if len(tables[number]) else torch.full((1, size), plan.size)
            for number, size in zip(order, sizes, strict=True)
        ]
        self._rows: list[_Row] = []
        for factor in range(max(map(len, in_order), default=0)):
            deep = [table[factor] for table in in_order if len(table) > factor]
            row = torch.cat(deep)
            self._rows.append((sum(sizes) - len(row), row))
        self._has_ones = any(bool((row == plan.size).any()) for _, row in self._rows)
        self._is_split = len(self._rows) == 1 and torch.equal(
            self._rows[0][1], torch.arange(plan.size)
        )

    def __call__(self, z: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return all multipliers in one vector, and its parts, one per layout.

        Dtype and device are those of z; the backward pass may run any number of times.

        Shape: z ``(plan.size,)``; parts as many as positions are left of each layout.
        """
        if not self._rows:
            return z, ()
        if not self._is_split:
            if self._rows[0][1].device != z.device:
                self._rows = [(start, row.to(z.device)) for start, row in self._rows]
            z = F.pad(z, (0, 1), value=1.0) if self._has_ones else z
            if z.requires_grad and torch.is_grad_enabled():
                z = _ProductGather.apply(z, self._rows)
            else:
                z = _product(_gathered(z, self._rows), self._rows)
        return z, self._parts(z)

    def _parts(self, z: Tensor) -> list[Tensor]:
        """Split the multipliers by layout; on a GPU into views that are differentiated alone."""
        if z.device.type == "cpu":  # one autograd node, which fills in zeros for unused parts
            parts = z.split_with_sizes(self._sizes)
            return [parts[place] for place in self._place]
        sizes = (self._sizes[place] for place in self._place)
        return [z.narrow(0, at, size) for at, size in zip(self.begins, sizes, strict=True)]


def _left(table: Tensor, left: Tensor | None) -> Tensor:
    return table if left is None else table[:, left]


def _gathered(values: Tensor, rows: list[_Row]) -> list[Tensor]:
    return [values.index_select(0, row) for _, row in rows]


def _product(gathered: list[Tensor], rows: list[_Row]) -> Tensor:
    """Multiply the factors of each position."""
    result = gathered[0]
    for (start, _), factor in zip(rows[1:], gathered[1:], strict=True):
        result = torch.cat([result[:start], result[start:] * factor])
    return result


class _ProductGather(Function):
    """The product of all rows' gathers, whose backward pass may run more than once.

    ``_HardSigmoid`` explains why its inputs are kept as attributes, not as saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: list[_Row]) -> Tensor:
        ctx.size, ctx.rows = values.shape[0], rows
        gathered = _gathered(values, rows)
        ctx.gathered = gathered if len(rows) > 1 else []
        return _product(gathered, rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad.new_zeros(ctx.size)
        for number, (start, row) in enumerate(ctx.rows):
            share = grad[start:]
            for other, factor in enumerate(ctx.gathered):
                if other != number:
                    share = _times(share, start, factor, ctx.rows[other][0])
            result.index_add_(0, row, share)
        return result, None


def _times(share: Tensor, start: int, factor: Tensor, begins: int) -> Tensor:
    """Multiply a share, from position ``start`` on, by a factor of positions from ``begins`` on."""
    if begins <= start:
        return share * factor[start - begins :]
    share = share.clone()
    share[begins - start :] *= factor
    return share
