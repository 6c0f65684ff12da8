"""What makes a step need less memory or time, and leaves what it computes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from l0prune.errors import UsageError
from l0prune.gating.gated_class import original_class

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest parts of a model that it has several of, side by side: its blocks.

    A block is made of other modules and has a forward of its own; its siblings, in the same
    module or list of modules, are of its class. Blocks are not searched for smaller ones.
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
    """Within the context, each block keeps only its inputs for backward, and computes anew then.

    It draws the same random numbers and sees the same gates again, and running statistics are
    not updated a second time.

    Raises:
        UsageError: the model has no repeated blocks.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            "checkpointing computes a model's repeated blocks anew in backward, and this model "
            "has none; leave it out, or give accumulate=2 or more to need less memory"
        )
    own = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = partial(_again, block.forward, _statistics(block))
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def _again(
    forward: Callable[..., Any], norms: Sequence[_NormBase], *args: Any, **kwargs: Any
) -> Any:
    """``forward``, to be computed once more in backward."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    settings: dict[str, Any] = {"use_reentrant": False}
    if norms and not torch.compiler.is_compiling():  # a compiler updates them once by itself
        settings["context_fn"] = partial(_contexts, norms)
    return checkpoint(forward, *args, **settings, **kwargs)


def _contexts(
    norms: Sequence[_NormBase],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _held(norms)


@contextmanager
def _held(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Within the context, a forward leaves running statistics as they are."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked


def _statistics(block: nn.Module) -> list[_NormBase]:
    return [m for m in block.modules() if isinstance(m, _NormBase) and m.track_running_stats]


@contextmanager
def channels_last(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Within the context, filters lie in memory with their channels last; afterwards as before."""
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
    """Every image in a batch with its channels last in memory; the rest as it is."""

    def turn(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() == 4:
            return leaf.contiguous(memory_format=torch.channels_last)
        return leaf

    return pytree.tree_map(turn, part)
