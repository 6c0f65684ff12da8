"""What has to be known beside the tensors to make the model's own class anew at its new sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.exporting.own_class.layers import Layer
from l0prune.exporting.own_class.resizing import Changes
from l0prune.exporting.slicing.tensors import stored_in
from l0prune.files.pretrained.given_sizes import GIVEN, GivenSizes


def manifest(
    model: nn.Module, tensors: Mapping[str, Tensor], changes: Changes, layers: Mapping[str, Layer]
) -> dict[str, Any]:
    """Old and new shape of each tensor, and what of the modules follows, as JSON data."""
    shapes = {
        name: {"old": list(old.shape), "new": list(tensors[name].shape)}
        for name, old in model.state_dict().items()
        if name in tensors
    }
    attributes = {path: dict(of) for path, of in changes.items()}
    for path, layer in layers.items():
        attributes.setdefault(path, {}).update(layer.attributes)
    kinds = {path: layer.kind for path, layer in layers.items() if layer.kind}
    kinds |= {path: GivenSizes.__name__ for path, of in changes.items() if GIVEN in of}
    return {"shapes": shapes, "attributes": attributes, "layers": kinds}


def constants(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Old and new shape of each tensor that has changed and is in no state_dict.

    Args:
        model: the user's ungated module at its old sizes.
        tensors: the cut tensors as the module has to have them, by name.
    """
    found, state = {}, model.state_dict()
    for name, new in tensors.items():
        old = None if name in state else stored_in(model, name)
        if old is not None and not (old.shape == new.shape and torch.equal(old.to(new), new)):
            found[name] = {"old": list(old.shape), "new": list(new.shape)}
    return found
