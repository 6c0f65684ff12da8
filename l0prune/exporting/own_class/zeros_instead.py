"""What the last module of a branch that is gone gives instead: nothing, or zeros of some shape."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from l0prune.exporting.own_class.windows import windows_to
from l0prune.exporting.slicing.chosen import Chosen
from l0prune.files.pretrained.cut_layers import sizes_after
from l0prune.infer.ending import Ending
from l0prune.infer.nodes import shape_of
from l0prune.infer.parts import Part
from l0prune.plan.layout import leaves, size_of


@dataclass(frozen=True)
class Channels:
    """How many channels there were, and how many are left."""

    before: int
    left: int


def channels_of(part: Part, chosen: Chosen, join: Node) -> Channels | None:
    """Of what a sum gives: the one dim of it that may be cut; None if that is not one."""
    layouts = part.analysis.layouts.get(join.name, ())
    found = [layout for layout in layouts if any(True for _ in leaves(layout))]
    if len(found) != 1:
        return None
    (layout,) = found
    return Channels(size_of(layout), int(chosen.plan.mask(layout, chosen.kept).sum()))


def instead(
    ending: Ending,
    starts: Set[Node],
    before: Set[Node],
    stream: Channels | None,
    kept: Sequence[int] | None,
) -> dict[str, Any]:
    """What its last module gives if it is handed what the first one took: nothing, or zeros.

    ``y += x`` takes zeros of the shape that the sum has; ``y + x`` takes one zero as well, which
    stands where it is not known how that shape comes of the input's. Code that puts windows
    together takes zeros of the shape that it has in them.

    Args:
        ending: where the branch ends.
        starts: what the module's part of it is made of, from outside.
        before: what it is made of.
        stream: channels of what it is added to.
        kept: the shape that its last module returns, if all of its modules keep that of an input.
    """
    if ending.axes:
        return {"gives": "nothing"}
    if kept is not None:
        return _zeros(*_dim_and_channels(kept, kept, stream))
    wanted, unknown = shape_of(ending.joins[0]) or [], {"gives": "zero"}
    for given in sorted(starts):
        given_sizes = shape_of(given)
        if given_sizes is None or len(given_sizes) != len(wanted):
            continue
        for windows in windows_to(ending.end, given, before):
            sizes = sizes_after(given_sizes, windows)
            dim, channels = _dim_and_channels(sizes, wanted, stream)
            if all(size == wanted[at] or (at == dim and dim) for at, size in enumerate(sizes)):
                return {**_zeros(dim, channels), "windows": windows}
    return unknown


def _zeros(dim: int, channels: int) -> dict[str, Any]:
    return {"gives": "zeros", "dim": dim, "channels": channels}


def _dim_and_channels(
    sizes: Sequence[int], wanted: Sequence[int], stream: Channels | None
) -> tuple[int, int]:
    """The dim of the channels, and how many a branch has there; zeros if it has those it is given.

    Args:
        sizes: of what it is given, as far as they are known to change.
        wanted: of what it gave, before anything was cut.
        stream: channels of what it is added to.
    """
    others = [dim for dim in range(1, len(wanted)) if sizes[dim] != wanted[dim]]
    if stream is None:
        return (others[0], wanted[others[0]]) if len(others) == 1 else (0, 0)
    fitting = [dim for dim in range(1, len(wanted)) if wanted[dim] == stream.before]
    fitting = [dim for dim in fitting if dim in others] or fitting
    return (fitting[0], stream.left) if len(fitting) == 1 else (0, 0)
