"""Tensors that FSDP2 keeps in shards: one process' shard, and the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer


def is_sharded(tensor: Any) -> TypeGuard[Any]:
    """Return whether the tensor is a DTensor, of which this process has a part."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This process' own part of a sharded tensor, sharing its memory; others as they are."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, gathered from all processes, which must call this together."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The whole ``tensor``, which every process has, in shards as ``like`` is."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    with torch.no_grad():
        moved = tensor.to(like.device)
        return distribute_tensor(moved, mesh, placements, src_data_rank=None)


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that is distributed in some way, in shards as ``like`` is."""
    if not is_sharded(tensor) or not is_sharded(like):
        return tensor
    placed: Tensor = tensor.redistribute(placements=like.placements)
    return placed


def sharded_as(part: Tensor, like: Tensor) -> Tensor:
    """This process' ``part`` as a tensor in shards as ``like`` is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state_dict with whole tensors, on the CPU where they are gathered."""
    return _with_state(
        optimizer.state_dict(),
        lambda _, value: whole(value).cpu() if is_sharded(value) else value,
    )


def sharded_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the state that ``whole_state`` returned as the parameters of ``optimizer`` are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def cut(number: int, value: Any) -> Any:
        like = parameters[number]
        fits = isinstance(value, Tensor) and value.shape == like.shape
        return shard_like(value, like) if fits else value

    return _with_state(state, cut)


def _with_state(state_dict: Mapping[str, Any], change: Callable[[int, Any], Any]) -> dict[str, Any]:
    """The state_dict with each entry of each parameter's state, by its number, changed."""
    state = {
        number: {name: change(number, value) for name, value in entries.items()}
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
