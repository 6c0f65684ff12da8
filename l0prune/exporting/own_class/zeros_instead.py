"""What the last module of a branch that is gone gives instead: nothing, or zeros of some shape.

What calls of modules show: which input each can give back in place of its own work.

What windows do to the sizes of positions: a convolution, a pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from l0prune.capture.copying import copied
from l0prune.capture.recording import Call, record
from l0prune.exporting.slicing.chosen import Chosen
from l0prune.files.cut_layers import Window, sizes_after
from l0prune.infer.nodes import arguments, operator_name, shape_of
from l0prune.infer.parts import Part
from l0prune.infer.regions import Ending
from l0prune.plan.layout import leaves, size_of


@dataclass(frozen=True)
class Called:
    """A module, as it is called.

    Attributes:
        at: which of its inputs it can give back, those by position first: the one that is shaped
            as what it returns, a class token, say, beside all others; else the first.
        results: how many it returns in a tuple, 0 if it returns a tensor.
        shape: of what it returns; None if none of its inputs has that.
    """

    at: int
    results: int
    shape: tuple[int, ...] | None


def called(plain: nn.Module, paths: Iterable[str], part: Part) -> dict[str, Called]:
    """By path, modules that have something to give back.

    Those that return neither a tensor nor a tuple lack, and those that are given nothing to pass
    on: no tensor at all, or, where they hold no parameters and so cost little, a mask alone.
    """
    names = {path.removeprefix(f"{part.path}."): path for path in paths}
    with torch.no_grad():
        calls = record(copied(plain.get_submodule(part.path)), list(names), part.example)
    return {
        names[call.path]: _of(call)
        for call in calls
        if isinstance(call.output, Tensor) or type(call.output) is tuple
        if _is_given_some(call, plain.get_submodule(names[call.path]))
    }


def _is_given_some(call: Call, module: nn.Module) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(call.inputs) if isinstance(leaf, Tensor)]
    if any(True for _ in module.parameters()):
        return bool(tensors)
    return any(tensor.is_floating_point() for tensor in tensors)


def _of(call: Call) -> Called:
    results = 0 if isinstance(call.output, Tensor) else len(call.output)
    shape = _shape(call.output[0] if results else call.output)
    args, kwargs = call.inputs
    inputs = (*args, *kwargs.values())
    at = next((at for at, given in enumerate(inputs) if shape and _shape(given) == shape), None)
    return Called(0 if at is None else at, results, None if at is None else shape)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


_POOLS = tuple(f"aten.{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3))
_CONVOLUTIONS = (*(f"aten.conv{n}d" for n in (1, 2, 3)), "aten.convolution")
_MOST = 8  # ways side by side: those of one block lead to the same sizes


def windows_to(end: Node, start: Node, between: Set[Node]) -> list[tuple[Window, ...]]:
    """The windows by which positions of one node come to those of another: some of the ways.

    Paths side by side are ways of their own, and so is a mean over all positions that multiplies
    the others: of its sizes nothing is left.

    Args:
        end: what is made of ``start``, by ``between``, itself among these.
        start: of other nodes.
        between: operators.
    """
    ways: dict[Node, list[tuple[Window, ...]]] = {start: [()]}
    for node in sorted(between):
        own = _windows(node)
        before = [way for each in node.all_input_nodes for way in ways.get(each, ())]
        if own is not None and before:
            ways[node] = list(dict.fromkeys((*way, *own) for way in before))[:_MOST]
    return ways.get(end, [])


def _windows(node: Node) -> tuple[Window, ...] | None:
    """The one that changes the sizes of positions here, if there is one.

    None where they change in another way than by kernel, stride, padding and dilation.
    """
    name = operator_name(node.target)
    if name not in _CONVOLUTIONS + _POOLS:
        return ()
    given = arguments(node)
    if given.get("transposed") or given.get("ceil_mode"):
        return None
    window = _window(given, name in _CONVOLUTIONS)
    stays = all(s == 1 and 2 * p == d * (k - 1) for k, s, p, d in zip(*window, strict=True))
    return () if stays else (window,)


def _window(given: dict[str, Any], is_convolution: bool) -> Window:
    kernel = (shape_of(given["weight"]) or [])[2:] if is_convolution else given["kernel_size"]
    dims = len(kernel)
    stride, dilation = _each(given["stride"] or kernel, dims), _each(given.get("dilation", 1), dims)
    padding = given["padding"]
    if padding == "same":  # sizes stay, as torch allows no stride then
        kernel, padding = (1,) * dims, 0
    return (tuple(kernel), stride, _each(0 if padding == "valid" else padding, dims), dilation)


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """One number for each dim."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


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
