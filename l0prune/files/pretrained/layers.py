"""What a module of a cut model may become, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from l0prune.files.pretrained.cut_layers import (
    CutAttention,
    CutGroupNorm,
    CutLayerNorm,
    PassedBy,
    PickedAttention,
    PickedLinear,
)
from l0prune.files.pretrained.given_sizes import GivenSizes, MixedIn, PaddedNorm

_KINDS = (
    CutLayerNorm,
    CutGroupNorm,
    PickedLinear,
    CutAttention,
    PickedAttention,
    PassedBy,
    GivenSizes,
    PaddedNorm,
)
LAYERS: dict[str, type[nn.Module]] = {each.__name__: each for each in _KINDS}


def become(module: nn.Module, name: str) -> None:
    """Let a module be the layer of this name, in place; what that needs has to be given to it."""
    kind = LAYERS[name]
    module.__class__ = kind.mixed_into(type(module)) if issubclass(kind, MixedIn) else kind


def change(
    model: nn.Module,
    layers: Mapping[str, str],
    attributes: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
    dropped: Sequence[str] = (),
) -> None:
    """Let a model's modules be what a manifest says, in place, but for the sizes of its tensors.

    Args:
        model: with its tensors at the new sizes.
        layers: by path, what modules become.
        attributes: by path, those that change.
        tensors: among others those that layers gain, by name.
        dropped: parameters in whose place are zeros.
    """
    drop(model, dropped)
    for path, name in layers.items():
        module = model.get_submodule(path)
        become(module, name)
        kept = tensors.get(f"{path}.kept" if path else "kept")
        if kept is not None and hasattr(LAYERS[name], "reads_by"):
            module.register_buffer("kept", kept.to(next(module.parameters()).device))
    for path, changed in attributes.items():
        module = model.get_submodule(path)
        for name, value in changed.items():
            setattr(module, name, tuple(value) if isinstance(value, list) else value)


def drop(model: nn.Module, names: Sequence[str]) -> None:
    """Let zeros stand in place of these parameters: nothing trains them, and no file has them."""
    held = dict(model.named_parameters(remove_duplicate=False))
    gone = {id(held[name]) for name in names}
    for name, old in held.items():
        if id(old) in gone:
            path, _, leaf = name.rpartition(".")
            module, zero = model.get_submodule(path), old.detach().new_zeros([1] * old.ndim)
            delattr(module, leaf)
            module.register_buffer(leaf, zero, persistent=False)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain attributes of this very module that are tensors."""
    for table in (module._parameters, module._buffers, vars(module)):
        for leaf, value in table.items():
            if isinstance(value, Tensor):
                yield leaf, value
