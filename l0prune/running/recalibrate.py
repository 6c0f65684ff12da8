"""Statistics of BatchNorm computed anew, for the weights and gates as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from l0prune.capture.model_checks import evaluating
from l0prune.running.batch import Batch, call
from l0prune.running.device import precision


def learning_norms(model: nn.Module) -> list[_BatchNorm]:
    """Every BatchNorm that gathers statistics in the mode that the model is in."""
    return [norm for norm in _with_statistics(model) if norm.training]


def _with_statistics(model: nn.Module) -> Iterator[_BatchNorm]:
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            yield module


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Within the context each BatchNorm has the statistics of its batch, and gathers none.

    One that is of several processes (SyncBatchNorm) is left alone.
    """
    norms = [n for n in _with_statistics(model) if not isinstance(n, nn.SyncBatchNorm)]
    modes = [norm.training for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.track_running_stats = True, False
        yield
    finally:
        for norm, mode in zip(norms, modes, strict=True):
            norm.training, norm.track_running_stats = mode, True


def recalibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    autocast: str | None = None,
) -> list[Tensor]:
    """Set running statistics to the plain average over ``batches``; everything else in eval mode.

    So they belong to the deterministic gates and the averaged weights, not to the samples and
    the steps on the way there. A model without a BatchNorm in train mode is left alone.

    Returns:
        The buffers that were computed anew.
    """
    norms = learning_norms(model)
    if not norms:
        return []
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        with evaluating(model), precision(device, autocast):
            for norm in norms:
                norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=device)
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative average
                norm.training = True
            for batch in batches:
                call(model, batch.inputs)
    finally:
        for norm, (momentum, tracked) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked
    return [b for n in norms for b in (n.running_mean, n.running_var) if b is not None]
