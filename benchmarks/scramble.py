"""A gated model in which nothing is trivial, so that no error of an export can hide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import l0prune
from l0prune.exporting.certify.difference import difference
from l0prune.plan.branch import KIND

# How much an output must depend on the input, relative to its scale, to prove anything.
SIGNAL = 2e-3

Example = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def scramble(
    model: nn.Module,
    example: Example,
    seed: int = 0,
    *,
    closed: float = 0.5,
    round_to: int = 1,
    evenly: bool = False,
    **options: Any,
) -> nn.Module:
    """Gate the model and close half of its gates; the open ones take fractional values.

    The gated weights are rescaled so that signals neither vanish nor explode, and BatchNorm's
    statistics are those of the gated model on random data: else an error could hide.

    Args:
        model: with random weights.
        example: positional and keyword inputs of its forward.
        seed: of everything that is drawn.
        closed: the share of gates that close.
        round_to: open slots of an axis come in multiples of this.
        evenly: of each axis that share closes exactly, not of all gates about as many.
        **options: of ``l0prune.gate``.
    """
    randomise(model, seed)
    l0prune.gate(model, *example, **options)
    bank = l0prune.gates(model)
    drawn = torch.rand(bank.plan.size)
    for axis in bank.plan.axes if evenly else ():
        drawn[axis.slice] = drawn[axis.slice].argsort().argsort() / axis.size
    is_closed = drawn < closed
    for axis in bank.plan.axes:  # a small one that closes whole would let nothing through
        is_closed[axis.start] &= axis.kind == KIND or not bool(is_closed[axis.slice].all())
    fractional = torch.empty(bank.plan.size).uniform_(-1.5, 2.5)
    bank.log_alpha.copy_(torch.where(is_closed, -5.0, fractional))
    if round_to > 1:
        l0prune.fit(model, round_to=round_to)
    z, parameters = bank.z(), dict(model.named_parameters())
    for site in bank.plan.sites:
        if site.role == "read":
            scale = bank.plan.spread(site.layout, z).square().mean().sqrt().clamp(min=0.05)
            parameters[site.tensor].div_(scale)
    settle_statistics(model, example)
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Noise on every bias and scale, and no weight that is all zeros."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif "layer_scale" in name:
            parameter.fill_(0.5)
        elif not parameter.any():  # a ViT's head starts at zero, and would hide everything
            parameter.normal_(std=0.05)


@torch.no_grad()
def settle_statistics(model: nn.Module, example: Example) -> None:
    """BatchNorm statistics of a few random inputs, with every gate at its eval value."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    model.eval()
    if not norms:
        return
    for norm in norms:
        norm.momentum = 0.5
    args, kwargs = example
    # A list of images is a batch by itself.
    another = _like if any(isinstance(given, list) for given in args) else _another
    # Each round leaves less of the initial ones. With all of them gone deep random networks are
    # chaotic, and double every rounding from layer to layer; so no more than the output needs.
    for _ in range(6):
        for norm in norms:
            norm.train()
        for _ in range(3):
            other_args, other_kwargs = pytree.tree_map(another, example)
            model(*other_args, **other_kwargs)
        model.eval()
        first = like(example)
        if difference(model(*args, **kwargs), model(*first[0], **first[1])) > SIGNAL:
            return


def like(example: Example) -> Example:
    """Other inputs of the same shapes, random where they are numbers and not indices."""
    args, kwargs = pytree.tree_map(_like, example)
    return args, kwargs


def _like(leaf: Any) -> Any:
    """As many examples, random where they are numbers and not indices."""
    is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return torch.randn_like(leaf) if is_number else leaf


def _another(leaf: Any) -> Any:
    """Four times as many examples, random where they are numbers and not indices."""
    if not isinstance(leaf, Tensor):
        return leaf
    return _like(leaf.repeat(4, *[1] * (leaf.ndim - 1)) if leaf.ndim else leaf)
