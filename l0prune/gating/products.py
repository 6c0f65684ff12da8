"""Products of all gated weights of a model, made in one launch when its forward begins.

A step on a GPU is a line of launches, and one product for each weight makes it half as long again.
So what the last forwards have read is multiplied at once, and read from there: in the dtype to
which autocast would cast it, which saves the cast. One backward pass takes the gradients of all.
What differs from the forwards before (another layer is read, a weight was changed in between,
activations are recomputed) is multiplied by itself, as it is where there is no Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import ModuleType
from typing import Any
from weakref import ref

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
from l0prune.gating.multipliers import GateValues, along

Sites = Sequence[tuple[GateValues, int]]


@cache
def kernels() -> ModuleType | None:
    """Return the kernels; None without Triton, or with one that does not load."""
    try:
        from l0prune.gating import kernels as found
    except Exception:
        return None
    return found


_OFF = (
    "Triton does not run here ({0}), so each gated weight is multiplied by itself, which makes a "
    "step on a GPU up to half as long again. Triton needs a C compiler and a GPU that it knows."
)
_failed: list[Exception] = []


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on the device."""
    return device.type == "cuda" and not _failed and kernels() is not None


def is_joined() -> bool:
    """Return whether the process trains together with others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@dataclass(frozen=True, slots=True)
class Line:
    """A weight as a matrix in memory, and where its multipliers are.

    Attributes:
        weight: the parameter.
        sites: what multiplies it, along which dims.
        dtype: of the product.
        rows: size of the first dim; 1 for a vector.
        columns: of all other dims.
        after: columns between two neighbours along the dim that is gated.
        size: of that dim.
        of_columns: where its multipliers begin; −1 for none.
        of_rows: where those of rows begin; −1 for none.
        form: of the weight when this was found.
    """

    weight: ref[Tensor]
    sites: Sites
    dtype: torch.dtype
    rows: int
    columns: int
    after: int = 1
    size: int = 1
    of_columns: int = -1
    of_rows: int = -1
    form: tuple[Any, ...] = ()


def form_of(weight: Tensor) -> tuple[Any, ...]:
    """Return all on which the addresses of a weight's numbers depend."""
    return weight.dtype, weight.device, weight.shape, weight.stride()


def line_of(weight: Tensor, sites: Sites, dtype: torch.dtype) -> Line | None:
    """Return how a weight lies in memory; None for what the kernels do not multiply: no matrix of
    rows and columns, or of a dtype that they do not have (complex numbers).
    """
    found = kernels()
    if found is None or not {weight.dtype, dtype} <= found.DTYPES.keys():
        return None
    if not weight.numel() or len({dim for _, dim in sites}) < len(sites):
        return None
    dims = [dim for dim in range(weight.dim()) if weight.shape[dim] > 1]
    inner = sorted(dims, key=weight.stride, reverse=True)
    dense = 1
    for dim in reversed(inner):
        if weight.stride(dim) != dense:
            return None
        dense *= weight.shape[dim]
    is_vector = weight.dim() == 1
    if not is_vector and weight.shape[0] > 1 and inner[0] != 0:
        return None
    rows = 1 if is_vector else weight.shape[0]
    columns = weight.numel() // rows
    along_rows = [values for values, dim in sites if dim == 0 and not is_vector]
    others = [(values, dim) for values, dim in sites if dim or is_vector]
    if len(others) > 1:
        return None
    after, size, of_columns, of_rows = 1, 1, -1, along_rows[0].begin if along_rows else -1
    for values, dim in others:
        size, of_columns = weight.shape[dim], values.begin
        after = weight.stride(dim) if size > 1 else columns
    form = form_of(weight)
    return Line(ref(weight), sites, dtype, rows, columns, after, size, of_columns, of_rows, form)


class Group:
    """Weights of one dtype whose products are of one dtype: one launch there, and one back."""

    def __init__(
        self, lines: Sequence[Line], of: torch.dtype, partial: int, device: torch.device
    ) -> None:
        self.of, self.dtype = of, lines[0].dtype
        found = kernels()
        assert found is not None
        tr, tc = found.TILE
        self.sums: list[tuple[int, tuple[int, ...]]] = []  # by where they go
        table, tiles = [], []
        begins = list(accumulate((line.rows * line.columns for line in lines), initial=0))
        self.begins, self.size = begins[:-1], begins[-1]
        for number, (line, begin) in enumerate(zip(lines, begins, strict=False)):
            table.append((begin, line.rows, line.columns, line.after, line.size,
                          line.of_columns, line.of_rows, partial))  # fmt: skip
            tiles += [
                (number, row, column)
                for row in range(0, line.rows, tr)
                for column in range(0, line.columns, tc)
            ]
            if line.of_columns >= 0:
                repeats, before = -(-line.rows // tr), line.columns // (line.size * line.after)
                form = (partial, repeats, before, line.size, line.after)
                self.sums.append((line.of_columns, form))
                partial += repeats * line.columns
            if line.of_rows >= 0:
                repeats = -(-line.columns // tc)
                self.sums.append((line.of_rows, (partial, repeats, 1, line.rows, 1)))
                partial += repeats * line.rows
        self.partial = partial
        self.table = torch.tensor(table).to(device)
        self.tiles = torch.tensor(tiles).to(device)
        self._addresses: tuple[int, ...] = ()
        self._at = torch.empty(0)

    def addresses(self, weights: Sequence[Tensor]) -> Tensor:
        """Return where the weights are, which seldom changes."""
        now = tuple(weight.data_ptr() for weight in weights)
        if now != self._addresses:
            self._addresses = now
            self._at = torch.tensor(now).to(weights[0].device, non_blocking=True)
        return self._at


class Table:
    """All launches for some weights; ``lines`` are in the order of the products."""

    def __init__(self, lines: Sequence[Line], device: torch.device) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype], list[Line]] = {}
        for line in lines:
            weight = line.weight()
            assert weight is not None
            kinds.setdefault((weight.dtype, line.dtype), []).append(line)
        self.lines = [line for group in kinds.values() for line in group]
        self.groups: list[Group] = []
        self.partial = 0
        for (of, _), group in kinds.items():
            self.groups.append(Group(group, of, self.partial, device))
            self.partial = self.groups[-1].partial
        self._sum_up([each for group in self.groups for each in group.sums], device)

    def _sum_up(self, sums: Sequence[tuple[int, tuple[int, ...]]], device: torch.device) -> None:
        """First the sums of each weight, then for each layout those of all weights along it."""
        by_target: dict[int, list[tuple[int, ...]]] = {}
        for target, form in sums:
            by_target.setdefault(target, []).append(form)
        first, last, begin = [], [], 0
        for target, forms in by_target.items():
            size = forms[0][3]
            last.append((begin, len(forms), 1, size, 1, target))
            for form in forms:
                first.append((*form, begin))
                begin += size
        self.between = begin
        self.first, self.last = _sums(first, device), _sums(last, device)

    def weights(self) -> list[Tensor] | None:
        """Return the weights; None where one of them is no more, or lies otherwise in memory."""
        found = []
        for line in self.lines:
            weight = line.weight()
            if weight is None or form_of(weight) != line.form:
                return None
            found.append(weight)
        return found

    def split(self, values: Sequence[Any]) -> Iterator[tuple[Group, Sequence[Any]]]:
        """The groups, each with its part of what there is one of for each line."""
        begin = 0
        for group in self.groups:
            yield group, values[begin : begin + len(group.begins)]
            begin += len(group.begins)


def _sums(lines: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    found = kernels()
    assert found is not None
    blocks = [
        (number, slot)
        for number, line in enumerate(lines)
        for slot in range(0, line[3], found.BLOCK[1])
    ]
    return torch.tensor(blocks).to(device), torch.tensor(lines).to(device)


class GatedWeights(Function):
    """W ∘ z of all weights of a table, and from their gradients G those of the weights and of z:

    ``∂L/∂W = G ∘ z`` and ``∂L/∂z_i = Σ (W ∘ G)`` over the positions of slot i.

    What it needs are attributes rather than saved tensors: losses of separate parts of a model
    make a backward pass each.
    """

    @staticmethod
    def forward(ctx: Any, table: Table, z: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Shape: z flat, the multipliers of all layouts; each product as its weight."""
        run = kernels()
        assert run is not None
        ctx.table, ctx.z, ctx.weights = table, z, weights
        ctx.versions = [version_of(weight) for weight in weights]
        ctx.set_materialize_grads(False)
        made: list[Tensor] = []
        for group, own in table.split(weights):
            out = torch.empty(group.size, dtype=group.dtype, device=z.device)
            run.multiply(group.tiles, group.table, group.addresses(own), group.of, z, out)
            made += _parts(out, group, own)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Shape: grads as the products; what comes back as the arguments."""
        table, z, weights = ctx.table, ctx.z, ctx.weights
        if [version_of(weight) for weight in weights] != ctx.versions:
            raise RuntimeError(
                "one of the gated weights has been modified in place between forward and backward"
            )
        if torch.is_grad_enabled():
            return None, *_textbook(table, z, weights, grads)
        run = kernels()
        assert run is not None
        partial = torch.empty(table.partial, dtype=z.dtype, device=z.device)
        of_weights: list[Tensor | None] = []
        begin = 0
        for group, own in table.split(weights):
            given = grads[begin : begin + len(own)]
            begin += len(own)
            out = torch.empty(group.size, dtype=group.of, device=z.device)
            grad = _flat(given, own, group.dtype)
            addresses = group.addresses(own)
            run.differentiate(group.tiles, group.table, addresses, group.of, z, grad, out, partial)
            parts = _parts(out, group, own)
            of_weights += [
                None if g is None else part for g, part in zip(given, parts, strict=True)
            ]
        of_z = None
        if ctx.needs_input_grad[1]:
            between = torch.empty(table.between, dtype=z.dtype, device=z.device)
            of_z = torch.zeros_like(z)
            run.add_up(*table.first, partial, between)
            run.add_up(*table.last, between, of_z)
        return None, of_z, *of_weights


def _parts(flat: Tensor, group: Group, like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the shapes and strides of others, in one piece of memory."""
    return [
        flat.as_strided(weight.shape, weight.stride(), begin)
        for begin, weight in zip(group.begins, like, strict=True)
    ]


def _flat(grads: Sequence[Tensor | None], like: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return gradients one after another, each as its weight lies in memory."""
    pieces = []
    for grad, weight in zip(grads, like, strict=True):
        if grad is None:
            pieces.append(weight.new_zeros(weight.numel(), dtype=dtype))
            continue
        grad = grad.to_dense() if grad.is_sparse else grad
        if grad.stride() != weight.stride() and not _lies_alike(grad, weight):
            grad = torch.empty_like(weight, dtype=dtype).copy_(grad)
        pieces.append(grad.as_strided((grad.numel(),), (1,)))
    return torch.cat(pieces)


def _lies_alike(tensor: Tensor, like: Tensor) -> bool:
    """Return whether two tensors of one shape have the same order in memory, without gaps."""
    strides = zip(tensor.stride(), like.stride(), like.shape, strict=True)
    return all(own == other or size == 1 for own, other, size in strides)


def _textbook(
    table: Table, z: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of z and of the weights, to be differentiated themselves."""
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
    """Return whether multipliers are where the weight is, and as precise as it is."""
    dtype, device, *_ = line.form
    return bool(device == z.device and torch.promote_types(dtype, z.dtype) == z.dtype)


class Reads:
    """Weights that a model's forwards read, and the table of their products, if there are any."""

    def __init__(self) -> None:
        self.table: Table | None = None
        self._lines: dict[int, Line | None] = {}
        self._mixed: set[int] = set()  # read in two dtypes by one forward: their own serves both
        self._is_old = False

    def weights(self, z: Tensor) -> list[Tensor]:
        """Return the weights of the table, which is made anew where others were read."""
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
        """Remember that a weight was read, in a dtype, for the forwards to come."""
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


_Made = tuple[Tensor | None, int | None, Tensor | None]
_NOTHING: _Made = (None, None, None)


class Products:
    """The products that a model's forward reads, made when it begins.

    What it is to make is learned from what forwards have read, under each dtype of autocast. It
    belongs to one bank: no copy has it, and no file.

    Attributes:
        is_on: products are made in this forward, or what it reads is noted for the next.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._reads: dict[torch.dtype | None, Reads] = {}
        self._now = Reads()
        self._made: dict[int, _Made] = {}
        self._seen: dict[int, torch.dtype] = {}
        self._with_grad = False

    def begin(self, z: Tensor) -> None:
        """Make the products for a forward that begins.

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

    def end(self) -> None:
        """Let go of the products: who needs them after the forward has them."""
        self.is_on = False
        self._made, self._seen = {}, {}

    def read(self, weight: Tensor, sites: Sites, dtype: torch.dtype) -> Tensor | None:
        """Return the product of a weight; None where it is to be computed by itself.

        It is in the dtype to which the reader is going to cast it, or in that of the weight.
        """
        if has_saved_tensor_hooks():
            return None
        key = id(weight)
        of, version, product = self._made.get(key, _NOTHING)
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
    """Return the dtype to which autocast casts what layers read; None where it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
