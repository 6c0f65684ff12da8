"""A state_dict with a manifest of shapes, from which torch alone rebuilds the user's own class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.export.certificate import TOLERANCE, Inputs, cast, difference

# Attributes of torch's own modules that repeat a size of a tensor: attribute → (tensor, dim).
_FROM_TENSORS: dict[str, tuple[str, int]] = {
    "num_features": ("running_mean", 0),
    "embedding_dim": ("weight", 1),
}


def manifest(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Old and new shape of each tensor, and the module attributes that must follow.

    Args:
        model: the user's ungated module at its old sizes.
        tensors: the cut tensors by name.
    """
    shapes, attributes = {}, {}
    for name, old in model.state_dict().items():
        if name in tensors:
            shapes[name] = {"old": list(old.shape), "new": list(tensors[name].shape)}
    for path, module in model.named_modules():
        changed = _attributes(module, path, tensors)
        if changed:
            attributes[path] = changed
    return {"shapes": shapes, "attributes": attributes}


def verdict(
    model: nn.Module,
    dense: nn.Module,
    given: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    inputs: Inputs,
) -> dict[str, Any]:
    """Whether the user's own class, resized by the manifest, computes what ``dense`` does.

    It does not where the forward has sizes written into it, gathers inputs, or (as in
    ``nn.MultiheadAttention``) derives one size from another; the reason says what happened.

    Args:
        model: the user's ungated module at its old sizes; it is left alone.
        dense: the sliced module.
        given: the manifest.
        tensors: the cut tensors by name.
        inputs: what both are run on, in float32.
    """
    args, kwargs = cast(inputs, torch.float32)
    try:
        rebuilt = _resized(copy.deepcopy(model), given, tensors).float().eval()
        with torch.no_grad():
            found = rebuilt(*args, **kwargs)
    except Exception as error:  # whatever the user's forward raises is the reason
        first = next(iter(str(error).splitlines()), "")
        reason = f"its forward does not allow these sizes: {type(error).__name__}: {first}"
        return {"verified": False, "reason": reason}
    with torch.no_grad():
        expected = copy.deepcopy(dense).float()(*args, **kwargs)
    if not difference(expected, found) <= TOLERANCE["float32"]:
        return {"verified": False, "reason": "its forward computes something else at these sizes"}
    return {"verified": True, "reason": ""}


def _resized(
    model: nn.Module, given: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> nn.Module:
    """The module with the manifest's attributes and the cut tensors."""
    for path, attributes in given["attributes"].items():
        for name, value in attributes.items():
            setattr(model.get_submodule(path), name, value)
    for name in given["shapes"]:
        path, _, leaf = name.rpartition(".")
        owner, tensor = model.get_submodule(path), tensors[name]
        setattr(owner, leaf, nn.Parameter(tensor) if leaf in owner._parameters else tensor)
    return model


def _attributes(module: nn.Module, path: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    prefix = f"{path}." if path else ""
    sizes: dict[str, int] = {}
    weight = tensors.get(f"{prefix}weight")
    if isinstance(module, nn.Linear) and weight is not None:
        sizes = {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    elif isinstance(module, nn.modules.conv._ConvNd) and weight is not None:
        sizes = _convolution(module, weight)
    for attribute, (tensor, dim) in _FROM_TENSORS.items():
        found = tensors.get(f"{prefix}{tensor}")
        if hasattr(module, attribute) and found is not None and found.ndim > dim:
            sizes[attribute] = found.shape[dim]
    return {name: size for name, size in sizes.items() if getattr(module, name) != size}


def _convolution(module: nn.modules.conv._ConvNd, weight: Tensor) -> dict[str, int]:
    """Sizes and groups; a depthwise layer has as many groups as channels are left."""
    own, other = int(weight.shape[0]), int(weight.shape[1])
    per_group = module.weight.shape[0] // module.groups
    groups = own // per_group if module.weight.shape[1] == other and module.groups > 1 else None
    groups = groups or module.groups
    first, second = own, other * groups
    if module.transposed:
        first, second = second, first
    return {"out_channels": first, "in_channels": second, "groups": groups}
