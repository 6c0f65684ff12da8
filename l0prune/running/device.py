"""Device, precision and train mode in which a model computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from torch import nn

from l0prune.capture.model_checks import modes_kept
from l0prune.errors import UsageError, first_line
from l0prune.running.processes import ALONE, World

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(
    device: str | torch.device, model: nn.Module, world: World = ALONE
) -> torch.device:
    """Return the device to compute on; ``"auto"``: the model's if no CPU, else a GPU, else the CPU.

    Each of several processes on one machine takes a separate GPU, by ``LOCAL_RANK``.
    """
    if device == "auto":
        here = device_of(model)
        if here.type != "cpu":
            return here
    takes_gpu = str(device) in ("auto", "cuda") and torch.cuda.is_available()
    if takes_gpu and world.is_shared:
        return _own_gpu(world)
    if device == "auto":
        return torch.device("cuda" if takes_gpu else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device {str(device)!r} cannot be used here: {first_line(error)}"
        ) from error
    return chosen


def _own_gpu(world: World) -> torch.device:
    number, count = int(os.environ.get("LOCAL_RANK", world.rank)), torch.cuda.device_count()
    if number >= count:
        raise UsageError(
            f"there are more processes on this machine than its {count} GPUs: start fewer "
            "(--nproc-per-node), or give device='cpu'"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer; the CPU if it has none."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def check_values(model: nn.Module, what: str = "export") -> None:
    """Raise UsageError for a model on the meta device; ``what`` is the verb that needs values."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None:
        raise UsageError(
            f"{empty} is on the meta device: it has a shape and no values, so there is nothing to "
            f"{what}. survey and gate take such a model. For the rest build it on the CPU, gate it "
            "in the same way, and load the trained weights and gates: model.load_state_dict(...)."
        )


def exact_device(device: torch.device) -> torch.device:
    """Return the device if it computes in float64, else the CPU."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device).sum()
    except (RuntimeError, TypeError, AssertionError):
        return torch.device("cpu")
    return device


def precision(device: torch.device, autocast: str | None) -> AbstractContextManager[object]:
    """Return a context in which operators run in the precision that ``autocast`` names."""
    if autocast is None:
        return nullcontext()
    is_old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if autocast == "bf16" and is_old:
        raise UsageError(
            "autocast='bf16' is for GPUs that compute in it, from Ampere (2020) on, and this one "
            "does not: use autocast='fp16', which scales the loss, or none"
        )
    return torch.autocast(device.type, _DTYPES[autocast])


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to ``device`` within the context, and back afterwards."""
    home = device_of(model)
    if home == device or (device.index is None and home.type == device.type):
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


@contextmanager
def train_mode(model: nn.Module) -> Iterator[None]:
    """Set train mode within the context, and restore the mode of each submodule afterwards.

    In a model that is already in train mode, submodules in eval mode stay so: a frozen BatchNorm,
    for instance.
    """
    with modes_kept(model):
        if not model.training:
            model.train()
        yield
