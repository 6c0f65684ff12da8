"""The networks of ``benchmarks.threads``, from public packages, with random weights.

pip install ".[benchmarks]"
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from benchmarks.rebuilt import Vit

Example = tuple[tuple[Any, ...], dict[str, Any]]
Built = tuple[nn.Module, Example]


def images(*size: int) -> Example:
    """One input of random numbers."""
    return (torch.randn(size),), {}


def tokens(length: int = 64, words: int = 500) -> Example:
    """Two texts of random words."""
    return (), {"input_ids": torch.randint(1, words, (2, length))}


def yolo(config: str, side: int = 160) -> Built:
    """A detector of ultralytics by its configuration file; what it decodes for a user, too."""
    os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel(config, verbose=False), images(2, 3, side, side)


def timm(name: str, side: int, **settings: Any) -> Built:
    """A model of timm for images of this size."""
    import timm

    model = timm.create_model(name, pretrained=False, img_size=side, **settings)
    return model, images(2, 3, side, side)


def deit() -> Built:
    return timm("deit_small_patch16_224", 64, patch_size=8, depth=3)


def timm_swin_v2() -> Built:
    return timm(
        "swinv2_tiny_window8_256", 64, patch_size=2, embed_dim=48, depths=(2, 2, 2),
        num_heads=(3, 6, 12), num_classes=100,
    )  # fmt: skip


def torchvision(name: str, side: int = 96) -> Built:
    """A model of torchvision."""
    from torchvision.models import get_model

    return get_model(name, weights=None), images(2, 3, side, side)


def resnet18() -> Built:
    """A ResNet of torchvision for the ten classes of CIFAR."""
    from torchvision.models import resnet18

    return resnet18(num_classes=10), images(2, 3, 32, 32)


def vit(attention: type[nn.Module]) -> Built:
    """A vision transformer around this attention."""
    return Vit(attention, dim=192, heads=6, depth=3), images(2, 3, 64, 64)


def vit_pytorch() -> Built:
    from vit_pytorch import ViT

    model = ViT(
        image_size=64, patch_size=8, num_classes=100, dim=192, depth=3, heads=4, mlp_dim=768
    )
    return model, images(2, 3, 64, 64)


def swin(name: str) -> Built:
    """Swin of transformers, with three stages and two patch mergings."""
    from transformers import AutoConfig, AutoModelForImageClassification

    config = AutoConfig.for_model(
        name, image_size=64, patch_size=2, embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12],
        window_size=4, num_labels=100,
    )  # fmt: skip
    model = AutoModelForImageClassification.from_config(config)
    return model, ((), {"pixel_values": torch.randn(2, 3, 64, 64)})


def detr(name: str, **settings: Any) -> Built:
    """A detector of transformers around its own ResNet, whose norms it freezes."""
    from transformers import AutoConfig, AutoModelForObjectDetection, ResNetConfig

    stages = (
        ["stage2", "stage3", "stage4"] if settings else ["stage1", "stage2", "stage3", "stage4"]
    )
    backbone = ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 96, 128, 192], depths=[1, 1, 1, 1], out_features=stages
    )
    config = AutoConfig.for_model(
        name, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=128, encoder_ffn_dim=512, decoder_ffn_dim=512,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        num_queries=20, num_labels=20, **settings,
    )  # fmt: skip
    model = AutoModelForObjectDetection.from_config(config)
    return model, ((), {"pixel_values": torch.randn(2, 3, 128, 128)})


# As small as learns on a CPU in a minute.
SMALL = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}


def language(name: str, **settings: Any) -> Built:
    """A language model with four queries to each key, as it comes, cache included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        name, **{
            "vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 3, "head_dim": 32,
            "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 768,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, **settings,
        }
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), tokens(words=config.vocab_size)


def unet_3d() -> Built:
    """MONAI's 3D U-Net with InstanceNorms that keep statistics, 128 maps at its widest."""
    from monai.networks.nets import UNet

    norm = ("instance", {"affine": True, "track_running_stats": True})
    model = UNet(3, 1, 4, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=1, norm=norm)
    return model, images(2, 1, 32, 32, 32)


def fast_speech() -> Built:
    """FastSpeech 2 of transformers (a port of ESPnet's); how long it speaks depends on the data."""
    from transformers import FastSpeech2ConformerConfig, FastSpeech2ConformerModel

    config = FastSpeech2ConformerConfig(
        hidden_size=96, vocab_size=80, num_mel_bins=40, encoder_layers=2, decoder_layers=2,
        encoder_num_attention_heads=2, decoder_num_attention_heads=2, encoder_linear_units=384,
        decoder_linear_units=384, speech_decoder_postnet_units=128, duration_predictor_channels=96,
        energy_predictor_channels=96, pitch_predictor_channels=96,
    )  # fmt: skip
    model = FastSpeech2ConformerModel(config)
    nn.init.constant_(model.duration_predictor.linear.bias, 1.6)  # each sound takes some 4 frames
    return model, ((), {"input_ids": torch.randint(1, 80, (2, 24))})
