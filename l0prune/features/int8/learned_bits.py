"""Fake quantization whose bits are learned: Bayesian Bits (van Baalen et al. 2020, 2005.07093).

A value x is rounded on a grid for each number of bits of the menu b₁ < b₂ < …, of one range with
steps ``s_b = (max − min)/(2^b − 1)``; each grid is part of the next: ``s_2b = s_b/(2^b + 1)``.
With x_i the number of the i-th grid that is nearest to x, the residuals of the paper are the
differences ``ε_i = x_i − x_{i−1}``, and with a gate z on each

    x_q = x₁ + z₂·(ε₂ + z₃·(ε₃ + …)) = Σ_i z₂ ⋯ z_i·(1 − z_{i+1})·x_i.

The second form is exact where the gates are 0 and 1: then x_q is on one of the grids. Pruned slots,
the paper's 0 bits, are closed by the gates of their axes.

Gradients pass straight through the rounding, and go to the ends of the range for values beyond it
(PACT). The size of a range is learned: the largest weight of each output, or the range observed in
the first steps, times ``exp(θ)``, with one θ for each weight and each point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from l0prune.features.int8.bits import (
    bit_price,
    bits_left,
    check_menu,
    name_of_weight,
    names_of_points,
)
from l0prune.features.int8.fake_quantizer import FakeQuantizer
from l0prune.features.int8.ranges import SMALLEST, Bits, Ranges, Scheme
from l0prune.gating.bank import Gates
from l0prune.gating.multiplying import LINK, held
from l0prune.plan.cost import CostModel
from l0prune.plan.expected import first_order
from l0prune.plan.plan import Plan


class Grid(NamedTuple):
    """Numbers ``step·k`` for whole k from ``least`` to ``most``.

    Attributes:
        step, least, most: of a shape that broadcasts against the values.
        margin: steps beyond both ends that count as inside the range.
    """

    step: Tensor
    least: Tensor
    most: Tensor
    margin: float = 0.0

    def nearest(self, values: Tensor) -> Tensor:
        """Return the number of the grid nearest to each value."""
        return (values / self.step).round_().clamp_(self.least, self.most).mul_(self.step)

    def has(self, values: Tensor) -> Tensor:
        """Return which values are inside the range; bool."""
        low, high = self.least - self.margin, self.most + self.margin
        return (values >= low * self.step) & (values <= high * self.step)


def weight_grids(largest: Tensor, menu: Sequence[int]) -> list[Grid]:
    """Return the grids of weights, one for each number of bits; symmetric, as int8 has it.

    Args:
        largest: last number of the finest grid, by output.
        menu: bits, ascending.
    """
    last = menu[-1]
    span = largest.clamp_min(SMALLEST) * ((2**last - 1) / (2 ** (last - 1) - 1))
    grids = []
    for bits in menu:
        end = largest.new_tensor(2 ** (bits - 1) - 1)
        grids.append(Grid(span / (2**bits - 1), -end, end, 0.5))
    return grids


def point_grids(least: Tensor, most: Tensor, menu: Sequence[int]) -> list[Grid]:
    """Return the grids of a point between ``least`` ≤ 0 and ``most`` ≥ 0; 0 is on each."""
    grids = []
    for bits in menu:
        levels = 2**bits - 1
        step = ((most - least) / levels).clamp_min(SMALLEST)
        zero = (-least / step).round().clamp(0, levels)
        grids.append(Grid(step, -zero, levels - zero))
    return grids


class _Mixture(Function):
    """``Σ_i shares_i·x_i``, with x_i the nearest number to x on grid i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor, shares: Tensor, grids: list[Grid]) -> Tensor:
        del theta  # already part of the grids
        mixed = torch.zeros_like(x)
        for share, grid in zip(shares.unbind(), grids, strict=True):
            mixed = torch.addcmul(mixed, grid.nearest(x), share)
        ctx.grids = grids
        ctx.save_for_backward(x, mixed)
        return mixed

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mixed = ctx.saved_tensors
        of_x = grad * ctx.grids[-1].has(x)
        of_theta = of_shares = None
        if ctx.needs_input_grad[1]:
            of_theta = (grad * mixed - of_x * x).sum()
        if ctx.needs_input_grad[2]:
            of_shares = torch.stack([(grad * grid.nearest(x)).sum() for grid in ctx.grids])
        return of_x, of_theta, of_shares, None


def shares_of(z: Tensor) -> Tensor:
    """Return the share of each grid, from its gates.

    Shape: z ``(levels,)``, whose first entry is ignored; result the same.
    """
    there = torch.cat([z.new_ones(1), z[1:].cumprod(0)])
    return there * torch.cat([1 - z[1:], z.new_ones(1)])


def mixed(x: Tensor, theta: Tensor, z: Tensor, grids: list[Grid]) -> Tensor:
    """Quantize values with gates; see the module.

    Args:
        x: values of any shape.
        theta: logarithm of the learned factor of the range, a scalar that is already part of the
            grids.
        z: gates of the bits, shape ``(levels,)``.
        grids: one for each number of bits.
    """
    return _mixed(x, theta, shares_of(z), grids)


def _mixed(x: Tensor, theta: Tensor, shares: Tensor, grids: list[Grid]) -> Tensor:
    precise = x.to(_precise(x))
    found: Tensor = _Mixture.apply(precise, theta.to(precise), shares.to(precise), grids)
    return found.to(x.dtype)


class LearnedBits(FakeQuantizer):
    """Fake quantization of the layers of one gated model, with bits chosen by gates.

    Attributes:
        menu: bits of a tensor, ascending.
        ends: see ``bake``.

    Args:
        gates: of the model, with axes for bits.
    """

    def __init__(self, gates: Gates, scheme: Scheme, menu: Sequence[int]) -> None:
        super().__init__(gates, scheme, 2 ** (menu[-1] - 1) - 1)
        self.menu = tuple(menu)
        slices = {axis.name: axis.slice for axis in gates.plan.axes}
        self._of_weights = [slices[name_of_weight(layer)] for layer in scheme.layers]
        self._of_points = {p: slices[name] for p, name in names_of_points(scheme).items()}
        self._plain = max((bits for bits in menu if bits <= 8), default=menu[0])
        self.ends: list[Tensor] = []
        self._z: tuple[Tensor | None, list[float]] = None, []
        count = len(scheme.layers) + len(scheme.bounds)
        if gates.clips is None or len(gates.clips) != count:
            gates.clips = nn.Parameter(gates.log_alpha.detach().new_zeros(count))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_z": (None, [])}

    @property
    def bits(self) -> dict[str, int]:
        """Bits of each weight and each input of a layer at the present gates, by name."""
        return bits_left(self.gates.plan, self.gates.open().cpu(), self.menu)

    @property
    def by_layer(self) -> dict[str, tuple[int, int]]:
        """Bits of the weight and the input of each layer at the present gates, by path."""
        bits, points = self.bits, names_of_points(self.scheme)
        return {
            layer.path: (bits[name_of_weight(layer)], bits[points[layer.reads]])
            for layer in self.scheme.layers
        }

    @property
    def found(self) -> Ranges:
        """The ranges as plain data, without the learned factors."""
        return replace(super().found, menu=self.menu)

    def weight_grids(self, weight: Tensor, layer: int) -> list[Grid]:
        """Return the grids of a layer's weight, by its values times the gates."""
        largest = weight.detach().flatten(1).abs().amax(1) * self._factor(layer, weight)
        return weight_grids(largest.reshape(-1, *[1] * (weight.dim() - 1)), self.menu)

    def weight(self, weight: Tensor, layer: int) -> Tensor:
        """Quantize the weight of this layer. Shape: ``(outputs, …)``, and so the result."""
        if not weight.numel():
            return weight
        grids = self.weight_grids(weight, layer)
        return self._mixed(weight, layer, self._of_weights[layer], grids)

    def _on_grid(self, point: int, value: Tensor) -> Tensor:
        number = len(self._of_weights) + point
        ends = self._ends(point, value)
        where = self._of_points.get(point)
        menu = self.menu if where is not None else (self._plain,)
        return self._mixed(value, number, where, point_grids(ends[0], ends[1], menu))

    def _ends(self, point: int, like: Tensor) -> Tensor:
        """Return both ends of a point's range."""
        factor = self._factor(len(self._of_weights) + point, like)
        return self.ranges[point].to(factor) * factor

    def _mixed(self, value: Tensor, number: int, where: slice | None, grids: list[Grid]) -> Tensor:
        assert self.gates.clips is not None
        theta, z = self.gates.clips[number], self.gates.current()
        if where is None:
            return _mixed(value, theta, z.new_ones(1), grids)
        shares = shares_of(z[where])
        if z.device.type == "cpu" or not z.requires_grad:
            # A share of 0 has no gradient: its gates are at an end, where they have no slope.
            there = [n for n, share in enumerate(self._shares(z, where)) if share]
            shares, grids = shares[there], [grids[n] for n in there]
        return _mixed(value, theta, shares, grids)

    def _shares(self, z: Tensor, where: slice) -> list[float]:
        found: list[float] = shares_of(torch.tensor(self._numbers(z)[where])).tolist()
        return found

    def _numbers(self, z: Tensor) -> list[float]:
        """Return z as a list, copied from its device once."""
        if self._z[0] is not z:
            self._z = z, z.tolist()
        return self._z[1]

    def _factor(self, number: int, like: Tensor) -> Tensor:
        assert self.gates.clips is not None
        return self.gates.clips[number].detach().to(like.device, _precise(like)).exp()

    # --- results of training ---------------------------------------------------------------

    def price(self, plan: Plan) -> CostModel:
        """See ``Rounding``."""
        return bit_price(plan, self.menu)

    @torch.no_grad()
    def bake(self, model: nn.Module) -> None:
        """Replace the weights of a gated model by values on their grids, permanently.

        They may share memory with those of another model, which do not change. A weight times its
        gates is then equal to its quantized value; ``ends`` has for each layer the largest integer
        of each output, by magnitude.
        """
        z = self.gates.z().tolist()
        done: dict[str, Tensor] = {}
        for number, layer in enumerate(self.scheme.layers):
            if layer.weight not in done:
                module = model.get_submodule(layer.path)
                grid_of = partial(self._weight_grid, z=z, layer=number)
                done[layer.weight] = _baked(module, grid_of)
        self.ends = [done[layer.weight] for layer in self.scheme.layers]

    def _weight_grid(self, weight: Tensor, z: list[float], layer: int) -> Grid:
        return self.weight_grids(weight, layer)[_level(z[self._of_weights[layer]])]

    def for_file(self, plan: Plan, kept: Tensor) -> Ranges | None:
        """Return ranges and bits for a file with these slots; None before ``bake``.

        Shape: kept bool, ``(plan.size,)``.
        """
        if not self.ends or not any(self.counts):
            return None
        z, ends = self.gates.z().tolist(), []
        for layer, end in zip(self.scheme.layers, self.ends, strict=True):
            rows = plan.mask(plan.tensors[plan.aliases.get(layer.weight, layer.weight)][0], kept)
            ends.append(tuple(end.cpu()[rows].tolist()))
        points = (self._of_points.get(point) for point in range(len(self.counts)))
        bits = Bits(
            tuple(self._plain if at is None else self.menu[_level(z[at])] for at in points),
            tuple(self.menu[_level(z[at])] for at in self._of_weights),
            tuple(ends),
        )
        of_points = [self._ends(p, self.ranges).tolist() for p in range(len(self.counts))]
        least, most = zip(*of_points, strict=True)
        return replace(self.found, least=least, most=most, bits=bits)


def _baked(module: nn.Module, grid_of: Callable[[Tensor], Grid]) -> Tensor:
    """Put a module's weight times its gates on a grid; return the largest integers.

    Shape: int64, ``(outputs,)``.
    """
    link, stored = module.__dict__[LINK], held(module, "weight")
    assert stored is not None
    by = link.product("weight", torch.ones_like(stored), stored.dtype)
    grid = grid_of(stored * by)
    on_grid = grid.nearest(stored * by)
    stored.data = torch.where(by == 0, stored, on_grid / by)  # not in place: may be shared
    return (on_grid / grid.step).round().abs().flatten(1).amax(1).long()


def _level(z: Sequence[float]) -> int:
    """Return the index of the finest grid whose gate is open, with all gates before it."""
    return len([*takewhile(bool, z[1:])])


def rounded_again(model: nn.Module, gates: Gates, saved: Mapping[str, Any]) -> None:
    """Put the quantizer of a model's file (``Rounding.to_dict``) on the gated model.

    Raises:
        UsageError: the model lacks layers of it.
        ValueError, TypeError, LookupError: the data is invalid.
    """
    quantizer_of(gates, Ranges.of(saved)).attach(model)


def quantizer_of(gates: Gates, ranges: Ranges) -> FakeQuantizer:
    """Return an enabled quantizer with the ranges that a training found."""
    if not ranges.menu:
        return FakeQuantizer.of(gates, ranges)
    made = LearnedBits(gates, ranges.scheme, check_menu((0, *ranges.menu)))
    made.take(ranges)
    return made


def _precise(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
