"""The user's own class at the new sizes: cut tensors, and attributes that repeat their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.capture.provenance import within
from l0prune.exporting.slicing.tensors import stored_in
from l0prune.files.cut_layers import become
from l0prune.files.given_sizes import GIVEN, GivenSizes
from l0prune.plan.layout import outer
from l0prune.plan.plan import Plan

# Attributes of torch's own modules that repeat a size of a tensor: attribute → (tensor, dim), of
# which the first that the module has counts.
_FROM_TENSORS: dict[str, tuple[tuple[str, int], ...]] = {
    "num_features": (("running_mean", 0),),
    "embedding_dim": (("weight", 1),),
    "input_size": (("weight_ih_l0", 1), ("weight_ih", 1)),
    "hidden_size": (("weight_hr_l0", 1), ("weight_hh_l0", 1), ("weight_hh", 1)),
    "proj_size": (("weight_hr_l0", 0),),
}

Changes = dict[str, dict[str, Any]]


def changed_attributes(
    model: nn.Module, tensors: Mapping[str, Tensor], groups: Mapping[str, int]
) -> Changes:
    """By module path, the attributes that must follow the tensors, with their new values.

    Args:
        model: the user's ungated module at its old sizes.
        tensors: the cut tensors under every name of the model's state_dict.
        groups: how many groups each grouped convolution has left, by path.
    """
    found = {}
    for path, module in model.named_modules():
        sizes = _attributes(module, path, tensors, groups.get(path, 1))
        changed = {name: size for name, size in sizes.items() if getattr(module, name) != size}
        if changed:
            found[path] = changed
    return found


def resized(model: nn.Module, changes: Changes, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module with these attributes and tensors; tied tensors stay tied.

    Args:
        model: the user's ungated module at its old sizes.
        changes: as ``changed_attributes`` gives them.
        tensors: the cut tensors by name; those that are equal objects become one.
    """
    replaced: dict[int, Any] = {}
    for name, tensor in tensors.items():
        old = stored_in(model, name)
        if old is not None and id(old) not in replaced:
            is_parameter = isinstance(old, nn.Parameter)
            is_plain = not is_parameter and not _is_buffer(model, name)
            new = tensor.to(old.dtype) if is_plain else tensor  # .to() of the model skips it
            replaced[id(old)] = (
                nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
            )
    result = copied(model, replaced)
    for path, attributes in changes.items():
        module = result.get_submodule(path)
        for name, value in attributes.items():
            setattr(module, name, value)
        if GIVEN in attributes:
            become(module, GivenSizes.__name__)
    return result


def joined(*changes: Changes) -> Changes:
    """All of them; of one attribute the last."""
    result: Changes = {}
    for each in changes:
        for path, attributes in each.items():
            result[path] = {**result.get(path, {}), **attributes}
    return result


def _is_buffer(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(path)._buffers


def groups_left(model: nn.Module, plan: Plan, kept: Tensor) -> dict[str, int]:
    """By path, how many groups of each grouped convolution stay.

    Args:
        model: the user's ungated module at its old sizes.
        plan: its plan.
        kept: the slots that stay, bool, flat.
    """
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
            name = within(path, "weight")
            dims = plan.tensors.get(plan.aliases.get(name, name))
            whole = module.groups if dims is None else outer(dims[0], module.groups)
            found[path] = whole if isinstance(whole, int) else int(plan.mask(whole, kept).sum())
    return found


def _attributes(
    module: nn.Module, path: str, tensors: Mapping[str, Tensor], groups: int
) -> dict[str, int]:
    """The attributes of one of torch's own layers that its tensors determine."""
    prefix = f"{path}." if path else ""
    sizes: dict[str, int] = {}
    weight = tensors.get(f"{prefix}weight")
    if isinstance(module, nn.Linear) and weight is not None:
        sizes = {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    elif isinstance(module, nn.modules.conv._ConvNd) and weight is not None:
        sizes = _convolution(module, weight, groups)
    elif isinstance(module, nn.GroupNorm) and weight is not None:  # groups go as a whole
        channels = int(weight.shape[0])
        groups = channels * module.num_groups // module.num_channels
        sizes = {"num_channels": channels, "num_groups": groups}
    for attribute, places in _FROM_TENSORS.items():
        for tensor, dim in places if attribute in vars(module) else ():
            found = tensors.get(f"{prefix}{tensor}")
            if found is not None and found.ndim > dim:
                sizes[attribute] = found.shape[dim]
                break
    return sizes


def _convolution(module: nn.modules.conv._ConvNd, weight: Tensor, groups: int) -> dict[str, int]:
    """Sizes and groups."""
    first, second = int(weight.shape[0]), int(weight.shape[1]) * groups
    if module.transposed:
        first, second = second, first
    return {"out_channels": first, "in_channels": second, "groups": groups}
