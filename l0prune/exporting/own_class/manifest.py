"""What has to be known beside the tensors to make the model's own class anew at its new sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from l0prune.exporting.own_class.layers import Layer
from l0prune.exporting.own_class.resizing import Changes


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
    return {"shapes": shapes, "attributes": attributes, "layers": kinds}
