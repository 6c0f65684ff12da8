"""Sizes that a user's own modules remember: ``num_heads``, ``head_dim``, ``hidden_size``…

Where a module's code gives such a number to an operator, that says what it stands for. Of others it
is guessed from name and value. A guess costs nothing: the resized class counts only if it is shown
to compute the same. What no forward reads is told by the tensors beside it, or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from math import prod
from operator import ne
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from l0prune.capture.provenance import is_within, within
from l0prune.exporting.slicing.chosen import Chosen
from l0prune.files.given_sizes import GIVEN
from l0prune.infer.own_code import SCALED
from l0prune.plan.code import PARTS, ReusedSize, SizedCall
from l0prune.plan.layout import axes_of, size_of
from l0prune.plan.plan import Plan

# Kinds of sizes, each with what the name of an attribute for it contains.
_NAMES = {
    "head": ("head",),
    "head_dim": ("head_dim", "head_size", "kv_dim", "key_dim", "val_dim", "dim_head"),
    "group": ("group",),
    "": ("dim", "size", "channel", "feature", "width", "plane", "hidden", "embed", "units"),
}

Sizes = set[tuple[str, int, int]]  # kind, old size, new size


def sizes_in_code(
    model: nn.Module, plan: Plan, kept: Tensor, *, by_kind: bool
) -> dict[str, dict[str, int]]:
    """By module path, the integer attributes that its code seems to give as sizes, and the new.

    Of several with one value those that are called like a size, if any is: ``head_dim`` is, and a
    ``reduction_ratio`` is not.

    Args:
        model: the user's ungated module at its old sizes.
        plan: its plan.
        kept: the slots that stay, bool, flat.
        by_kind: of several that are called like a size only those that are called like one of this
            kind, if any is: of a ``head_dim`` and a ``dim_key`` the latter may be for a scale.
    """
    found = {}
    for path, dims in plan.code.sizes.items():
        sizes: Sizes = set()
        for dim in dims:
            left = int(plan.mask(dim, kept).sum()) if axes_of(dim) else size_of(dim)
            kinds = {plan.axes[number].kind for number in axes_of(dim)}
            kind = kinds.pop() if len(kinds) == 1 else ""
            sizes |= {(each, size_of(dim), left) for each in {kind if kind in _NAMES else "", ""}}
        numbers = {n: v for n, v in vars(model.get_submodule(path)).items() if type(v) is int}
        changes = {
            name: new
            for name in _likely(numbers, sizes, by_kind)
            if (new := _size_in_code(name, numbers[name], sizes)) != numbers[name]
        }
        if changes:
            found[path] = changes
    return found


def _likely(numbers: Mapping[str, int], sizes: Sizes, by_kind: bool) -> Iterator[str]:
    """Of the attributes with one value those that are called like a size; all, if none is."""
    for value in dict.fromkeys(numbers.values()):
        names = [name for name, other in numbers.items() if other == value]
        kinds = {kind for kind, old, _ in sizes if kind and old == value} if by_kind else set()
        ways = [{part for kind in kinds for part in _NAMES[kind]}, set(chain(*_NAMES.values()))]
        found = ([n for n in names if any(part in n.lower() for part in way)] for way in ways)
        yield from next(filter(None, found), names)


def _size_in_code(name: str, value: int, sizes: Sizes) -> int:
    """What the one size of this value becomes; by its name where there are several.

    Of a value that no size has, sizes may be equal parts: ``x.split(self.width // 2)``.
    """
    for parts in PARTS:
        news = {new * parts for _, old, new in sizes if old * parts == value}
        if len(news) == 1:
            return news.pop()
        if news:
            return _new_size(name, value, sizes, largest=False)
    return value


def remembered_sizes(
    model: nn.Module, plan: Plan, kept: Tensor, *, largest: bool
) -> dict[str, dict[str, int]]:
    """By module path, the integer attributes that seem to repeat a size, with the new size.

    Where a number may stand for a size that stays as well as for one that changes (a width that
    is also heads × head_dim), a ``largest`` guess is the one that changes.

    Args:
        model: the user's ungated module at its old sizes.
        plan: its plan.
        kept: the slots that stay, bool, flat.
    """
    below = _sizes_below(plan, kept)
    found = {}
    for path, module in model.named_modules():
        if _is_torchs(module):
            continue  # torch's own are known, not guessed
        changes = {
            name: new
            for name, value in vars(module).items()
            if type(value) is int and (new := _new_size(name, value, below[path], largest)) != value
        }
        if changes:
            found[path] = changes
    return found


def _sizes_below(plan: Plan, kept: Tensor) -> dict[str, Sizes]:
    """For each module path the sizes of all axes and dims of the tensors in it and below."""
    below: dict[str, Sizes] = defaultdict(set)
    for tensor, dims in plan.tensors.items():
        sizes: Sizes = set()
        for dim in dims:
            left = int(plan.mask(dim, kept).sum()) if axes_of(dim) else size_of(dim)
            sizes.add(("", size_of(dim), left))
            for number in axes_of(dim):
                axis = plan.axes[number]
                kind = axis.kind if axis.kind in _NAMES else ""
                sizes.add((kind, axis.size, int(kept[axis.slice].sum())))
        path = tensor
        while path:
            path = path.rpartition(".")[0]
            below[path] |= sizes
    return below


def _new_size(name: str, value: int, sizes: Sizes, largest: bool) -> int:
    """The size that the attribute has after the cut; its value where that is not clear."""
    for kind in sorted(_NAMES, key=len, reverse=True):  # head_dim before head
        if any(part in name.lower() for part in _NAMES[kind]):
            news = {new for k, old, new in sizes if old == value and k == kind}
            news -= {value} if largest else set()
            return news.pop() if len(news) == 1 else value
    return value


def told_sizes(
    model: nn.Module, plan: Plan, kept: Tensor
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Sizes that modules keep for others: ``num_features``, off which a new head is made.

    Nothing in a forward shows what such a number stands for. It is taken for the size of the dims
    that have it of the tensors nearest below the module, if all of these keep equally many
    positions. An attribute of which other modules of its class have a value that is no size at all
    is none either.

    Args:
        model: the user's ungated module at its old sizes.
        plan: its plan.
        kept: the slots that stay, bool, flat.

    Returns:
        By module path the attributes with their new sizes; and the names of those that stand for
        dims of which some are cut, and not all alike.
    """
    places: dict[tuple[type, str], list[tuple[str, int]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, value in () if _is_torchs(module) else vars(module).items():
            if type(value) is int and not name.startswith("_"):
                places[type(module), name].append((path, value))
    sizes = {
        tensor: {(size_of(dim), int(plan.mask(dim, kept).sum())) for dim in dims}
        for tensor, dims in plan.tensors.items()
    }
    cut = {size for each in sizes.values() for size, left in each if left != size}
    told: dict[str, dict[str, int]] = defaultdict(dict)
    unclear = []
    for (_, name), those in places.items():
        if cut.isdisjoint(value for _, value in those):
            continue
        news = [_nearest(sizes, path, value) for path, value in those]
        for (path, value), found in zip(those, news, strict=True) if all(news) else ():
            if len(found) > 1:
                unclear.append(within(path, name))
            elif found != {value}:
                told[path][name] = next(iter(found))
    return dict(told), unclear


def _nearest(sizes: Mapping[str, set[tuple[int, int]]], path: str, size: int) -> set[int]:
    """New sizes of the dims of this size, of the tensors fewest modules below the path."""
    below: dict[int, set[int]] = defaultdict(set)
    for tensor, found in sizes.items():
        if is_within(tensor, path):
            below[tensor.count(".")] |= {left for old, left in found if old == size}
    return next((news for _, news in sorted(below.items()) if news), set())


def given_sizes(model: nn.Module, plan: Plan, kept: Tensor) -> dict[str, dict[str, Any]]:
    """By module path, the sizes that calls of its code have to be given, as an attribute.

    Modules of torch's own are known otherwise, and a graph has its numbers written anew.

    Args:
        model: the user's ungated module at its old sizes.
        plan: its plan.
        kept: the slots that stay, bool, flat.
    """
    found = {}
    apart = {reused.module for reused in _now_apart(plan, kept)}
    for path, calls in plan.code.calls.items():
        kinds = [(call.name, call.count) for call in calls]
        old, new = (
            [[None if dim is None else size(dim) for dim in call.sizes] for call in calls]
            for size in (size_of, lambda dim: int(plan.mask(dim, kept).sum()))
        )
        changed = {kind for kind, *sizes in zip(kinds, old, new, strict=True) if ne(*sizes)}
        if path in apart:
            changed |= set(kinds)
        # Code may have the size of a head as that of another dim over the number of heads.
        changed |= {kind for kind in kinds if kind[0] == SCALED}
        if changed and not _is_torchs(model.get_submodule(path)):
            found[path] = {
                GIVEN: [
                    [*kind, _given(call, *sizes)]
                    for call, kind, *sizes in zip(calls, kinds, old, new, strict=True)
                    if kind in changed
                ]
            }
    return found


def _given(call: SizedCall, old: list[Any], new: list[Any]) -> list[Any]:
    """What a call is given, as ``GivenSizes`` has it."""
    if call.name in ("mean", "layer_norm") and None not in new:
        return [prod(new), prod(old)]
    if call.name in ("scaled_dot_product_attention", SCALED):
        return old
    return [-1 if place == call.follows else size for place, size in enumerate(new)]


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") or isinstance(module, GraphModule)


def known_cause(chosen: Chosen) -> str:
    """Why the class may be wrong, as a sentence: what its code takes off sizes that differ by now.

    It is a weight's own mean or norm, or one size that stands for two dims. Else empty.
    """
    plan, kept = chosen.plan, chosen.kept
    for name in plan.code.standardised:
        if not all(plan.mask(dim, kept).all() for dim in plan.tensors[name][1:] if axes_of(dim)):
            return f"{name} is standardised over its inputs in each forward, and some are gone"
    return next((reused.text(plan.names) for reused in _now_apart(plan, kept)), "")


def _now_apart(plan: Plan, kept: Tensor) -> Iterator[ReusedSize]:
    """Where the code has one size for two dims that differ once the others are cut."""
    for reused in plan.code.reused:
        left = int(plan.mask(reused.used, kept).sum())
        read = reused.read
        known = size_of(reused.used) if read is None else int(plan.mask(read, kept).sum())
        if left != known:
            yield reused
