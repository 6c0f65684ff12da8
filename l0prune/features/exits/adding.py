"""``add_exits``: heads put on a network, at places where one value carries all results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.capture import capture
from l0prune.capture.example_inputs import call, keep
from l0prune.capture.model_checks import check_module, evaluating
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import one_at_a_time
from l0prune.errors import UsageError
from l0prune.features.exits.network import ExitNetwork, PooledLinear, answer_in
from l0prune.features.exits.places import Place, places
from l0prune.gating.attaching import check_ungated
from l0prune.plan.globs import Globs, listed, named
from l0prune.plan.numbers import LARGEST, SEEDS, check_number, check_whole

_LATEST = 0.95  # share of the MACs after which an exit saves too little


@one_at_a_time()
def add_exits(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    at: int | Globs = 2,
    heads: Sequence[nn.Module] | None = None,
    weights: float | Sequence[float] = 1.0,
    distill: float = 0.5,
    temperature: float = 2.0,
    seed: int = 0,
) -> ExitNetwork:
    """Add early exits to a network: heads that answer before all of it is computed.

    What comes back is a module with several answers, ``ExitOutputs``, to be trained, gated and
    exported like any other; ``choose_exits`` then decides when an answer is good enough. The
    network stays as it is, inside of it, and shares its weights.

    Args:
        model: not gated yet; it returns one tensor.
        args: example positional inputs of its forward, a tuple (or a single tensor).
        kwargs: example inputs by name, a dict.
        at: how many exits: they go to ends of repeated blocks, of stages where these are enough,
            at equal steps of the MACs. Or paths of modules, or globs over them, at each of whose
            ends all that was computed before is in that one value.
        heads: a module for each exit, from the value there to an answer of the network's own shape.
            None for linear heads on the mean over all positions.
        weights: of the exits' losses beside the last one's, one for all or one each.
        distill: share of an exit's loss that is distillation from the last exit, 0 to 1.
        temperature: of that.
        seed: of the linear heads' first weights; the global generators are left alone.

    Raises:
        AlreadyGated: the model carries gates.
        CaptureError: torch.export cannot follow it.
        UsageError: no block repeats, a module is no place to leave the network at, the network has
            several outputs, or a head does not fit.
    """
    check_module(model)
    check_ungated(model)
    if isinstance(model, ExitNetwork):
        raise UsageError("the network has exits already: put them on model.network, all at once")
    check_number("distill", distill, 0, 1)
    check_number("temperature", temperature, 1e-3, LARGEST)
    check_whole("seed", seed, 0, SEEDS)
    example = keep(model, args if isinstance(args, tuple) else (args,), dict(kwargs or {}))
    answer, calls = _run(model, example)
    once = [_called_once(each, calls) for each in places(model, capture(model, *example))]
    chosen = _chosen(model, [place for place in once if place.paths], at)
    if heads is None:
        heads = _linear_heads(chosen, answer, seed)
    if len(heads) != len(chosen):
        raise UsageError(f"there are {len(heads)} heads for {len(chosen)} exits: give one for each")
    each = _one_each(weights, len(chosen))
    found = ExitNetwork(model, [p.paths[-1] for p in chosen], heads, each, distill, temperature)
    found.training = model.training
    for head in heads:
        head.to(answer.device, answer.dtype).train(model.training)
    _check_heads(found, example, answer)
    return found


def _run(model: nn.Module, example: Inputs) -> tuple[Tensor, Counter[str]]:
    """Return the answer to the example, and how often each module was called for it."""
    calls: Counter[str] = Counter()

    def counting(path: str) -> Callable[..., None]:
        return lambda *_: calls.update([path])

    modules = [(path, module) for path, module in model.named_modules() if path]
    handles = [module.register_forward_hook(counting(path)) for path, module in modules]
    try:
        with evaluating(model):
            return answer_in(call(model, example)), calls
    finally:
        for handle in handles:
            handle.remove()


def _called_once(place: Place, calls: Counter[str]) -> Place:
    """Return the place with those of its modules that are called exactly once."""
    return replace(place, paths=tuple(path for path in place.paths if calls[path] == 1))


def _chosen(model: nn.Module, found: Sequence[Place], at: int | Globs) -> list[Place]:
    """Return the places that are asked for, by number or by name."""
    if isinstance(at, int) and not isinstance(at, bool):
        check_whole("at", at, 1)
        return _spread(found, at)
    names = [path for path, _ in model.named_modules() if path]
    wanted = named(names, at, "at", "module")  # type: ignore[arg-type]
    by_path = {path: place for place in found for path in place.paths}
    for path in wanted:
        if path not in by_path:
            known = listed([place.paths[-1] for place in found])
            raise UsageError(
                f"{path} is no place for an exit: when it returns, something else that was "
                "computed before is still needed (a shortcut goes around it, it is called several "
                f"times, or not at all). Places are: {known or 'none'}."
            )
    chosen = {id(by_path[path]): by_path[path] for path in wanted}
    return sorted(chosen.values(), key=lambda place: place.share)


def _spread(found: Sequence[Place], count: int) -> list[Place]:
    """Return ``count`` ends of blocks at equal steps of the MACs; ends of stages if possible.

    A stage ends where the value of the next end of a block has another shape.
    """
    blocks = [place for place in found if place.ends_block]
    stages = [a for a, b in pairwise(blocks) if b.shape[1:] != a.shape[1:]]
    early = [place for place in blocks if place.share < _LATEST]
    if len(early) < count:
        known = listed([place.paths[-1] for place in found])
        what = f"ends of {len(early)} repeated blocks" if early else "no block that repeats"
        raise UsageError(
            f"{count} exits are asked for, and this network has {what} before its end. Name the "
            f"modules whose outputs exits may read: at=['…']. Places are: {known or 'none'}."
        )
    left = [place for place in stages if place.share < _LATEST]
    left = left if len(left) >= count else early
    chosen = []
    for number in range(1, count + 1):
        ends = left[: len(left) - (count - number)]  # later exits need one each
        best = min(ends, key=lambda place: abs(place.share - number / (count + 1)))
        chosen.append(best)
        left = left[left.index(best) + 1 :]
    return chosen


def _linear_heads(chosen: Sequence[Place], answer: Tensor, seed: int) -> list[nn.Module]:
    if answer.dim() != 2:
        raise UsageError(
            f"the network's answer has the shape {tuple(answer.shape)}; linear heads are for "
            "answers of shape (examples, classes). Give heads=[…] of your own, one for each exit"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [
            PooledLinear(place.shape[place.dim], answer.shape[1], place.dim, len(place.shape))
            for place in chosen
        ]


def _one_each(weights: float | Sequence[float], count: int) -> list[float]:
    found = list(weights) if isinstance(weights, Sequence) else [weights] * count
    if len(found) != count:
        raise UsageError(f"there are {len(found)} weights for {count} exits: give one for each")
    for weight in found:
        check_number("each of weights", weight)
    return found


def _check_heads(network: ExitNetwork, example: Inputs, answer: Tensor) -> None:
    """Raise UsageError if a head fails on its input, or gives an output of another shape."""
    try:
        with evaluating(network):
            exits = call(network, example).exits
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"a head does not take what it is to read: {type(error).__name__}: {error}. It gets "
            f"what these modules return: {', '.join(network.at)}"
        ) from error
    for path, found in zip(network.at, exits, strict=True):
        if not isinstance(found, Tensor) or found.shape != answer.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(
                f"the head at {path} answers {shape}, the network {tuple(answer.shape)}: all exits "
                "give answers of one shape"
            )
