"""The loss that a model computes itself, where its inputs hold the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def own_loss(outputs: Any) -> Tensor | None:
    """The loss in what a model returns, or None.

    It is ``outputs.loss`` (transformers), ``outputs["loss"]``, or the sum of a dict of losses, as
    torchvision's detectors give in train mode.
    """
    found = getattr(outputs, "loss", None)
    if isinstance(outputs, Mapping):
        found = outputs.get("loss", found)
        if found is None and outputs and all(map(_is_loss, outputs.values())):
            found = sum(outputs.values())
    return found if _is_loss(found) else None


def are_findings(outputs: Any) -> bool:
    """A dict for each example: what detectors give in eval mode, where they have no loss."""
    is_list = isinstance(outputs, list | tuple) and len(outputs) > 0
    return is_list and all(isinstance(each, Mapping) for each in outputs)


def _is_loss(found: Any) -> bool:
    return isinstance(found, Tensor) and not found.dim() and found.is_floating_point()
