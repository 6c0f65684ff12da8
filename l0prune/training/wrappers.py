"""One model in several processes: replicas of it (DDP), or shards (FSDP2)."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from l0prune.capture.compat import leave_to_ddp
from l0prune.capture.copying import holds_ddp
from l0prune.errors import Interrupted, NotGated, UsageError
from l0prune.files.artifact import named_tensors
from l0prune.gating.attaching import gates_of
from l0prune.running.device import device_of
from l0prune.running.processes import World, full_tensor, is_sharded
from l0prune.training.memory import repeated_blocks


def agree_on_start(model: nn.Module, world: World) -> None:
    """Give the model in all processes the values that it has in the first.

    Raises:
        UsageError: the processes have different models, or one that is distributed already.
    """
    if not world.is_shared:
        return
    if holds_ddp(model) or any(map(is_sharded, model.parameters())):
        raise UsageError(
            "this model is in DDP or FSDP already; give the plain one, the same in each process: "
            "finetune distributes it (distributed='ddp' or 'fsdp')"
        )
    structure = repr([(name, t.dtype, tuple(t.shape)) for name, t in named_tensors(model)])
    digest = hashlib.blake2b(structure.encode(), digest_size=16).hexdigest()
    if len(set(world.gather(digest))) > 1:
        raise UsageError(
            "the processes were given models whose parameters differ in name, shape or dtype; "
            "each must be given the same model"
        )
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            world.copy_from_first(tensor)


@torch.no_grad()
def average_buffers(buffers: Iterator[Tensor] | list[Tensor], world: World) -> None:
    """Set floating-point buffers to their means over the processes; where equal, they stay."""
    if not world.is_shared:
        return
    for buffer in buffers:
        if buffer.is_floating_point():
            mean = world.mean_(buffer.detach().clone(memory_format=torch.contiguous_format))
            first = buffer.detach().clone(memory_format=torch.contiguous_format)
            world.copy_from_first(first)
            differs = world.mean_((first != buffer).to(mean)) > 0
            buffer.copy_(torch.where(differs, mean, buffer))


def replicated(module: nn.Module, left_out: Iterable[nn.Parameter]) -> DistributedDataParallel:
    """``module`` such that backward averages its gradients over the processes.

    Args:
        module: called with what its forward takes; returns what is differentiated, and nothing
            else, so that parameters that have no part in it are found.
        left_out: parameters whose gradients are left alone.
    """
    ids = {id(parameter) for parameter in left_out}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in ids]
    names += [name for name, _ in module.named_buffers()]  # averaged where they are looked at
    leave_to_ddp(module, names)
    # DDP warns where it finds no unused parameter, and refuses a module without any that learns.
    module.register_parameter("unused", nn.Parameter(torch.zeros(1, device=device_of(module))))
    return DistributedDataParallel(
        module,
        init_sync=False,  # agree_on_start has seen to it
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )


@contextmanager
def sharded(
    model: nn.Module, device: torch.device, backend: str | None, world: World
) -> Iterator[nn.Module]:
    """A copy of the model on ``device`` in shards, one in each process (FSDP2).

    Each repeated block is gathered when it runs; what is not in a block, as one more. Gates, and
    parameters that are single numbers, are whole in every process. After the context, or when
    training was interrupted, the model has what the copy has learned.

    Args:
        model: any model, the same in all processes; left on its own device.
        device: where the shards are.
        backend: by which torch.compile compiles each block, or None.
        world: the processes.

    Raises:
        UsageError: the model cannot be copied.
    """
    try:
        shards = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"distributed='fsdp' trains a copy of the model in shards, and this model cannot be "
            f"copied (copy.deepcopy): {error}. Use distributed='ddp'"
        ) from error
    _shard(shards, device, backend, world)
    try:
        yield shards
    except Interrupted:
        _hand_back(shards, model)
        raise
    _hand_back(shards, model)


def whole_everywhere(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are neither DDP's nor FSDP's: their gradients are averaged by hand.

    They are the gates, of which each process has its own sample, and single numbers, which
    cannot be sharded.
    """
    gates = _log_alpha(model)
    return [p for p in model.parameters() if p is gates or not (p.dim() or is_sharded(p))]


def _log_alpha(model: nn.Module) -> nn.Parameter | None:
    try:
        return gates_of(model).log_alpha
    except NotGated:
        return None


def _shard(model: nn.Module, device: torch.device, backend: str | None, world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world.size,))
    apart = set(whole_everywhere(model))
    for parameter in apart:
        parameter.data = parameter.data.to(device)
    for block in _independent(repeated_blocks(model), model):
        if backend is not None:
            block.compile(backend=backend)
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=apart)
    # Also after a forward that no backward follows, as in a test, the shards come back.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=apart)


def _independent(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """The blocks that share no parameter with the rest: those that share go with the whole."""
    everywhere = _owners(model)
    return [
        block
        for block in blocks
        if all(everywhere[key] == count for key, count in _owners(block).items())
    ]


def _owners(model: nn.Module) -> Counter[int]:
    """How many modules own each parameter, by its id."""
    parameters = (p for module in model.modules() for p in module._parameters.values())
    return Counter(id(parameter) for parameter in parameters if parameter is not None)


@torch.no_grad()
def _hand_back(shards: nn.Module, model: nn.Module) -> None:
    for (_, own), (_, trained) in zip(named_tensors(model), named_tensors(shards), strict=True):
        own.copy_(full_tensor(trained))
    if _log_alpha(model) is not None:
        gates_of(model).gate = gates_of(shards).gate
