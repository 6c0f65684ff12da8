"""Scores of experts, and the choice of those that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import tensors_in
from l0prune.errors import UsageError
from l0prune.features.experts.mixtures import Mixture, closed_but
from l0prune.features.experts.routing import Routing

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Observed:
    """Calls of a mixture that were recorded while the model ran on calibration inputs.

    Attributes:
        calls: of the module that holds router and experts.
        of_experts: of the module that has the matrices of all experts.
        load: how many inputs got each expert; int64.
    """

    calls: list[Call] = field(default_factory=list)
    of_experts: list[Call] = field(default_factory=list)
    load: Tensor = field(default_factory=lambda: torch.zeros(0))


@contextmanager
def observing(model: nn.Module, mixtures: Sequence[Mixture]) -> Iterator[dict[str, Observed]]:
    """Record the inputs of each mixture within the context, by the router's name."""
    found = {mixture.router.name: Observed() for mixture in mixtures}
    handles = []

    def keeper(calls: list[Call]) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append(pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs)))

        return keep

    for mixture in mixtures:
        seen = found[mixture.router.name]
        for path, calls in ((mixture.path, seen.calls), (mixture.holder, seen.of_experts)):
            if calls is seen.calls or path:
                module = model.get_submodule(path)
                hook = module.register_forward_pre_hook(keeper(calls), with_kwargs=True)
                handles.append(hook)
    try:
        with Routing(model) as routing:
            yield found
        for name, seen in found.items():
            seen.load = routing.loads[name].cpu()
    finally:
        for handle in handles:
            handle.remove()


def by_load(model: nn.Module, mixture: Mixture, seen: Observed) -> Tensor:
    """Return the number of inputs that each expert got."""
    return seen.load.double()


def by_reap(model: nn.Module, mixture: Mixture, seen: Observed) -> Tensor:
    """Return each expert's mean, over its inputs X_e, of share times norm of the output.

    ``S_e = 1/|X_e| · Σ_{x ∈ X_e} g_e(x)·‖f_e(x)‖₂``: router-weighted expert activation pruning
    (Lasby et al. 2025, arXiv 2510.13999). An expert that no input got has 0.

    Raises:
        UsageError: the experts' code shows neither which expert an input got nor what it made.
    """
    total = torch.zeros(mixture.router.experts, dtype=torch.float64)
    count = torch.zeros_like(total)
    pairs = _of_lists(model, mixture, seen) if mixture.lists else _of_stack(model, mixture, seen)
    for experts, norms in pairs:
        total.index_add_(0, experts.cpu(), norms.double().cpu())
        count.index_add_(0, experts.cpu(), (norms > 0).double().cpu())
    return total / count.clamp(min=1)


def _of_stack(
    model: nn.Module, mixture: Mixture, seen: Observed
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield expert numbers, and norms of what each of these experts adds to an input.

    The module of all experts takes their numbers and shares: it is called again with all but one
    of an input's shares set to zero.
    """
    module = model.get_submodule(mixture.holder)
    for args, kwargs in seen.of_experts:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = _ids_and_shares(leaves, mixture)
        if places is None:
            raise UsageError(
                f"the code of {mixture.holder} is not given the numbers of the experts and their "
                "shares, so that nothing shows what each adds: choose them by score='output'"
            )
        ids, shares = leaves[places[0]], leaves[places[1]]
        for place in range(ids.shape[-1]):
            alone = torch.zeros_like(shares)
            alone[..., place] = shares[..., place]
            again = [alone if number == places[1] else leaf for number, leaf in enumerate(leaves)]
            own_args, own_kwargs = pytree.tree_unflatten(again, structure)
            output = tensors_in(module(*own_args, **own_kwargs))[0]
            yield ids[..., place].flatten(), output.flatten(0, -2).norm(dim=-1)


def _ids_and_shares(leaves: Sequence[Any], mixture: Mixture) -> tuple[int, int] | None:
    """Return the indices of expert numbers and of shares among a module's inputs, or None."""
    tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for number, ids in tensors.items():
        if ids.dtype in (torch.int64, torch.int32) and ids.shape[-1:] == (mixture.router.chosen,):
            for other, shares in tensors.items():
                if shares.is_floating_point() and shares.shape == ids.shape:
                    return number, other
    return None


def _of_lists(
    model: nn.Module, mixture: Mixture, seen: Observed
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield expert numbers, and norms of output times share (the gradient by the output)."""
    module = model.get_submodule(mixture.path)
    outputs: list[tuple[int, Tensor]] = []

    def noter(number: int) -> Callable[..., Tensor]:
        def note(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            alone = output.detach().requires_grad_()
            outputs.append((number, alone))
            return alone

        return note

    listed: Any = model.get_submodule(mixture.lists[0])
    hooks = [each.register_forward_hook(noter(number)) for number, each in enumerate(listed)]
    try:
        for args, kwargs in seen.calls:
            outputs.clear()
            with torch.enable_grad():
                total = tensors_in(module(*args, **kwargs))[0].sum()
                made = [output for _, output in outputs]
                slopes = torch.autograd.grad(total, made, allow_unused=True)
            for (number, output), slope in zip(outputs, slopes, strict=True):
                if slope is not None and output.numel():
                    norms = (output.detach() * slope).flatten(0, -2).norm(dim=-1)
                    yield torch.full((len(norms),), number), norms
    finally:
        for hook in hooks:
            hook.remove()


SCORES: Mapping[str, Callable[[nn.Module, Mixture, Observed], Tensor]] = {
    "load": by_load,
    "reap": by_reap,
}
"""Scores of each expert by name, to be kept if large; ``output`` judges several together."""
OUTPUT = "output"


@torch.no_grad()
def chosen(model: nn.Module, mixture: Mixture, seen: Observed, count: int, score: str) -> Tensor:
    """Return the experts that stay, equally many per group, ascending; int64, ``(count,)``.

    By ``output`` experts are removed one by one: each time the one without which the mixture's
    output changes least, with its inputs routed to others.
    """
    each = mixture.router.experts // mixture.router.groups
    left = count // mixture.router.groups
    if score == OUTPUT:
        return _one_by_one(model, mixture, seen, each, left)
    values = SCORES[score](model, mixture, seen).view(-1, each)
    best = values.argsort(dim=1, descending=True, stable=True)[:, :left]
    numbers = best + each * torch.arange(len(best))[:, None]
    return numbers.flatten().sort().values


def _one_by_one(model: nn.Module, mixture: Mixture, seen: Observed, each: int, left: int) -> Tensor:
    module = model.get_submodule(mixture.path)

    def outputs() -> list[Tensor]:
        return [tensors_in(module(*args, **kwargs))[0] for args, kwargs in seen.calls]

    def moved(kept: Tensor) -> float:
        with Routing(model, closed_but(mixture, kept)):
            pairs = zip(whole, outputs(), strict=True)
        return sum(float((a - b).double().square().sum()) for a, b in pairs)

    whole = outputs()
    kept = torch.arange(mixture.router.experts)
    while len(kept) > left * mixture.router.groups:
        sizes = (kept // each).bincount()
        may_go = [number for number in kept.tolist() if sizes[number // each] > left]
        kept = kept[kept != min(may_go, key=lambda number: moved(kept[kept != number]))]
    return kept
