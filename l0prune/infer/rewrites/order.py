"""Slots that a forward puts in another order, after some of them are gone.

What is flipped stays flipped. A roll goes as far as slots are left of those that come first, and an
index names the slots that stay by their new places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from l0prune.infer.nodes import argument
from l0prune.infer.rewrites.literals import rewrites, stored_index
from l0prune.infer.rewrites.sizes import Sizes
from l0prune.plan.layout import size_of


@rewrites("aten.roll")
def roll(sizes: Sizes, node: Node) -> None:
    """Each shift is the number of slots that came first and stayed."""
    source, shifts = node.args[:2]
    assert isinstance(source, Node)
    dims, new = sizes.dims(source), []
    named: Any = argument(node, 2, "dims") or []
    for shift, dim in zip(shifts if named else (), named, strict=True):  # type: ignore[arg-type]
        size, mask = size_of(dims[dim]), sizes.mask(dims[dim])
        first = shift % size  # so many of the last come first
        new.append(int(mask[size - first :].sum()) if sizes.changes(dims[dim]) else shift)
    if named:
        node.update_arg(1, new)


@rewrites("aten.index", "aten.index_select")
def index(sizes: Sizes, node: Node) -> None:
    """A constant index is written anew, for the places that are left."""
    source = node.args[0]
    assert isinstance(source, Node)
    if node.name not in sizes.picks:
        return
    chosen: Any = node.args[1]
    by_list = isinstance(chosen, list | tuple)
    dim = next(n for n, i in enumerate(chosen) if i is not None) if by_list else int(chosen)
    mask = sizes.mask(sizes.dims(source)[dim])
    if bool(mask.all()):
        return
    positions = torch.tensor(sizes.picks[node.name])
    places = (mask.cumsum(0) - 1)[positions[mask[positions]]]
    with node.graph.inserting_before(node):
        new = stored_index(node, places, f"picked_by_{node.name}")
    if by_list:
        node.update_arg(1, [None if i is None else new for i in chosen])
    else:
        node.update_arg(2, new)
