"""Sizes in the code of a model's modules: numbers, and averages over axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from l0prune.plan.layout import Layout, Layouts, show

# Numbers of equal parts into which code usually divides a size.
PARTS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Factor:
    """Rows of a parameter behind the queries of an attention whose scale follows its head size.

    Attributes:
        tensor: name of the parameter.
        dim: the dim of the rows.
        ranges: of positions along ``dim``, ends exclusive.
        head: of the queries, the dim within a head.
    """

    tensor: str
    dim: int
    ranges: tuple[tuple[int, int], ...]
    head: Layout


@dataclass(frozen=True)
class ReusedSize:
    """A size that a module's code determines without an attribute for it.

    Attributes:
        module: its path.
        read: the dim of the input whose size it takes; None where it is a literal in the code, or
            computed.
        used: the dim that has this size.
    """

    module: str
    read: Layout | None
    used: Layout

    def text(self, names: Sequence[str]) -> str:
        """Describe for the user what the code does; ``names`` are the axes' names."""
        where, used = self.module or "its forward", show(self.used, names)
        if self.read is None:
            return f"{where} has the size of {used} from its code, not from an attribute"
        read = show(self.read, names)
        return f"{where} reads the size of {read} off its input and uses it for {used}, too"


@dataclass(frozen=True)
class SizedCall:
    """A call of a module's forward that is given sizes, such as those to reshape to.

    Or one that depends on sizes of its inputs: a mean over these dims, a norm over this one,
    attention with the scale of a head of this dim, or a product with 1/√size of it.

    Attributes:
        name: of the function, as Python code calls it: ``reshape``.
        count: the number of sizes that it is given; one for all pieces of a split.
        sizes: in order, the dims that have these sizes; None for sizes that do not change, such
            as all of a submodule's.
        follows: the index of the size that the code multiplies with the batch, whose other factor
            is among ``sizes``; it follows from those of the others.
    """

    name: str
    count: int
    sizes: tuple[Layout | None, ...]
    follows: int | None = None

    def map(self, change: Callable[[Layout], Layout]) -> SizedCall:
        """Return a copy with every layout converted."""
        return replace(self, sizes=tuple(d if d is None else change(d) for d in self.sizes))


@dataclass(frozen=True)
class Code:
    """Sizes that each module's code depends on, by the module's path.

    Attributes:
        sizes: dims whose size its forward gives as a number, such as one to reshape to.
        averages: the dims of its input, for a module that averages over an axis.
        queries: the rows that compute the queries of attention without an explicit scale.
        reused: sizes without an attribute.
        calls: the calls that are given sizes, in order, those of submodules included.
        standardised: names of the tensors whose mean or norm over their inputs its forward takes.
        by_name: names of the tensors that a forward gets by ``named_parameters()`` or
            ``named_buffers()``, and reads.
    """

    sizes: Mapping[str, Layouts] = field(default_factory=dict)
    averages: Mapping[str, Layouts] = field(default_factory=dict)
    queries: tuple[Factor, ...] = ()
    reused: tuple[ReusedSize, ...] = ()
    calls: Mapping[str, tuple[SizedCall, ...]] = field(default_factory=dict)
    standardised: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()

    def map(self, change: Callable[[Layout], Layout]) -> Code:
        """Return a copy with every layout converted."""
        sizes, averages = (
            {path: tuple(map(change, dims)) for path, dims in each.items()}
            for each in (self.sizes, self.averages)
        )
        queries = (replace(each, head=change(each.head)) for each in self.queries)
        reused = (
            ReusedSize(r.module, None if r.read is None else change(r.read), change(r.used))
            for r in self.reused
        )
        calls = {path: tuple(c.map(change) for c in each) for path, each in self.calls.items()}
        return replace(
            self,
            sizes=sizes,
            averages=averages,
            queries=tuple(queries),
            reused=tuple(reused),
            calls=calls,
        )

    def cut(self, left: Callable[[str, int], Tensor]) -> Code:
        """Return the code's sizes of a cut model; ``left`` masks the kept positions of a dim."""
        queries = [
            replace(q, ranges=_ranges_left(q.ranges, left(q.tensor, q.dim))) for q in self.queries
        ]
        return replace(self, queries=tuple(queries))

    def joined(self, other: Code) -> Code:
        """Join two tables about different modules."""
        return Code(
            {**self.sizes, **other.sizes},
            {**self.averages, **other.averages},
            (*self.queries, *other.queries),
            (*self.reused, *other.reused),
            {**self.calls, **other.calls},
            (*self.standardised, *other.standardised),
            (*self.by_name, *other.by_name),
        )


def _ranges_left(ranges: Sequence[tuple[int, int]], left: Tensor) -> tuple[tuple[int, int], ...]:
    before = [0, *left.cumsum(0).tolist()]
    found = ((before[start], before[stop]) for start, stop in ranges)
    return tuple((start, stop) for start, stop in found if start < stop)
