"""Sizes of an example beside the batch that could be free: sides of images, lengths of texts."""

from __future__ import annotations

import inspect
import signal
from types import FrameType
from typing import Any

from torch import Tensor, nn

import l0prune

Shapes = dict[str, dict[int, str]]


class _Late(BaseException):
    """Not an Exception, which a capture would take for its own."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Late


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
    before = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        fixed = l0prune.survey(model, args, kwargs, dynamic_shapes=shapes, own_class=False).fixed
    except _Late:
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    kept = {
        name: {dim: what for dim, what in dims.items() if what not in fixed}
        for name, dims in shapes.items()
    }
    return {name: dims for name, dims in kept.items() if dims}
