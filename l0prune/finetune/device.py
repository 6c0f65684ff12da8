"""Where a model computes, in which precision, and in which mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from torch import nn

from l0prune.errors import UsageError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose(device: str | torch.device, model: nn.Module) -> torch.device:
    """The device to train on: ``"auto"`` stays on a GPU, else takes one, else the CPU.

    Raises:
        UsageError: there is no such device.
    """
    if device == "auto":
        here = whereabouts(model)
        if here.type != "cpu":
            return here
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {str(device)!r} cannot be used here: {reason}") from error
    return chosen


def whereabouts(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU if it has none."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def precision(device: torch.device, autocast: str | None) -> AbstractContextManager[object]:
    """A context in which operators run in the precision that ``autocast`` names."""
    if autocast is None:
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[autocast])


@contextmanager
def at_home_again(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context the model is on ``device``; afterwards back on its own."""
    home = whereabouts(model)
    if home == device or (device.index is None and home.type == device.type):
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Train mode, and afterwards the mode of each submodule as it was.

    In a model that is in train mode already, submodules in eval mode stay so: a BatchNorm that
    somebody froze, for instance.
    """
    before = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and afterwards the mode of each submodule as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in before:
            module.training = mode
