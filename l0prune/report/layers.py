"""Layers of a model: possible cuts on their two sides, and their sizes after a cut."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from l0prune.capture.weights import Weight
from l0prune.plan.branch import is_needed
from l0prune.plan.cost import reachable
from l0prune.plan.layout import Const, Layout, constant_positions, leaves, outer
from l0prune.plan.plan import BITS, Cost, Plan
from l0prune.plan.switches import gone
from l0prune.report import content
from l0prune.report.content import Axis, Pair

UNGATED = "no gate was put on it"
UNUSED = "not used in eval mode"
UNKNOWN = "no operator that l0prune knows reads or writes it"


@dataclass(frozen=True, slots=True)
class Side:
    """The input or the output side of a layer.

    Attributes:
        size: number of neurons or channels.
        axes: names of the axes by which the side can be cut.
        share: share of the neurons or channels that belong to an axis, from 0 to 1.
        reason: why the rest stays whole; empty if there is none.
    """

    size: int
    axes: tuple[str, ...]
    share: float
    reason: str


@dataclass(frozen=True, slots=True)
class Layer:
    """Linear, convolution, embedding, or bare parameter that acts as one.

    Attributes:
        name: of the module, or of the parameter.
        kind: ``Linear``, ``Conv2d``, …; ``weight of MultiheadAttention`` for a bare parameter.
        shape: of the weight.
        input: the side that it reads.
        output: the side that it writes.
        params: parameters, the bias among them. Those of a weight that is tied to another
            layer's count there, and those that the eval-mode forward never touches nowhere.
        macs: multiply-accumulates of one example.
        params_reachable: the share of ``params`` that axes can remove.
        macs_reachable: the same of ``macs``.
        used: whether the eval-mode forward uses the layer.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    input: Side
    output: Side
    params: int
    macs: int
    params_reachable: float
    macs_reachable: float
    used: bool = True


def layers_of(
    plan: Plan, weights: Sequence[Weight], unused: Collection[str], otherwise: str = UNKNOWN
) -> tuple[Layer, ...]:
    """Return the layers with axes and pins of their sides; ``otherwise`` is the default reason."""
    costs = costs_of(plan, weights)
    return tuple(_layer(plan, w, costs[w.name], unused, otherwise) for w in weights)


def _layer(
    plan: Plan, weight: Weight, costs: list[Cost], unused: Collection[str], otherwise: str
) -> Layer:
    names = [plan.aliases.get(name, name) for name in weight.tensors]
    used = not names or names[0] not in unused
    sides = Sides(plan, weight, otherwise).both() if used else (_unused(weight),) * 2
    params = [cost for cost in costs if cost.unit == "params"]
    macs = [cost for cost in costs if cost.unit == "macs"]
    return Layer(
        weight.name,
        weight.kind,
        weight.shape,
        *sides,
        _count(params),
        _count(macs),
        reachable(params),
        reachable(macs),
        used,
    )


def _unused(weight: Weight) -> Side:
    return Side(prod(weight.shape), (), 0.0, UNUSED)


def _count(costs: list[Cost]) -> int:
    return round(sum(cost.scale * prod(dim.size for dim in cost.dims) for cost in costs))


def costs_of(plan: Plan, weights: Sequence[Weight]) -> dict[str, list[Cost]]:
    """Return the costs of each layer; each cost belongs to one layer at most.

    If two layers share a weight, MACs belong to the layer that computes them.
    """
    holders: dict[str, list[str]] = {}
    for weight in weights:
        for name in weight.tensors:
            holders.setdefault(plan.aliases.get(name, name), []).append(weight.name)
    costs: dict[str, list[Cost]] = {weight.name: [] for weight in weights}
    for cost in plan.costs:
        layers = holders.get(cost.tensor, [])
        if cost.owner in costs and (cost.owner in layers or not cost.tensor):
            costs[cost.owner].append(cost)
        elif layers:
            costs[layers[0]].append(cost)
    return costs


class Sides:
    """The two sides of a layer in a plan."""

    def __init__(self, plan: Plan, weight: Weight, otherwise: str = UNKNOWN) -> None:
        self.plan, self.weight, self._otherwise = plan, weight, otherwise
        names = [plan.aliases.get(name, name) for name in weight.tensors]
        # A weight that the forward computes is no parameter: one of equal shape is used instead.
        alike = [n for n in names if len(plan.tensors.get(n, ())) == len(weight.shape)]
        missing = (n for n in names[:1] if n not in plan.tensors)  # captured in no part
        self.tensor = next((n for n in alike if self._is_alike(n)), next(missing, ""))

    def _is_alike(self, name: str) -> bool:
        return tuple(dim.size for dim in self.plan.tensors[name]) == self.weight.shape

    def both(self) -> tuple[Side, Side]:
        """Return the input side and the output side."""
        reads, writes = self._dims()
        return self._side(reads), self._side(writes)

    def layouts(self) -> tuple[list[Layout], list[Layout]]:
        """Return the layouts of the input and output side, whose sizes multiply to the side's."""
        reads, writes = self._dims()
        return self._layouts(reads), self._layouts(writes)

    def _dims(self) -> tuple[list[int], list[int]]:
        """Return the weight's dims of each side; the groups in dim 0 count for that of dim 1."""
        if self.weight.dims is None:
            return self._by_role()
        read, write = self.weight.dims
        if self.weight.groups == 1:
            return [read], [write]
        # dim 0 contains the groups, of inputs in a transposed convolution, else of outputs
        return ([0], [1, 0]) if read == 0 else ([1, 0], [0])

    def _by_role(self) -> tuple[list[int], list[int]]:
        """Return the dims of a bare parameter that are read and written; all for both if unknown.

        A dim without axis or pin, such as a kernel's height, is neither.
        """
        roles = self.plan.roles.get(self.tensor, ())
        reads = [dim for dim, role in enumerate(roles) if role == "read"]
        writes = [dim for dim, role in enumerate(roles) if role == "write"]
        every = [dim for dim, size in enumerate(self.weight.shape) if size > 1]
        rest = [dim for dim in every if dim not in reads + writes and self._is_known(dim)]
        return reads or rest or writes or every, writes or rest or reads or every

    def _is_known(self, dim: int) -> bool:
        """Return whether an axis or a pin is known for the dim."""
        where = f"{self.tensor} dim {dim}"
        return any(leaves(self._layout(dim))) or any(pin.where == where for pin in self.plan.pins)

    def _layouts(self, dims: list[int]) -> list[Layout]:
        if self.weight.groups > 1 and dims == [1, 0]:
            return [outer(self._layout(0), self.weight.groups), self._layout(1)]
        return [self._layout(dim) for dim in dims]

    def _side(self, dims: list[int]) -> Side:
        layouts = self._layouts(dims)
        size = prod(dim.size for dim in layouts)
        whole = prod(map(constant_positions, layouts))
        numbers = dict.fromkeys(leaf.axis for each in layouts for leaf in leaves(each))
        names = tuple(self.plan.axes[number].name for number in numbers)
        share = 1 - whole / size if size else 0.0
        return Side(size, names, share, self._reason(dims, size) if whole else "")

    def _layout(self, dim: int) -> Layout:
        of = self.plan.tensors.get(self.tensor, ())
        return of[dim] if of else Const(self.weight.shape[dim])

    def _reason(self, dims: list[int], size: int) -> str:
        if size == 1:
            return "it is a single slot"
        places = list(self._places(dims))
        reasons = {pin.where: pin.reason for pin in reversed(self.plan.pins)}
        return next(
            (reasons[place] for place in places if place in reasons),
            self._otherwise,
        )

    def _places(self, dims: list[int]) -> Iterator[str]:
        """Yield the places of the pins of these dims, the most specific first."""
        for name in (self.tensor, f"{self.weight.name} (computed weight)"):
            for dim in dims:
                yield f"{name} dim {dim}"


def axes_before_and_after(plan: Plan, kept: Tensor) -> list[Axis]:
    """Return the axes with their widths before and after a cut to the slots ``kept``, bool, flat.

    For heads, the indices of the kept ones are included.
    """
    found = []
    for axis in plan.axes:
        if axis.kind == BITS:
            continue  # such axes come last, so that no index of a report's axes shifts
        left = kept[axis.slice].nonzero().flatten().tolist()
        slots = left if axis.kind == "head" else None
        found.append(
            Axis(name=axis.name, kind=axis.kind, before=axis.size, after=len(left), kept=slots)
        )
    return found


def layers_before_and_after(
    plan: Plan, kept: Tensor, weights: Sequence[Weight], otherwise: str = UNGATED
) -> list[content.LayerChange]:
    """Return widths, params and MACs of each layer before and after a cut."""
    counted = {cost.tensor for cost in plan.costs if cost.unit == "params"}
    of_all = {plan.aliases.get(name, name) for weight in weights for name in weight.tensors}
    found = layers_of(plan, weights, of_all - counted, otherwise)
    costs = costs_of(plan, weights)
    numbers = {axis.name: number for number, axis in enumerate(plan.axes)}
    pairs = zip(weights, found, strict=True)
    layers = {w.name: _layer_cut(plan, kept, w, of, costs[w.name], numbers) for w, of in pairs}
    return [layers[name] for name in _in_order(plan, costs)]


def _in_order(plan: Plan, costs: dict[str, list[Cost]]) -> list[str]:
    """Return the layers' names in the order of their first use; unused ones come last."""
    places = {id(cost): place for place, cost in enumerate(plan.costs)}
    first = {
        name: min((places[id(each)] for each in of), default=len(places))
        for name, of in costs.items()
    }
    return sorted(costs, key=first.__getitem__)


def _layer_cut(
    plan: Plan,
    kept: Tensor,
    weight: Weight,
    found: Layer,
    costs: Sequence[Cost],
    numbers: dict[str, int],
) -> content.LayerChange:
    layouts = Sides(plan, weight).layouts() if found.used else ([], [])
    sides = [
        _side_cut(plan, kept, side, of, numbers)
        for side, of in zip((found.input, found.output), layouts, strict=True)
    ]
    branch = _gone_with(plan, kept, costs)
    if branch:
        why = f"the branch {branch} is gone"
        sides = [side.model_copy(update={"after": 0, "reason": why}) for side in sides]
    return content.LayerChange(
        name=found.name,
        kind=found.kind,
        input=sides[0],
        output=sides[1],
        params=Pair(before=found.params, after=_amount(plan, kept, costs, "params")),
        macs=Pair(before=found.macs, after=_amount(plan, kept, costs, "macs")),
    )


def _gone_with(plan: Plan, kept: Tensor, costs: Sequence[Cost]) -> str:
    """Return the removed branch that contained the whole layer; empty if there is none."""
    names = gone(plan, kept)
    mine = [cost.needed for cost in costs if cost.unit == "params"]
    if not mine or any(is_needed(of, names) for of in mine):
        return ""
    return next(name for name in names if any(name in each for of in mine for each in of))


def _side_cut(
    plan: Plan, kept: Tensor, side: Side, layouts: Sequence[Layout], numbers: dict[str, int]
) -> content.SideChange:
    """Return the change of a side; of several dims (positions × channels) count those with an axis.

    A side without any counts as a whole.
    """
    cut = [layout for layout in layouts if any(leaves(layout))]
    before, after = side.size, side.size
    if cut:
        before, after = prod(dim.size for dim in cut), _left(plan, kept, cut)
    axes = [numbers[name] for name in side.axes]
    return content.SideChange(before=before, after=after, axes=axes, reason=side.reason)


def _left(plan: Plan, kept: Tensor, layouts: Sequence[Layout]) -> int:
    return prod(int(plan.mask(layout, kept).sum()) for layout in layouts)


def _amount(plan: Plan, kept: Tensor, costs: Sequence[Cost], unit: str) -> int:
    of_unit = (cost for cost in costs if cost.unit == unit)
    return round(sum(cost.scale * _left(plan, kept, cost.dims) for cost in of_unit))
