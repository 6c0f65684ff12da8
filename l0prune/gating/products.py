"""Products of all gated weights of a model, computed in one launch when its forward begins.

A step on a GPU is a sequence of launches, and one product for each weight makes it 50 % longer. So
all weights that the last forwards have read are multiplied at once, in the dtype to which autocast
would cast them, which saves the cast. One backward pass computes all gradients. A weight for which
that does not hold (it is read for the first time, was changed in between, or activations are
recomputed) is multiplied alone, as all are without Triton. For forwards that torch.compile traces
see ``compiled_products``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from l0prune.capture.compat import (
    functorch_is_active,
    has_saved_tensor_hooks,
    is_recorded,
    version_of,
)
from l0prune.errors import first_line, warn
from l0prune.gating.multiplying import along
from l0prune.gating.weight_tables import Line, Sites, Table, flat, kernels, line_of, parts

_OFF = (
    "Triton does not run here ({0}), so each gated weight is multiplied by itself, which makes a "
    "step on a GPU up to half as long again. Triton needs a C compiler and a GPU that it knows."
)
_failed: list[Exception] = []


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on the device."""
    return device.type == "cuda" and not _failed and kernels() is not None


def is_joined() -> bool:
    """Return whether torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class GatedWeights(Function):
    """The products W ∘ z of all weights of a table.

    With G their gradients, ``∂L/∂W = G ∘ z`` and ``∂L/∂z_i = Σ (W ∘ G)`` over the positions of slot
    i. Tensors for backward are attributes rather than saved tensors: losses of separate parts of a
    model run a backward pass each.
    """

    @staticmethod
    def forward(ctx: Any, table: Table, z: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Shape: z flat, the multipliers of all layouts; each product as its weight."""
        ctx.table, ctx.z, ctx.weights = table, z, weights
        ctx.versions = [version_of(weight) for weight in weights]
        ctx.set_materialize_grads(False)
        made: list[Tensor] = []
        for group, own in table.split(weights):
            made += parts(group.multiply(z, group.addresses(own)), own)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Shape: grads as the products; results as the arguments."""
        table, z, weights = ctx.table, ctx.z, ctx.weights
        if [version_of(weight) for weight in weights] != ctx.versions:
            raise RuntimeError(
                "one of the gated weights has been modified in place between forward and backward"
            )
        if torch.is_grad_enabled():
            return None, *_textbook(table, z, weights, grads)
        partial = torch.empty(table.partial, dtype=z.dtype, device=z.device)
        of_weights: list[Tensor | None] = []
        for group, own in table.split(weights):
            given = grads[len(of_weights) : len(of_weights) + len(own)]
            grad = flat(given, own, group.dtype)
            out = group.differentiate(z, group.addresses(own), grad, partial)
            of_weights += [
                None if g is None else part for g, part in zip(given, parts(out, own), strict=True)
            ]
        of_z = table.add_up(partial, z) if ctx.needs_input_grad[1] else None
        return None, of_z, *of_weights


def _textbook(
    table: Table, z: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return differentiable gradients of z and of the weights."""
    products = []
    for line, weight in zip(table.lines, weights, strict=True):
        product = weight
        for values, dim in line.sites:
            part = z[values.begin : values.begin + weight.shape[dim]]
            product = product * along(product, part, dim)
        products.append(product.to(line.dtype))
    inputs = [tensor for tensor in (z, *weights) if tensor.requires_grad]
    pairs = [(p, g) for p, g in zip(products, grads, strict=True) if g is not None]
    outputs, given = [p for p, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(outputs, inputs, given, create_graph=True, allow_unused=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in (z, *weights))


def fits(line: Line, z: Tensor) -> bool:
    """Return whether multipliers are on the weight's device, and at least as precise."""
    dtype, device, *_ = line.form
    return bool(device == z.device and torch.promote_types(dtype, z.dtype) == z.dtype)


class Reads:
    """Weights that a model's forwards read, and the table that multiplies them, if any."""

    def __init__(self) -> None:
        self.table: Table | None = None
        self._lines: dict[int, Line | None] = {}
        self._mixed: set[int] = set()  # read in two dtypes by one forward: not cast
        self._is_old = False

    def weights(self, z: Tensor) -> list[Tensor]:
        """Return the weights of the table, which is rebuilt if other weights were read."""
        found = None if self.table is None or self._is_old else self.table.weights()
        if found is None:
            known = [(line.weight(), line) for line in self._lines.values() if line is not None]
            alive = [(weight, line) for weight, line in known if weight is not None]
            self._lines = {id(w): line_of(w, line.sites, line.dtype) for w, line in alive}
            self._is_old = False
            lines = [line for line in self._lines.values() if line is not None and fits(line, z)]
            self.table = Table(lines, z.device) if lines else None
            found = self.table.weights() if self.table is not None else None
        return found or []

    def note(self, weight: Tensor, sites: Sites, dtype: torch.dtype, *, is_mixed: bool) -> None:
        """Record that a weight was read in a dtype, for later forwards."""
        key = id(weight)
        if is_mixed:
            self._mixed.add(key)
        if key in self._mixed:
            dtype = weight.dtype
        line = self._lines.get(key)
        if line is not None and line.weight() is weight and line.dtype == dtype:
            return
        self._lines[key] = line_of(weight, sites, dtype)
        self._is_old |= self._lines[key] is not None


# A weight, its version counter at that time, and its product.
Made = tuple[Tensor | None, int | None, Tensor | None]
_NOTHING: Made = (None, None, None)


class Products:
    """The products that a model's forward reads, computed when the forward begins.

    Which weights to multiply follows from the reads of earlier forwards, for each dtype of
    autocast. The object belongs to one bank, and is neither copied nor saved.

    Attributes:
        is_on: products are used in this forward, or its reads are recorded for the next.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._reads: dict[torch.dtype | None, Reads] = {}
        self._now = Reads()  # reads under the present dtype of autocast
        self._made: dict[int, Made] = {}
        self._seen: dict[int, torch.dtype] = {}  # dtype of the first read in this forward
        self._with_grad = False

    def begin(self, z: Tensor) -> None:
        """Compute the products for a forward that begins.

        Shape: z flat, the multipliers of all layouts.
        """
        self.end()
        self.is_on = (
            runs_on(z.device)
            and type(z) is Tensor
            and not (torch.compiler.is_compiling() or functorch_is_active() or is_joined())
            and not is_recorded()
        )
        if not self.is_on:
            return
        self._now = self._reads.setdefault(autocast_dtype(z.device), Reads())
        weights = self._now.weights(z)
        if not weights:
            return
        self._with_grad = torch.is_grad_enabled()
        try:
            products = GatedWeights.apply(self._now.table, z, *weights)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _failed.append(error)
            warn(_OFF.format(first_line(error)))
            return
        for weight, product in zip(weights, products, strict=True):
            self._made[id(weight)] = (weight, version_of(weight), product)

    def given(self, made: dict[int, Made]) -> None:
        """Use the products of a compiled graph, by the ``id`` of the weight."""
        self.is_on, self._made = len(made) > 0, made

    def end(self) -> None:
        """Drop the products: autograd keeps those that it still needs."""
        self.is_on = False
        self._made, self._seen = {}, {}

    def read(self, weight: Tensor, sites: Sites, dtype: torch.dtype) -> Tensor | None:
        """Return the product of a weight; None if the caller has to compute it.

        It is in ``dtype``, to which the reader is going to cast, or in that of the weight.
        """
        key = id(weight)
        of, version, product = self._made.get(key, _NOTHING)
        if torch.compiler.is_compiling():  # versions cannot be traced, and hooks do not matter
            is_valid = of is weight and product is not None and product.dtype == dtype
            return product if is_valid else None
        if has_saved_tensor_hooks():
            return None
        is_valid = (
            of is weight
            and version == version_of(weight)
            and (self._with_grad or not torch.is_grad_enabled())
        )
        if is_valid and product is not None and product.dtype == dtype:
            return product
        if type(weight) is nn.Parameter:
            is_mixed = self._seen.setdefault(key, dtype) != dtype
            self._now.note(weight, sites, dtype, is_mixed=is_mixed)
        is_valid &= product is not None and product.dtype == weight.dtype
        return product if is_valid else None

    def __reduce__(self) -> tuple[type[Products], tuple[()]]:
        return Products, ()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts the inputs of layers; None if it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
