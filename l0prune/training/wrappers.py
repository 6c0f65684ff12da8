"""Changes around a model for one run: DDP and FSDP2, activation checkpointing, memory format."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from l0prune.capture.compat import NormBase, leave_to_ddp, pytree
from l0prune.capture.copying import holds_ddp
from l0prune.errors import Interrupted, UsageError
from l0prune.files.artifact import named_tensors
from l0prune.gating.attaching import gates_of, gates_or_none, weights_of
from l0prune.gating.gated_class import original_class
from l0prune.running.device import device_of
from l0prune.running.processes import World, full_tensor, is_sharded

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks: the largest modules with siblings of the same class.

    A block has submodules and defines a forward; siblings are in the same module or list of
    modules. Blocks are not searched for smaller ones.
    """
    children = list(model.children())
    classes = Counter(map(original_class, children))
    blocks = []
    for child in children:
        if classes[original_class(child)] > 1 and _can_be_block(child):
            blocks.append(child)
        else:
            blocks += repeated_blocks(child)
    return list(dict.fromkeys(blocks))


def _can_be_block(module: nn.Module) -> bool:
    kind = original_class(module)
    has_forward = kind.forward is not nn.Module.forward
    return has_forward and kind not in _CONTAINERS and any(True for _ in module.children())


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Checkpoint each block within the context: backward recomputes it from its stored inputs.

    The recomputation has the same random numbers and gates, and running statistics are not
    updated a second time.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            "checkpointing computes a model's repeated blocks anew in backward, and this model "
            "has none; leave it out, or give accumulate=2 or more to need less memory"
        )
    own = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        norms = [m for m in block.modules() if isinstance(m, NormBase) and m.track_running_stats]
        block.forward = partial(_again, block.forward, norms)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def _again(
    forward: Callable[..., Any], norms: Sequence[NormBase], *args: Any, **kwargs: Any
) -> Any:
    """Run ``forward`` such that backward recomputes it."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    settings: dict[str, Any] = {"use_reentrant": False}
    if norms and not torch.compiler.is_compiling():  # a compiler updates them once by itself
        settings["context_fn"] = lambda: (nullcontext(), _held(norms))
    return checkpoint(forward, *args, **settings, **kwargs)


@contextmanager
def _held(norms: Sequence[NormBase]) -> Iterator[None]:
    """Keep forwards from updating running statistics within the context."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked


@contextmanager
def channels_last(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Store filters in the channels-last memory format within the context."""
    tensors = chain(model.parameters(), model.buffers()) if wanted else ()
    changed = [(t, t.stride()) for t in tensors if t.dim() == 4 and t.is_contiguous()]
    for tensor, _ in changed:
        tensor.data = tensor.data.to(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for tensor, stride in changed:
            tensor.data = tensor.data.new_empty_strided(tensor.shape, stride).copy_(tensor.data)


def images_channels_last(part: Any) -> Any:
    """Return a batch with all 4-d tensors in the channels-last memory format."""

    def turn(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() == 4:
            return leaf.contiguous(memory_format=torch.channels_last)
        return leaf

    return pytree.tree_map(turn, part)


def agree_on_start(model: nn.Module, world: World) -> None:
    """Copy the model's values from the first process to all others."""
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
    """Set floating-point buffers to their means over the processes; equal values are kept."""
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
    """Wrap ``module`` in DDP, which averages its gradients over the processes in backward.

    Its forward may return nothing else with a gradient than the objective, so that unused
    parameters are found. Gradients of those that are ``left_out`` are not averaged.
    """
    ids = {id(parameter) for parameter in left_out}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in ids]
    names += [name for name, _ in module.named_buffers()]  # see average_buffers
    leave_to_ddp(module, names)
    # DDP warns where it finds no unused parameter, and refuses a module without any that learns.
    module.register_parameter("unused", nn.Parameter(torch.zeros(1, device=device_of(module))))
    return DistributedDataParallel(
        module,
        init_sync=False,  # done by agree_on_start
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )


@contextmanager
def sharded(
    model: nn.Module, device: torch.device, backend: str | None, world: World
) -> Iterator[nn.Module]:
    """Yield a copy of the model on ``device`` in shards, one in each process (FSDP2).

    Each repeated block is gathered when it runs; the rest is one more unit. Gates, and parameters
    that are single numbers, are whole in every process. After the context, or when training was
    interrupted, the model has the copy's values.
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
    """Return the parameters outside of DDP and FSDP, whose gradients are averaged separately.

    They are the gates, of which each process has its own sample, and single numbers, which
    cannot be sharded.
    """
    weights = {*map(id, weights_of(model).values())}
    return [p for p in model.parameters() if id(p) not in weights or not (p.dim() or is_sharded(p))]


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
    # Reshards also after a forward without a backward, as in a test.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=apart)


def _independent(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the blocks that share no parameter with the rest of the model."""
    everywhere = _owners(model)
    return [
        block
        for block in blocks
        if all(everywhere[key] == count for key, count in _owners(block).items())
    ]


def _owners(model: nn.Module) -> Counter[int]:
    """Count the modules that own each parameter, by its id."""
    parameters = (p for module in model.modules() for p in module._parameters.values())
    return Counter(id(parameter) for parameter in parameters if parameter is not None)


@torch.no_grad()
def _hand_back(shards: nn.Module, model: nn.Module) -> None:
    for (_, own), (_, trained) in zip(named_tensors(model), named_tensors(shards), strict=True):
        own.copy_(full_tensor(trained))
    if (gates := gates_or_none(model)) is not None:
        gates.gate = gates_of(shards).gate
