"""Sizes of an example beside the batch that could be free: sides of images, lengths of texts."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

import l0prune
from benchmarks.isolation import Late, within

Shapes = dict[str, dict[int, str]]


_IMAGE = {2: "height", 3: "width"}
_VIDEO = {2: "frames", 3: "height", 4: "width"}


def askable(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """The dims to ask for, by input: of images and videos all but channels, of the rest all.

    Texts that are as long as each other have one length, which is called by the first of them.
    """
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    shapes: Shapes = {}
    lengths: dict[int, str] = {}
    for name, given in arguments.items():
        if not isinstance(given, Tensor) or given.ndim < 2:
            continue
        dims = {4: _IMAGE, 5: _VIDEO}.get(given.ndim)
        if dims is None:
            sizes = list(enumerate(given.shape))[1:]
            dims = {dim: lengths.setdefault(size, f"{name}_{dim}") for dim, size in sizes}
        shapes[name] = {dim: what for dim, what in dims.items() if given.shape[dim] > 1}
    return shapes


def possible(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], limit: float = 60
) -> Shapes | None:
    """Those of them that the model's code does not fix; None where that takes more seconds.

    torch.export may reason for hours about symbolic sides that are padded to whole windows.
    """
    shapes = askable(model, args, kwargs)
    try:
        with within(limit):
            survey = l0prune.survey(model, args, kwargs, dynamic_shapes=shapes, own_class=False)
    except Late:
        return None
    kept = {
        name: {dim: what for dim, what in dims.items() if what not in survey.fixed}
        for name, dims in shapes.items()
    }
    return {name: dims for name, dims in kept.items() if dims}
