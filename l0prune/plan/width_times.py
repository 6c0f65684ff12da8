"""Times of a runtime over the width of a layer, and the blocks of widths that follow from them.

A runtime computes some widths faster than smaller ones: ONNX Runtime pads channels to whole blocks
of 16 on a processor with AVX-512, and has no fast path at all for numbers that are no multiple of
4. How much a block of widths gains is read off the times of small networks of one kind of layer;
which kinds of layers an axis meets is known from the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from l0prune.plan.layout import Gated, axes_of
from l0prune.plan.plan import Cost, Plan
from l0prune.plan.switches import idle

BLOCKS = (1, 4, 8, 16, 32, 64)
LARGEST = 128  # slots: wider axes are taken for as fast, slot by slot, as one of this size
_PRICE = 0.1  # share of the time that a block must gain, per share of the axis that it is
_NARROWEST = 0.25  # share of an axis from which on widths count
_POINTS = 64

CONV, POINTWISE, DEPTHWISE = "conv", "pointwise", "depthwise"
OTHER_CONV, LINEAR = "other-conv", "linear"
"""Kinds of layers: a ``POINTWISE`` one has a kernel of 1, an ``OTHER_CONV`` no two spatial dims."""


@dataclass(frozen=True)
class WidthTimes:
    """Times of small networks over the width of their hidden layer, by kind of layer.

    Attributes:
        target: name of the runtime.
        origin: what the times are from, to be shown.
        times: milliseconds by width, by kind of layer; widths from 4 to ``LARGEST`` or more.
        macs: multiply-accumulates per millisecond, by kind of layer.
        memory: bytes that are read or written per millisecond.
    """

    target: str
    origin: str
    times: Mapping[str, Mapping[int, float]]
    macs: Mapping[str, float]
    memory: float

    def block(self, kinds: Collection[str], size: int) -> int:
        """Return the number of slots that an axis of this size opens and closes together.

        Kinds are those of the layers that it meets. A larger block is taken if widths that are
        rounded to it, up or down such that their mean is the same, take less time: by a tenth of
        the share of the axis that one block is. An axis of one block stays whole.
        """
        known = [self.times[kind] for kind in kinds if self.times.get(kind)]
        largest = min(size, LARGEST)
        if not known or largest <= BLOCKS[1]:
            return 1
        narrowest = max(min(filter(_is_odd, times)) for times in known)
        widths = np.linspace(max(narrowest, _NARROWEST * largest), largest, _POINTS)
        best, fastest = 1, _mean(known, widths, 1, largest)
        for block in BLOCKS[1:]:
            if block > largest:
                break
            time = _mean(known, widths, block, largest)
            if time < fastest * (1 - _PRICE * block / size):
                best, fastest = block, time
        return best

    def blocks(self, plan: Plan) -> list[int]:
        """Return for each axis of a plan how many of its slots open and close together."""
        kinds = kinds_of_layers(plan)
        return [
            self.block(kinds[number], axis.size) if has_width else 1
            for number, (axis, has_width) in enumerate(
                zip(plan.axes, have_widths(plan), strict=True)
            )
        ]

    def costs(self, plan: Plan, unit: str) -> list[Cost]:
        """Return estimated milliseconds as cost terms: of arithmetic, of weights, of values.

        They rank axes by the time that their slots take. A budget in milliseconds needs more, a
        table of times.
        """
        found = []
        for cost in plan.costs:
            kind = _kind(plan, cost.tensor) if cost.tensor in plan.tensors else LINEAR
            rate = self.macs.get(kind) or self.macs.get(LINEAR, 0.0)
            per = {"macs": 1 / rate if rate else 0.0, "params": 4 / self.memory}.get(cost.unit)
            if per:
                found.append(Cost(cost.owner, unit, per * cost.scale, cost.dims))
        found += [
            Cost(each.owner, unit, each.scale / self.memory, each.dims)
            for each in plan.activations
            if not each.is_fixed
        ]
        return found

    def describe(self, blocks: Sequence[int]) -> str:
        """Return a sentence that names these blocks of the axes of a plan, and their reason."""
        count = {block: sum(each == block for each in blocks) for block in sorted(set(blocks))}
        wide = [f"{block} ({n} of the axes)" for block, n in count.items() if block > 1]
        if not wide:
            return f"widths in any number of slots: no block is faster in {self.target}"
        return (
            f"widths in multiples of {', '.join(reversed(wide))}, which {self.target} computes "
            f"fastest ({self.origin}); round_to=1 leaves any"
        )


def are_in_blocks(plan: Plan, kept: Tensor, blocks: Sequence[int]) -> bool:
    """Return whether each axis that is cut keeps whole blocks; ``kept`` is bool and flat."""
    is_gone = idle(plan, kept)
    counts = [int(kept[axis.slice].sum()) for axis in plan.axes]
    return all(
        count % block == 0 or count == axis.size or bool(is_gone[axis.start])
        for axis, count, block in zip(plan.axes, counts, blocks, strict=True)
    )


def _mean(
    known: Sequence[Mapping[int, float]], wanted: np.ndarray, block: int, largest: int
) -> float:
    """Return the mean time of these widths if each is rounded to whole blocks, up or down.

    Each kind of layer counts alike. For a block of 1 all widths that were timed and are no
    multiples of 4 stand for any width.
    """
    total = 0.0
    for times in known:
        multiples = [w for w in times if (_is_odd(w) if block == 1 else w % block == 0)]
        used = sorted({*multiples, largest if largest in times else max(times)})
        at = [times[width] for width in used]
        total += float(np.interp(wanted, used, at).mean()) / times[max(times)]
    return total


def _is_odd(width: int) -> bool:
    """Return whether a width is no multiple of the least block."""
    return width % BLOCKS[1] != 0


def have_widths(plan: Plan) -> list[bool]:
    """Return for each axis whether its number of slots is a width of some tensor.

    It is none for heads, groups, branches and bits, and for single inputs that are cut beside whole
    maps.
    """
    fine = beside_maps(plan)
    return [
        axis.is_width and axis.kind not in ("head", "group") and number not in fine
        for number, axis in enumerate(plan.axes)
    ]


def beside_maps(plan: Plan) -> set[int]:
    """Return the axes, by number, of single inputs of a layer that are cut beside whole maps."""
    return {
        axis
        for site in plan.sites
        if isinstance(site.layout, Gated)
        for axis in axes_of(site.layout.fine)
    }


def kinds_of_layers(plan: Plan) -> list[set[str]]:
    """Return for each axis the kinds of the layers whose weights have it as a dim."""
    found: list[set[str]] = [set() for _ in plan.axes]
    for name in plan.roles:
        kind = _kind(plan, name)
        for dim in plan.tensors[name]:
            for number in axes_of(dim):
                found[number].add(kind)
    return found


def _kind(plan: Plan, tensor: str) -> str:
    """Return the kind of the layer that multiplies with this parameter."""
    dims = plan.tensors[tensor]
    if len(dims) < 3:
        return LINEAR
    if dims[1].size == 1 and axes_of(dims[0]) and not axes_of(dims[1]):
        return DEPTHWISE
    if len(dims) != 4:
        return OTHER_CONV
    return POINTWISE if dims[2].size == dims[3].size == 1 else CONV
