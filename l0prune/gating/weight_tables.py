"""Tables by which Triton's kernels find many weights in memory, and the gates of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from l0prune.gating.multiplying import GateValues

Sites = Sequence[tuple[GateValues, int]]


@cache
def kernels() -> ModuleType | None:
    """Return the kernels; None without Triton, or with one that does not load."""
    try:
        from l0prune.gating import kernels as found
    except Exception:
        return None
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """A weight as a matrix in memory, with the offsets of its multipliers.

    Attributes:
        weight: returns the parameter; None once it is freed, or if only its form is known.
        sites: its multipliers, each with its dim.
        dtype: of the product.
        form: ``form_of`` the weight when the line was made.
        rows: size of the first dim; 1 for a vector.
        columns: of all other dims.
        after: columns between two neighbours along the dim that is gated.
        size: of that dim.
        of_columns: offset of its multipliers; −1 for none.
        of_rows: offset of the multipliers of rows; −1 for none.
    """

    weight: Callable[[], Tensor | None]
    sites: Sites
    dtype: torch.dtype
    form: tuple[Any, ...]
    rows: int
    columns: int
    after: int = 1
    size: int = 1
    of_columns: int = -1
    of_rows: int = -1

    @property
    def numbers(self) -> tuple[int, ...]:
        """Rows, columns, after, size, of_columns and of_rows."""
        return self.rows, self.columns, self.after, self.size, self.of_columns, self.of_rows


def form_of(weight: Tensor) -> tuple[Any, ...]:
    """Return dtype, device, shape and strides of a weight, which fix how it is stored."""
    return weight.dtype, weight.device, weight.shape, weight.stride()


def line_of(weight: Tensor, sites: Sites, dtype: torch.dtype) -> Line | None:
    """Return the line of a weight; None if the kernels do not support its strides or dtype."""
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
    numbers = rows, columns, after, size, of_columns, of_rows
    return Line(ref(weight), sites, dtype, form_of(weight), *numbers)


class Group:
    """Weights of one dtype with products of one dtype: one launch forward, and one backward."""

    def __init__(
        self, lines: Sequence[Line], of: torch.dtype, partial: int, device: torch.device
    ) -> None:
        self.of, self.dtype = of, lines[0].dtype
        found = kernels()
        assert found is not None
        tr, tc = found.TILE
        self.sums: list[tuple[int, tuple[int, ...]]] = []  # by offset in the gradient of z
        table, tiles = [], []
        begins = list(accumulate((line.rows * line.columns for line in lines), initial=0))
        self.count, self.size = len(lines), begins[-1]
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
        """Return the weights' addresses, on the device; cached, since they seldom change."""
        now = tuple(weight.data_ptr() for weight in weights)
        if now != self._addresses:
            self._addresses = now
            self._at = torch.tensor(now).to(weights[0].device, non_blocking=True)
        return self._at

    def multiply(self, z: Tensor, at: Tensor) -> Tensor:
        """Return the products, one after another, of weights at these addresses."""
        run = kernels()
        assert run is not None
        out = torch.empty(self.size, dtype=self.dtype, device=z.device)
        run.multiply(self.tiles, self.table, at, self.of, z, out)
        return out

    def differentiate(self, z: Tensor, at: Tensor, grad: Tensor, partial: Tensor) -> Tensor:
        """Return the gradients of the weights from those of the products, one after another.

        Each tile's part of the gradient of z is written into ``partial``.
        """
        run = kernels()
        assert run is not None
        out = torch.empty(self.size, dtype=self.of, device=z.device)
        run.differentiate(self.tiles, self.table, at, self.of, z, grad, out, partial)
        return out


class Table:
    """All launches for some weights; ``lines`` are in the order of the products."""

    def __init__(self, lines: Sequence[Line], device: torch.device) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype], list[Line]] = {}
        for line in lines:
            kinds.setdefault((line.form[0], line.dtype), []).append(line)
        self.lines = [line for group in kinds.values() for line in group]
        self.groups: list[Group] = []
        self.partial = 0
        for (of, _), group in kinds.items():
            self.groups.append(Group(group, of, self.partial, device))
            self.partial = self.groups[-1].partial
        self._sum_up([each for group in self.groups for each in group.sums], device)

    def _sum_up(self, sums: Sequence[tuple[int, tuple[int, ...]]], device: torch.device) -> None:
        """Prepare two reductions: sums of each weight, then over all weights of each layout."""
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

    def add_up(self, partial: Tensor, z: Tensor) -> Tensor:
        """Return the gradient of z from the tiles' partial sums."""
        run = kernels()
        assert run is not None
        between = torch.empty(self.between, dtype=z.dtype, device=z.device)
        result = torch.zeros_like(z)
        run.add_up(*self.first, partial, between)
        run.add_up(*self.last, between, result)
        return result

    def weights(self) -> list[Tensor] | None:
        """Return the weights; None if one was freed, or its form has changed."""
        found = []
        for line in self.lines:
            weight = line.weight()
            if weight is None or form_of(weight) != line.form:
                return None
            found.append(weight)
        return found

    def split(self, values: Sequence[Any]) -> Iterator[tuple[Group, Sequence[Any]]]:
        """Yield each group with its part of ``values``, which has one entry per line."""
        begin = 0
        for group in self.groups:
            yield group, values[begin : begin + group.count]
            begin += group.count


def _sums(lines: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    found = kernels()
    assert found is not None
    blocks = [
        (number, slot)
        for number, line in enumerate(lines)
        for slot in range(0, line[3], found.BLOCK[1])
    ]
    return torch.tensor(blocks).to(device), torch.tensor(lines).to(device)


def parts(
    flat: Tensor, like: Sequence[Tensor], strides: Sequence[tuple[int, ...]] = ()
) -> list[Tensor]:
    """Return views of ``flat``, one after another, with the shapes and strides of others."""
    begins = accumulate((each.numel() for each in like), initial=0)
    strides = strides or [each.stride() for each in like]
    return [
        flat.as_strided(each.shape, stride, begin)
        for begin, each, stride in zip(begins, like, strides, strict=False)
    ]


def flat(grads: Sequence[Tensor | None], like: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return all gradients in one vector, each in the memory order of its weight."""
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
    """Return whether two tensors of one shape have equal strides in all dims longer than 1."""
    strides = zip(tensor.stride(), like.stride(), like.shape, strict=True)
    return all(own == other or size == 1 for own, other, size in strides)
