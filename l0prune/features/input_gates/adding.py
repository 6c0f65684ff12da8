"""Input gates: choice of the blocks that get them, and their widths, readers and MACs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from l0prune.capture.capture import Captured
from l0prune.capture.example_inputs import record
from l0prune.capture.model_checks import check_module
from l0prune.capture.provenance import is_within, modules_of
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import one_at_a_time
from l0prune.errors import UsageError
from l0prune.features.exits.places import kind_of_block
from l0prune.features.input_gates.gate import STEEP, GatedBlock, Reader, Work
from l0prune.features.input_gates.network import InputGatedNetwork
from l0prune.files.around import Around
from l0prune.gating import defaults
from l0prune.gating.attaching import check_ungated
from l0prune.gating.kinds.base import Gate
from l0prune.gating.kinds.hard_concrete import HardConcrete
from l0prune.infer.parts import Parts, inferred
from l0prune.plan.globs import Globs, listed, named
from l0prune.plan.layout import Slots, axes_of
from l0prune.plan.numbers import LARGEST, SEEDS, check_number, check_whole
from l0prune.plan.plan import Cost, Plan, Site

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TARGET = 0.7
_LITTLE = 1e-3  # of the network's MACs, up to which a block is not worth gates
_NARROWEST, _NARROWER = 8, 16  # width of gating modules: at least, and the block's over it
_FAINT = 0.1  # initial weights, relative to those of a usual Linear


@one_at_a_time()
def add_input_gates(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    at: Globs = "*",
    target: float | None = None,
    price: float | None = None,
    shape: float = 0.0,
    skip: bool = True,
    per: str = "example",
    hidden: int | None = None,
    gate: Gate | None = None,
    open_probability: float = defaults.OPEN_PROBABILITY,
    seed: int = 0,
) -> InputGatedNetwork:
    """Add input gates to blocks of a network, which open different channels for each input.

    Before each block a small network looks at the block's input and opens or closes the channels
    of its inner axes, those that nothing outside of the block knows, such as between the Linears of
    an MLP. In eval mode the network computes the same as before until they have learned. Train it,
    gate it and export it like any other: ``l0prune.gate`` cuts for good what no input needs.

    Args:
        model: not gated yet.
        args: example positional inputs of its forward, a tuple (or a single tensor).
        kwargs: example inputs by name, a dict.
        at: paths of blocks, or globs over them.
        target: share of the network's MACs that its gates are to leave on average, of what is
            trained with; 0.7 where no price is given either.
        price: in place of a target, what the loss pays for all of these MACs; a part in proportion.
        shape: weight of batch-shaping, which makes each gate open for some inputs and closed for
            others; 0 for none.
        skip: give blocks that are added to a stream one gate more, for all of their channels, by
            which a file of ``save_skipping`` leaves them out.
        per: ``"example"``, or ``"position"``: each token has its own gates; only where a block and
            the Linears in it take values of shape (examples, …, channels).
        hidden: width of the gating modules, by default a sixteenth of the block's channels or 8.
        gate: the kind of gate: ``HardConcrete()``, or ``BinaryConcrete()`` for 0 or 1 in eval mode.
        open_probability: of all gates in the beginning.
        seed: of the gating modules' first weights; the global generators are left alone.

    Raises:
        AlreadyGated: the model carries gates.
        CaptureError: torch.export cannot follow it.
        UsageError: no block has an inner axis, a target cannot be reached, or a setting is wrong.
    """
    check_module(model)
    check_ungated(model)
    _check(model, target, price, shape, per, hidden, seed)
    kind = HardConcrete() if gate is None else gate
    _check_kind(kind)
    parts = inferred(model, args, kwargs)
    found = _inner_axes(model, parts.plan)
    chosen = _chosen(model, parts.plan, found, at)
    seen = _Seen(model, parts, chosen, found)
    blocks = [seen.block(path, found[path], skip, per == "position") for path in chosen]
    sizes = [hidden or max(_NARROWEST, block.channels // _NARROWER) for block in blocks]
    own = sum(map(seen.macs_of_gate, blocks, sizes))
    work = [*_work(parts.plan, [found[path] for path in chosen])]
    macs = own + sum(_macs(cost) for cost in parts.plan.costs if cost.unit == "macs")
    if price is None:
        target = _TARGET if target is None else target
        _check_reach(target, work, macs)
    asked = (target, price or 0.0, shape)
    with torch.random.fork_rng(devices=[]):
        result = InputGatedNetwork(model, blocks, sizes, kind, work, macs, *asked)
    _begin(result, model, kind.initial(open_probability), seed)
    result.training = model.training
    return result


def _check(
    model: nn.Module,
    target: float | None,
    price: float | None,
    shape: float,
    per: str,
    hidden: int | None,
    seed: int,
) -> None:
    """Raise UsageError for settings that make no sense."""
    if isinstance(model, InputGatedNetwork):
        raise UsageError("the network has input gates already: model.take_off() gives it back")
    if isinstance(model, Around):
        raise UsageError(
            f"put the input gates on first, and {model.words} on the network that has them"
        )
    if target is not None and price is not None:
        raise UsageError("give a target, or a price, not both")
    if target is not None:
        check_number("target", target, 0, 1)
    check_number("price", price or 0.0, 0, LARGEST)
    check_number("shape", shape, 0, LARGEST)
    check_whole("seed", seed, 0, SEEDS)
    if hidden is not None:
        check_whole("hidden", hidden, 1)
    if per not in ("example", "position"):
        raise UsageError(f"per must be 'example' or 'position', not {per!r}")


def _check_kind(kind: Any) -> None:
    """Raise UsageError for a kind of gate that needs more than its log α."""
    if isinstance(kind, type) or not isinstance(kind, Gate):
        raise UsageError(f"gate must be a gate, like l0prune.HardConcrete(), not {kind!r}")
    learns = getattr(kind, "beta", None) == "learn"
    if learns or kind.at(0.5) != kind:
        raise UsageError(
            f"input gates have no temperature that changes, and {kind.name} gates have one here: "
            "give HardConcrete() or BinaryConcrete(), with a number for beta"
        )


# --- where they go ------------------------------------------------------------------------


def _inner_axes(model: nn.Module, plan: Plan) -> dict[str, list[int]]:
    """Return the inner axes of each block: those all of whose tensors are inside of it.

    Only Linears and convolutions read them, slot by slot.
    """
    found: dict[str, list[int]] = {}
    for number in range(len(plan.axes)):
        sites = [site for site in plan.sites if number in axes_of(site.layout)]
        if not all(_is_plain_read(model, site, number) for site in sites):
            continue
        owners = [
            name.rpartition(".")[0].split(".")
            for name, dims in plan.tensors.items()
            if any(number in axes_of(dim) for dim in dims)
        ]
        path = ".".join(_common(owners))
        if path and not isinstance(model.get_submodule(path), _LAYERS):
            found.setdefault(path, []).append(number)
    return found


def _is_plain_read(model: nn.Module, site: Site, number: int) -> bool:
    """Return whether the site is all columns of a layer's weight, one for each slot."""
    path, _, name = site.tensor.rpartition(".")
    layer = model.get_submodule(path)
    if not isinstance(layer, _LAYERS) or name != "weight" or getattr(layer, "groups", 1) != 1:
        return False
    is_one_axis = isinstance(site.layout, Slots) and site.layout.axis == number
    is_whole = site.layout.size == layer.weight.shape[site.dim]
    return site.role == "read" and is_one_axis and is_whole


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the parts that all paths begin with."""
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common


def _chosen(
    model: nn.Module, plan: Plan, found: Mapping[str, Sequence[int]], at: Globs
) -> list[str]:
    """Return the blocks by ``at``; by default those that repeat and are not within another.

    Blocks of few MACs (the squeeze of a squeeze-and-excitation) are left out by default, too.
    """
    order = [path for path, _ in model.named_modules() if path in found]
    if at != "*":
        chosen = named(order, at, "at", "block with inner axes")
    else:
        kinds = {path: kind_of_block(model.get_submodule(path)) for path in order}
        counts = Counter(kinds.values())
        macs = sum(_macs(cost) for cost in plan.costs if cost.unit == "macs")
        large = [p for p in order if sum(w[-1] for w in _work(plan, [found[p]])) > _LITTLE * macs]
        repeated = [path for path in large if counts[kinds[path]] > 1]
        chosen = [p for p in repeated if not any(q != p and is_within(p, q) for q in repeated)]
    if not chosen:
        known = listed(order)
        raise UsageError(
            "this network has no block that repeats and has channels which nothing outside of it "
            "reads or writes, so that there is nothing for input gates to close. "
            + (f"Blocks that do not repeat can be named: at=['…'], of {known}." if known else "")
        )
    return chosen


class _Seen:
    """Inputs that blocks and their layers receive when the model runs on the example.

    Args:
        model: not gated.
        parts: of its inference.
        blocks: paths.
        axes: of each block, by number.
    """

    def __init__(
        self, model: nn.Module, parts: Parts, blocks: Sequence[str], axes: Mapping[str, list[int]]
    ) -> None:
        self._model, self._plan, self._parts = model, parts.plan, parts
        self._readers = {path: [*self._read(axes[path])] for path in blocks}
        layers = [reader.path for path in blocks for reader in self._readers[path]]
        self._inputs: dict[str, list[Inputs]] = {}
        for call in record(model, [*blocks, *dict.fromkeys(layers)], parts.example):
            self._inputs.setdefault(call.path, []).append(call.inputs)

    def _read(self, axes: Sequence[int]) -> Iterator[Reader]:
        for site in self._plan.sites:
            for place, number in enumerate(axes):
                if number in axes_of(site.layout):
                    path = site.tensor.rpartition(".")[0]
                    layer = self._model.get_submodule(path)
                    dims = layer.weight.dim()  # type: ignore[operator]
                    yield Reader(path, place, 1 - int(dims))

    def block(self, path: str, axes: Sequence[int], skip: bool, each_position: bool) -> GatedBlock:
        """Return the block's widths, readers and channel dim, for its gates.

        Raises:
            UsageError: the block is called in a way that gates cannot follow.
        """
        x = self._input(path)
        dim = self._channels(path, x)
        for reader in self._readers[path]:
            read = self._input(reader.path)
            fits = read.shape[0] == x.shape[0]
            if each_position:
                fits = dim == reader.dim == -1 and read.shape[:-1] == x.shape[:-1]
            if not fits:
                what = "position" if each_position else "example"
                raise UsageError(
                    f"{reader.path} takes a value of shape {tuple(read.shape)} in a block, {path}, "
                    f"that takes one of shape {tuple(x.shape)}: gates for each {what} do not fit. "
                    "Name other blocks: at=['…']"
                )
        residual = any(
            all(reader.path in branch.modules for reader in self._readers[path])
            for branch in self._plan.branches
        )
        return GatedBlock(
            path,
            tuple(self._plan.axes[number].size for number in axes),
            tuple(self._readers[path]),
            x.shape[dim],
            dim,
            each_position,
            skip and residual,
        )

    def _input(self, path: str) -> Tensor:
        """Return a module's first input on the example.

        Raises:
            UsageError: the module is not called once, or not with a tensor first.
        """
        calls = self._inputs.get(path, [])
        if len(calls) != 1 or not calls[0][0] or not isinstance(calls[0][0][0], Tensor):
            how = "not called once" if len(calls) != 1 else "not given a tensor first"
            raise UsageError(
                f"{path} is {how} in a forward, so that input gates cannot follow it: name other "
                "blocks, at=['…']"
            )
        return calls[0][0][0]

    def _channels(self, path: str, x: Tensor) -> int:
        """Return the dim of a block's input that holds channels, from the end."""
        for part in self._parts.found:
            analysis = part.analysis
            node = _entering(analysis.captured, path)
            dims = analysis.layouts.get(node.name, ()) if node is not None else ()
            slots = [n for n, dim in enumerate(dims) if not isinstance(dim, tuple) and axes_of(dim)]
            if len(dims) == x.dim() and len(slots) == 1 and slots[0] > 0:
                return slots[0] - x.dim()
        linear = any(r.dim == -1 for r in self._readers[path])
        return -1 if linear or x.dim() < 3 else 1 - x.dim()

    def macs_of_gate(self, block: GatedBlock, hidden: int) -> float:
        """Return the MACs of a block's gating module for one example."""
        x = self._input(block.path)
        times = x[0].numel() // x.shape[block.dim] if block.each_position else 1
        return float(times * hidden * (block.channels + sum(block.widths) + block.skips))


def _entering(captured: Captured, path: str) -> Node | None:
    """Return the node of the captured graph that a module takes as input."""
    for node in captured.graph.nodes:
        if path in modules_of(node):
            outside = (each for each in node.all_input_nodes if path not in modules_of(each))
            found: Node | None = next((n for n in outside if n.name not in captured.names), None)
            if found is not None:
                return found
    return None


def _macs(cost: Cost) -> float:
    return cost.scale * prod(dim.size for dim in cost.dims)


def _work(plan: Plan, axes: Sequence[Sequence[int]]) -> Iterator[Work]:
    """Yield the work that depends on the gates of some blocks' axes."""
    place = {n: (block, place) for block, of in enumerate(axes) for place, n in enumerate(of)}
    for cost in plan.costs:
        mine = [
            place[dim.axis] for dim in cost.dims if isinstance(dim, Slots) and dim.axis in place
        ]
        if cost.unit == "macs" and mine:
            yield cost.owner, mine[0][0], tuple(axis for _, axis in mine), _macs(cost)


def _check_reach(target: float, work: Sequence[Work], macs: float) -> None:
    least = 1 - sum(each[-1] for each in work) / macs
    if target <= least:
        raise UsageError(
            f"target is {target:g} of the MACs, and with all input gates closed {least:.3g} are "
            "left: ask for more, or give more blocks gates"
        )


def _begin(network: InputGatedNetwork, model: nn.Module, log_alpha: float, seed: int) -> None:
    """Set initial weights, by which gates hardly depend on the input, on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    like = next(model.parameters())
    for gate in network.gates:
        for layer in (m for m in gate.modules() if isinstance(m, nn.Linear)):
            bound = layer.in_features**-0.5
            with torch.no_grad():
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.zero_()
                if layer is not gate.hidden:
                    layer.weight.mul_(_FAINT / STEEP)
                    layer.bias.fill_(log_alpha / STEEP)
        gate.to(like.device, like.dtype).train(model.training)
