"""What a module of a cut model may become, by name."""

from __future__ import annotations

from torch import nn

from l0prune.files.pretrained.cut_layers import (
    CutAttention,
    CutGroupNorm,
    CutLayerNorm,
    PickedAttention,
    PickedLinear,
)
from l0prune.files.pretrained.given_sizes import GivenSizes

_KINDS = (CutLayerNorm, CutGroupNorm, PickedLinear, CutAttention, PickedAttention, GivenSizes)
LAYERS: dict[str, type[nn.Module]] = {each.__name__: each for each in _KINDS}


def become(module: nn.Module, name: str) -> None:
    """Let a module be the layer of this name, in place; what that needs has to be given to it."""
    kind = LAYERS[name]
    module.__class__ = GivenSizes.mixed_into(type(module)) if kind is GivenSizes else kind
