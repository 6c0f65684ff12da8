"""Uses of a network's weights in one forward: which products read which elements of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from l0prune.capture.compat import OpOverload, schema_of
from l0prune.features.unlabelled.lockstep import Read, Reader, View, Weights, forwards

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass
class Uses:
    """Uses of the weights in one forward.

    Attributes:
        readers: the products, by what they read.
        norms: each BatchNorm, by the names of its tensors.
        used: names of tensors that operators other than products read.
        followed: by what products read, what comes after each call: the BatchNorm that reads its
            result, or the vector of the network that is added to it.
        last: the latest view of the last product's result, and what that product reads.
        made: by id, the results of operators, and the operators' numbers.
    """

    weights: Weights
    readers: dict[View, Reader] = field(default_factory=dict)
    norms: set[tuple[str, ...]] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    followed: dict[View, list[tuple[str, ...] | View]] = field(
        default_factory=lambda: defaultdict(list)
    )
    last: tuple[Tensor, View] | None = None
    made: dict[int, tuple[ReferenceType[Tensor], int]] = field(default_factory=dict)
    count: int = 0

    def note(self, operator: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Record an operator that multiplies with no weight."""
        self.count += 1
        if isinstance(result, Tensor):
            self.made[id(result)] = ref(result), self.count
        norm = norm_of(operator, args, self.weights)
        if norm is not None:
            self.norms.add(norm)
        added = None
        is_seen_otherwise = _is_view(operator) or operator == torch.ops.aten._unsafe_view.default
        if self.last is not None and any(arg is self.last[0] for arg in args):
            last, of = self.last
            if norm is not None and args[0] is last:
                self.followed[of].append(norm)
            if operator in _SUMS:
                other = args[args[0] is last]
                self.readers[of].stream = self._number(other, last)
                added = self.weights.view(other)
                if added is not None and added.shape == last.shape[-1:] and _is_plain(of, added):
                    self.followed[of].append(added)
                else:
                    added = None
            if is_seen_otherwise:
                self.last = result, of
        if norm is None and not is_seen_otherwise:
            names = {name for arg in args if (name := self.weights.name(arg)) is not None}
            self.used |= names if added is None else names - {added.name}

    def _number(self, value: Any, like: Tensor) -> int:
        """Return the number of the operator that returned a tensor of this shape, else 0."""
        made, number = self.made.get(id(value), (None, 0))
        is_it = made is not None and made() is value
        return number if is_it and value.shape == like.shape else 0

    def read(self, read: Read) -> None:
        """Record a product with a weight."""
        outputs = read.product.matrix(read.weight)[:, 0].numel()
        fits = read.bias is not None and read.bias.numel() == outputs and read.bias.is_contiguous()
        bias = self.weights.view(read.bias) if fits else None
        reader = self.readers.setdefault(
            read.view, Reader(read.name, read.product.matrix, bias=bias)
        )
        reader.calls += 1
        reader.rows += read.rows
        reader.bias = bias if bias == reader.bias else None
        self.count += 1
        self.last = read.run(), read.view
        self.made[id(read.out)] = ref(self.last[0]), self.count

    def settle(self) -> None:
        """Leave out readers whose weight is used otherwise, and biases and norms of several."""
        biases = Counter(reader.bias for reader in self.readers.values())
        after = Counter(each for found in self.followed.values() for each in set(found))
        for view, reader in self.readers.items():
            if reader.bias is not None and (
                biases[reader.bias] > 1 or reader.bias.name in self.used
            ):
                reader.bias = None
            found = self.followed[view]
            if len(found) == reader.calls and len(set(found)) == 1 and after[found[0]] == 1:
                if not isinstance(found[0], View):
                    reader.norm = found[0]
                elif found[0].name not in self.used:
                    reader.added = found[0]
            others = [other for other in self.readers if other.name == view.name]
            reader.is_alone = not _overlap(self.weights.tensors[view.name], view, others)
        self.readers = {v: r for v, r in self.readers.items() if v.name not in self.used}


def _is_plain(view: View, added: View) -> bool:
    """Return whether a vector is added along the outputs of a product of matrices."""
    return view.form[0] == "matmul" and added.strides in ((1,), (0,))


def _overlap(tensor: Tensor, view: View, others: list[View]) -> bool:
    """Return whether a view reads an element twice, or one that another view reads, too."""
    if any(size > 1 and not stride for size, stride in zip(view.shape, view.strides, strict=True)):
        return True
    if len(others) == 1:
        return False
    reads = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bool).zero_()
    reads.as_strided(view.shape, view.strides, view.begin).fill_(True)
    return any(
        bool(reads.as_strided(other.shape, other.strides, other.begin).any())
        for other in others
        if other != view
    )


def norm_of(
    operator: OpOverload, args: tuple[Any, ...], weights: Weights
) -> tuple[str, ...] | None:
    """Return the names of a BatchNorm's weight, bias, mean and variance.

    None for another operator, or a norm without running statistics.
    """
    if "batch_norm" not in operator.name() or len(args) < 5:
        return None
    names = tuple(weights.name(arg) or "" for arg in args[1:5])
    return names if names[2] and names[3] else None


def _is_view(operator: OpOverload) -> bool:
    """Return whether the result is a view of an argument."""
    aliased = [
        arg.alias_info for arg in schema_of(operator).arguments if arg.alias_info is not None
    ]
    return bool(aliased) and not any(info.is_write for info in aliased)


def uses_of(model: nn.Module, batch: Any) -> Uses:
    """Return the uses of a model's weights in the forward of a batch; the model in eval mode."""
    uses = Uses(Weights(model))
    with forwards(model, [batch], uses.weights, note=uses.note) as (forward,):
        while (read := forward.advance()) is not None:
            uses.read(read)
    uses.settle()
    return uses
