"""Mixtures of experts in a model: the tensors and modules of each expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from l0prune.capture.example_inputs import call
from l0prune.capture.model_checks import evaluating
from l0prune.capture.provenance import within
from l0prune.capture.sizes import Inputs
from l0prune.errors import UsageError
from l0prune.features.experts.routing import Router, Routing
from l0prune.files.cut_layers import tensors_of

_KERNEL = 3  # dims of a tensor that has a matrix for each expert


@dataclass(frozen=True)
class Mixture:
    """A router and its experts.

    Attributes:
        router: of the experts.
        path: of the module that holds router and experts.
        rows: names of the tensors that have a row for each expert: router, bias, matrices.
        lists: paths of lists of modules, one for each expert.
        holder: path of the module that has the matrices of all experts; empty where lists have
            them.
    """

    router: Router
    path: str
    rows: tuple[str, ...]
    lists: tuple[str, ...]
    holder: str = ""


def mixtures_in(model: nn.Module, example: Inputs) -> list[Mixture]:
    """Find the mixtures of a model by running it on an example.

    Raises:
        UsageError: there are none, or no experts are found that belong to a router.
    """
    with evaluating(model), Routing(model) as routing:
        call(model, example)
    routers = [each for each in routing.found.values() if each.chosen]
    if not routers:
        raise UsageError(
            "the model has no mixture of experts: nothing in it chooses the best (topk) of scores "
            "that the rows of a weight make"
        )
    found = [mixture for router in routers if (mixture := _mixture(model, router)) is not None]
    if not found:
        first = routers[0]
        raise UsageError(
            f"no experts are found that belong to the router {first.name}: neither a tensor with a "
            f"matrix for each of the {first.experts}, nor a list of as many modules"
        )
    return found


def _mixture(model: nn.Module, router: Router) -> Mixture | None:
    """Return the nearest experts around a router; None where there are none."""
    path = owner = router.name.rpartition(".")[0]
    while True:
        around = model.get_submodule(path)
        stacked = dict.fromkeys(_stacked(around, path, router))
        lists = [
            within(path, name)
            for name, each in around.named_modules()
            if isinstance(each, nn.ModuleList) and len(each) == router.experts
        ]
        if stacked or lists:
            break
        if not path:
            return None
        path = path.rpartition(".")[0]
    rows = [
        within(owner, name)
        for name, tensor in tensors_of(model.get_submodule(owner))
        if tensor.dim() and tensor.shape[0] == router.experts
    ]
    holders = dict.fromkeys(name.rpartition(".")[0] for name in stacked)
    holder = next(iter(holders), "")
    rows = list(dict.fromkeys([*rows, *router.beside, *stacked]))
    return Mixture(router, path, tuple(rows), tuple(lists), holder)


def _stacked(around: nn.Module, path: str, router: Router) -> Iterator[str]:
    """Yield the names of tensors with a row per expert, in modules with a matrix per expert."""
    for inner, module in around.named_modules():
        found = {
            within(within(path, inner), name): tensor
            for name, tensor in tensors_of(module)
            if tensor.dim() and tensor.shape[0] == router.experts
        }
        if any(tensor.dim() >= _KERNEL for tensor in found.values()):
            yield from found


def sizes_of_experts(model: nn.Module, mixture: Mixture) -> tuple[int, int]:
    """Return the parameters of one expert, and those of the router per expert."""
    own, router = tensors_of_experts(model, mixture)
    total = sum(tensor.numel() for tensor in own.values())
    return total // mixture.router.experts, sum(tensor[0].numel() for tensor in router.values())


def tensors_of_experts(
    model: nn.Module, mixture: Mixture
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters of all experts of a mixture, and those of its router, by name."""
    rows: dict[str, Tensor] = {n: t for n, t in model.named_parameters() if n in mixture.rows}
    owner, beside = mixture.router.name.rpartition(".")[0], mixture.router.beside
    router = {n: t for n, t in rows.items() if n.rpartition(".")[0] == owner or n in beside}
    own = {name: tensor for name, tensor in rows.items() if name not in router}
    for path in mixture.lists:
        own |= {
            within(path, name): tensor
            for name, tensor in model.get_submodule(path).named_parameters()
        }
    return own, router


def closed_but(mixture: Mixture, kept: Tensor) -> dict[str, Tensor]:
    """Return the mask of closed experts for ``Routing``, from the experts that stay."""
    closed = torch.ones(mixture.router.experts, dtype=torch.bool).index_fill_(0, kept, False)
    return {mixture.router.name: closed}
