"""Models from packages for which no rule was written, as a zoo of their own.

pip install segmentation-models-pytorch vit-pytorch conformer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...]]


def unet() -> Made:
    """A segmentation network: an encoder, a decoder and the skips between them."""
    from segmentation_models_pytorch import Unet

    return Unet("resnet34", encoder_weights=None, classes=3), (torch.randn(2, 3, 64, 64),)


def max_vit() -> Made:
    """Convolutions and windowed attention by turns, written with einops."""
    from vit_pytorch.max_vit import MaxViT

    model = MaxViT(
        num_classes=10, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4
    )
    return model, (torch.randn(2, 3, 64, 64),)


def conformer() -> Made:
    """A speech encoder's block: feed-forward, relative attention, gated depthwise convolution."""
    from conformer import ConformerBlock

    block = ConformerBlock(
        dim=64, dim_head=16, heads=4, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=15
    )
    return nn.Sequential(nn.Linear(40, 64), block, nn.Linear(64, 10)), (torch.randn(2, 24, 40),)


MODELS: dict[str, Callable[[], Made]] = {"unet": unet, "max_vit": max_vit, "conformer": conformer}
