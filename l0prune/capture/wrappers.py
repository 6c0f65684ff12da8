"""Modules around a model: compiled, or spread over devices."""

from __future__ import annotations

from torch import nn


def inside(model: nn.Module) -> nn.Module:
    """The model that the user wrote, in whatever torch has put around it."""
    while True:
        inner = _wrapped(model)
        if inner is None:
            return model
        model = inner


def _wrapped(model: nn.Module) -> nn.Module | None:
    is_spread = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return model._modules.get("module" if is_spread else "_orig_mod")  # torch.compile's name


def holds_ddp(model: nn.Module) -> bool:
    """Return whether the model, or a module of it, is in DDP."""
    ddp = nn.parallel.DistributedDataParallel
    return any(isinstance(module, ddp) for module in model.modules())


def is_distributed(model: nn.Module) -> bool:
    """Return whether DDP stands around the model, which has noted its parameters already."""
    outer: nn.Module | None = model
    while outer is not None:
        if isinstance(outer, nn.parallel.DistributedDataParallel):
            return True
        outer = _wrapped(outer)
    return False
