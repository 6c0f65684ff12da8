"""Every layer of a model, with what may be cut on its two sides or why it stays whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from l0prune.cost.model import reachable
from l0prune.plan.gate_index import constant_positions
from l0prune.plan.layout import Const, Layout, leaves, outer, size_of
from l0prune.plan.plan import Cost, Plan

UNUSED = "not used in eval mode"
_KINDS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Embedding, nn.EmbeddingBag),
)


@dataclass(frozen=True, slots=True)
class Side:
    """The input or the output side of a layer.

    Attributes:
        size: how many neurons or channels there are.
        axes: names of the axes that can take some of them away.
        share: the part of them that belongs to an axis, from 0 to 1.
        reason: why the rest stays whole; empty where there is no rest.
    """

    size: int
    axes: tuple[str, ...]
    share: float
    reason: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A Linear, a convolution, an embedding, or a parameter of its own that acts as one.

    Attributes:
        name: of the module, or of the parameter.
        kind: ``Linear``, ``Conv2d``, …; ``weight of MultiheadAttention`` for a bare parameter.
        shape: of the weight.
        input: the side that it reads.
        output: the side that it writes.
        params: parameters, the bias among them. Those of a weight that is tied to another
            layer's count there, and those that the eval-mode forward never touches nowhere.
        macs: multiply-accumulates of one example.
        params_reachable: the share of ``params`` that some axis can take away.
        macs_reachable: the same of ``macs``.
        used: whether the eval-mode forward touches it.
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


@dataclass(frozen=True, slots=True)
class Weight:
    """What is known of a layer before any analysis.

    ``tensors`` are its parameters, those first that are shaped like its weight. ``dims`` are the
    weight's input and output dims, None where only the graph can tell.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    dims: tuple[int, int] | None
    groups: int = 1


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """Every Linear, convolution and embedding of the model, and every other matrix in it."""
    found: list[Weight] = []
    claimed: set[str] = set()
    for name, module in model.named_modules():
        kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
        if kind is not None:
            weight = _weight(name, module, kind)
            claimed.update(weight.tensors)
            found.append(weight)
    for name, parameter in model.named_parameters():
        if name not in claimed and sum(size > 1 for size in parameter.shape) > 1:
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            found.append(Weight(name, f"weight of {owner}", tuple(parameter.shape), (name,), None))
    return tuple(found)


def _weight(name: str, module: nn.Module, kind: type[nn.Module]) -> Weight:
    """A module as a weight; one that is computed in forward has the module's own sizes."""
    if isinstance(module, _ConvNd):
        pair = (module.in_channels, module.out_channels)
        dims = (0, 1) if isinstance(module, _ConvTransposeNd) else (1, 0)
        sizes = {dims[0]: pair[0], dims[1]: pair[1]}
        sizes[1] //= module.groups
        shape, groups = (sizes[0], sizes[1], *module.kernel_size), module.groups
    elif isinstance(module, nn.Linear):
        shape, dims, groups = (module.out_features, module.in_features), (1, 0), 1
    else:
        assert isinstance(module, nn.Embedding | nn.EmbeddingBag)
        shape, dims, groups = (module.num_embeddings, module.embedding_dim), (0, 1), 1
    path = f"{name}." if name else ""
    named = [(path + leaf, p) for leaf, p in module.named_parameters()]
    named.sort(key=lambda each: tuple(each[1].shape) != shape)
    return Weight(name, kind.__name__, shape, tuple(n for n, _ in named), dims, groups)


def layers_of(plan: Plan, weights: Sequence[Weight], unused: Collection[str]) -> tuple[Layer, ...]:
    """What the plan says of each layer."""
    costs = _costs(plan, weights)
    return tuple(_layer(plan, weight, costs[weight.name], unused) for weight in weights)


def _layer(plan: Plan, weight: Weight, costs: list[Cost], unused: Collection[str]) -> Layer:
    names = [plan.aliases.get(name, name) for name in weight.tensors]
    used = not names or names[0] not in unused
    sides = _Sides(plan, weight, names).both() if used else (_unused(weight),) * 2
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
    return round(sum(cost.scale * prod(map(size_of, cost.dims)) for cost in costs))


def _costs(plan: Plan, weights: Sequence[Weight]) -> dict[str, list[Cost]]:
    """The costs of each layer, each cost with one layer at most.

    Where two layers share a weight, work is with the layer that does it.
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


class _Sides:
    """The two sides of a layer whose parameters have these names in the plan."""

    def __init__(self, plan: Plan, weight: Weight, names: list[str]) -> None:
        self.plan = plan
        self.weight = weight
        # a weight that the forward computes is no parameter: one of its shape speaks for it
        alike = [n for n in names if len(plan.tensors.get(n, ())) == len(weight.shape)]
        missing = (n for n in names[:1] if n not in plan.tensors)  # what no part captured
        self.tensor = next((n for n in alike if self._is_alike(n)), next(missing, ""))

    def _is_alike(self, name: str) -> bool:
        return tuple(map(size_of, self.plan.tensors[name])) == self.weight.shape

    def both(self) -> tuple[Side, Side]:
        """The input side and the output side."""
        if self.weight.dims is None:
            reads, writes = self._by_role()
            return self._side(reads), self._side(writes)
        read, write = self.weight.dims
        if self.weight.groups == 1:
            return self._side([read]), self._side([write])
        # dim 0 holds the groups, of inputs in a transposed convolution, else of outputs
        sides = [self._side([0]), self._side([1], grouped=True)]
        return (sides[0], sides[1]) if read == 0 else (sides[1], sides[0])

    def _by_role(self) -> tuple[list[int], list[int]]:
        """Which dims of a bare parameter are read and written: both all of them if none says.

        A kernel's height, of which nobody says anything, is neither.
        """
        roles = self.plan.roles.get(self.tensor, ())
        reads = [dim for dim, role in enumerate(roles) if role == "read"]
        writes = [dim for dim, role in enumerate(roles) if role == "write"]
        every = [dim for dim, size in enumerate(self.weight.shape) if size > 1]
        rest = [dim for dim in every if dim not in reads + writes and self._is_known(dim)]
        return reads or rest or writes or every, writes or rest or reads or every

    def _is_known(self, dim: int) -> bool:
        """Does an axis or a pin speak of the dim?"""
        where = f"{self.tensor} dim {dim}"
        return any(leaves(self._layout(dim))) or any(pin.where == where for pin in self.plan.pins)

    def _side(self, dims: list[int], grouped: bool = False) -> Side:
        layouts = [self._layout(dim) for dim in dims]
        if grouped:
            layouts.insert(0, outer(self._layout(0), self.weight.groups))
            dims = [*dims, 0]
        size, whole = (prod(map(count, layouts)) for count in (size_of, constant_positions))
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
            "no operator that l0prune knows reads or writes it",
        )

    def _places(self, dims: list[int]) -> Iterator[str]:
        """What pins of these dims are called, most telling first."""
        for name in (self.tensor, f"{self.weight.name} (computed weight)"):
            for dim in dims:
                yield f"{name} dim {dim}"
