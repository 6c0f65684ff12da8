"""Record of a forward, from which later runs of it start in the middle.

A run with other weights in the middle of a network computes what lies before them again, for
nothing. So results that the rest of the forward still needs are kept at one place, and operators
before it are not run: the network's code gets those results, and elsewhere memory of the right
shape that nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from l0prune.capture.compat import OpOverload, below_autograd, pytree, schema_of

_SMALL = 1 << 12  # elements below which results are kept: code may read them


class OtherWay(Exception):
    """Raised in a forward that takes another way than its record, so that results do not fit."""


@dataclass(frozen=True, slots=True)
class _Result:
    """Tensor that an operator returned: its memory, and where it lies in it."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kept: Tensor | None

    def unread(self) -> Tensor:
        """Return memory of this shape."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class Tape:
    """Record of one forward, and the results that its operators from ``start`` on need.

    Attributes:
        start: number of the first operator that is run; 0 while the forward is recorded.
        is_repeatable: the forward can start in the middle: it writes into nothing but its own
            results, and takes the same way each time.
    """

    start: int = 0
    is_repeatable: bool = True
    _steps: list[tuple[OpOverload, list[Any], Any]] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)
    _written: dict[int, int] = field(default_factory=dict)
    _made: set[int] = field(default_factory=set)
    _references: dict[int, StorageWeakRef] = field(default_factory=dict)
    _kept: dict[int, list[Tensor | None]] = field(default_factory=dict)
    _restored: dict[int, list[Tensor | None]] = field(default_factory=dict)
    _unread: dict[int, StorageWeakRef] = field(default_factory=dict)
    _goal: int = 0

    def note(
        self, number: int, operator: OpOverload, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> None:
        """Record an operator that was run, or keep its result if those from the goal on need it.

        Raises:
            OtherWay: the record has another operator here.
        """
        if self.start:
            if number < self._goal:
                self._same(number, operator)
                # torch copies what a factory such as zeros makes if somebody else holds it
                leaves = [_alias(x) if isinstance(x, Tensor) else x
                          for x in pytree.tree_leaves(result)]  # fmt: skip
                self._kept[number] = self._needed(number, leaves)
            return
        for value in _tensors((args, kwargs)):
            self._last[self._memory(value)] = number
        for position in _writes(operator):
            written = args[position] if position < len(args) else kwargs
            for memory in map(self._memory, _tensors(written)):
                self._written[memory] = number
                self.is_repeatable &= memory in self._made
        leaves, spec = pytree.tree_flatten(result)
        self._steps.append((operator, [self._result(leaf) for leaf in leaves], spec))

    def _memory(self, value: Tensor) -> int:
        """Return a number of a tensor's memory that no other memory has, before or later."""
        reference = StorageWeakRef(value.untyped_storage())
        number: int = reference.cdata
        self._references.setdefault(number, reference)  # keeps the number from being used again
        return number

    def _result(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        self.is_repeatable &= type(leaf) is Tensor and leaf.layout == torch.strided
        memory = self._memory(leaf)
        is_own = memory not in self._last or memory in self._made
        if is_own:
            self._made.add(memory)
        kept = None
        if not is_own:
            kept = leaf  # a view of a weight or of an input
        elif leaf.numel() < _SMALL:
            kept = leaf.clone()
        shape, strides = tuple(leaf.shape), tuple(leaf.stride())
        return _Result(memory, shape, strides, leaf.dtype, leaf.device, kept)

    def recorded(self, output: Any) -> None:
        """End the record of a forward with this output: what runs from here on follows it."""
        for value in _tensors(output):  # complete, perhaps, long before the end
            self._last[self._memory(value)] = len(self._steps) + 1
        self.start = 1

    def begin(self, goal: int = 0) -> None:
        """Prepare a run; with a goal, one that keeps what operators from there on need."""
        self._goal, self._unread = goal, {}
        self._restored = self._kept if goal else self._unwritten()

    def _unwritten(self) -> dict[int, list[Tensor | None]]:
        """Return the kept results, with copies of memory that the rest of the forward writes to."""
        copies = dict[int, Tensor]()

        def copy(found: _Result, value: Tensor | None) -> Tensor | None:
            if value is None or self._written.get(found.memory, 0) < self.start:
                return value
            if found.memory not in copies:
                whole = torch.empty(0, dtype=torch.uint8, device=value.device)
                copies[found.memory] = whole.set_(value.untyped_storage()).clone()
            storage = copies[found.memory].untyped_storage()
            again = torch.empty(0, dtype=value.dtype, device=value.device)
            return again.set_(storage, value.storage_offset(), value.shape, value.stride())

        return {
            number: [copy(*pair) for pair in zip(self._steps[number - 1][1], values, strict=True)]
            for number, values in self._kept.items()
        }

    def result(self, number: int, operator: OpOverload) -> Any:
        """Return the result of an operator before ``start``, which is not run.

        Raises:
            OtherWay: the record has another operator here.
        """
        results, spec = self._same(number, operator)
        restored = self._restored.get(number) or [None] * len(results)
        leaves = [self._leaf(*pair) for pair in zip(results, restored, strict=True)]
        return pytree.tree_unflatten(leaves, spec)

    def _same(self, number: int, operator: OpOverload) -> tuple[list[Any], Any]:
        """Return the recorded results of an operator, and how they lie in what it returned."""
        if number <= len(self._steps):
            known, results, spec = self._steps[number - 1]
            if known is operator:
                return results, spec
        self.is_repeatable = False
        raise OtherWay

    def _leaf(self, found: Any, restored: Tensor | None) -> Any:
        if not isinstance(found, _Result):
            return found
        if restored is not None or found.kept is not None:
            return _alias(found.kept if restored is None else restored)
        unread = found.unread()
        reference = StorageWeakRef(unread.untyped_storage())
        self._unread[reference.cdata] = reference
        return unread

    def check(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Raise OtherWay for arguments that were not computed."""
        for value in _tensors((args, kwargs)) if self._unread else ():
            if StorageWeakRef(value.untyped_storage()).cdata in self._unread:
                self.is_repeatable = False
                raise OtherWay

    def move(self) -> None:
        """Start at the goal from now on, and forget results that are not needed there."""
        self.start, self._restored = self._goal, {}
        kept = {number: self._needed(number, values) for number, values in self._kept.items()}
        self._kept = {
            number: values for number, values in kept.items() if any(v is not None for v in values)
        }

    def _needed(self, number: int, values: list[Any]) -> list[Tensor | None]:
        """Return those results of an operator that operators from the goal on need, else None."""
        results = self._steps[number - 1][1]
        return [
            value
            if isinstance(it, _Result) and self._last.get(it.memory, 0) >= self._goal
            else None
            for it, value in zip(results, values, strict=False)
        ]


def _alias(value: Tensor | None) -> Tensor:
    with below_autograd():  # which takes no tensor twice
        found: Tensor = torch.ops.aten.alias(value)
        return found


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


@cache
def _writes(operator: OpOverload) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator writes to."""
    return tuple(
        number
        for number, argument in enumerate(schema_of(operator).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
