"""Sizes that are to be free and are not: where the model's code fixes them."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from l0prune.capture.capture import capture, quiet
from l0prune.capture.free_sizes import FreeSizes, Inputs
from l0prune.capture.hints import without_hints
from l0prune.capture.kept_state import without_state
from l0prune.capture.modes import evaluating
from l0prune.capture.own_forward import own_forward
from l0prune.errors import UsageError


def check_free(model: nn.Module, example: Inputs, free: FreeSizes) -> None:
    """Raise UsageError where the model's code fixes a size that is to be free; it says where."""
    captured = capture(model, *example, dynamic_batch=True, free=free) if free else None
    for name in free.names:
        if captured is not None and name not in captured.free:
            raise UsageError(
                f"{name} cannot be free: torch.export finds no graph of the model for other sizes "
                f"than {free.sizes(example)[name]}{_why(model, example, free, name)}. Leave it out "
                "of dynamic_shapes, or let the code read the size off the tensor there (x.shape) "
                "instead of having a number."
            )


def _why(model: nn.Module, example: Inputs, free: FreeSizes, name: str) -> str:
    """What torch.export says of the one size, as a clause; empty where it says nothing."""
    leaves, structure = pytree.tree_flatten(example)
    dims = [
        {dim: Dim(name) for dim, each in free.of(number).items() if each == name} or None
        for number in range(len(leaves))
    ]
    args, kwargs = pytree.tree_unflatten(dims, structure)
    shapes = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    try:
        with evaluating(model), own_forward(model), without_state(model), without_hints(), quiet():
            torch.export.export(model, *example, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = [line.removeprefix("- ").rstrip(".") for line in lines if line.startswith("- ")]
        where = [line for line in lines if line.startswith('File "') and "/torch/" not in line]
        return f" ({'; '.join((said or lines)[:1] + where[-1:])})"
    return ""
