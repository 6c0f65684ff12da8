"""The model zoos of the coverage table: which models there are, and how to build one.

Weights are random. Inputs are a batch of two at a small size that the model accepts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import pypi, today

Example = tuple[tuple[Any, ...], dict[str, Any]]
Built = tuple[nn.Module, Example]

ZOOS = ("torchvision", "timm", "transformers", "pypi", "today", "small")

# torchvision: sides of images that are not 96, by the beginning of a model's name.
_SIDES = {"vit_": 224, "maxvit": 224, "inception": 128, "quantized_inception": 128}
_DETECTION = ("rcnn", "retinanet", "fcos", "ssd")
_SEGMENTATION = ("deeplabv3", "fcn", "lraspp")
_VIDEO = {"mvit": (16, 224), "swin3d": (8, 64), "s3d": (16, 224)}
_VIDEO |= dict.fromkeys(("r3d", "mc3", "r2plus1d"), (4, 48))


def names(zoo: str) -> list[str]:
    """All models of a zoo: torchvision's by name, one per module of timm, transformers by type.

    ``pypi`` are models of other packages, ``today`` detectors, speech, diffusion and others,
    ``small`` the hand-written networks of the tests.
    """
    if zoo == "torchvision":
        import torchvision

        return list(torchvision.models.list_models())
    if zoo == "timm":
        from timm.models import list_modules

        return sorted(list_modules())
    if zoo == "transformers":
        return sorted([*_TRANSFORMERS, *(f"{name}-lm" for name in _WITH_HEAD)])
    if zoo == "pypi":
        return list(pypi.MODELS)
    if zoo == "today":
        return list(today.MODELS)
    if zoo == "small":
        return list(_cases())
    raise SystemExit(f"no zoo called {zoo!r}: {', '.join(ZOOS)}")


def build(zoo: str, name: str) -> Built:
    """A model in eval mode, and an example of its inputs."""
    model, example, _ = build_with_loss(zoo, name)
    return model, example


def build_with_loss(zoo: str, name: str) -> today.Made:
    """The same, and the loss of the model's library where the zoo has it."""
    torch.manual_seed(0)
    if zoo == "today":
        model, example, loss = today.MODELS[name]()
        return model.eval(), example, loss
    makers = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}
    makers |= {"pypi": _pypi, "small": _small}
    model, example = makers[zoo](name)
    return model.eval(), example, None


def _torchvision(name: str) -> Built:
    import torchvision

    options: dict[str, Any] = {}
    is_detection = any(part in name for part in _DETECTION)
    if is_detection or name.startswith(_SEGMENTATION):
        options = {"weights_backbone": None}
    elif name in ("googlenet", "inception_v3"):
        options = {"init_weights": False}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    if is_detection:
        for module in model.modules():
            if hasattr(module, "score_thresh"):
                module.score_thresh = 0.0  # an untrained model's scores are all below its own
        if not name.startswith("ssd"):
            model.transform.min_size, model.transform.max_size = (160,), 320
        return model, ((torch.rand(2, 3, 160, 160),), {})
    if name.startswith("raft"):
        return model, ((torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)), {})
    for start, (frames, side) in _VIDEO.items():
        if name.startswith(start):
            return model, ((torch.randn(2, 3, frames, side, side),), {})
    side = next((s for start, s in _SIDES.items() if name.startswith(start)), 96)
    return model, ((torch.randn(2, 3, side, side),), {})


def _timm(module: str) -> Built:
    """The model of a timm module that has the fewest parameters, at its own input size."""
    import timm

    sizes: dict[str, int] = {}
    for name in timm.list_models(module=module):
        try:
            with torch.device("meta"):
                model = timm.create_model(name, pretrained=False)
        except Exception:  # some cannot be built without data: they are nobody's smallest
            continue
        sizes[name] = sum(p.numel() for p in model.parameters())
    name = min(sizes, key=lambda each: (sizes[each], each))
    model = timm.create_model(name, pretrained=False)
    shape = model.default_cfg.get("input_size") or (3, 224, 224)
    return model, ((torch.randn(2, *shape),), {})


def _pypi(name: str) -> Built:
    module, args = pypi.MODELS[name]()
    return module, (args, {})


def _small(name: str) -> Built:
    module, args = _cases()[name]()
    return module, (args, {})


def _cases() -> dict[str, Callable[[], Any]]:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from small_networks import CASES

    return CASES


# transformers: a small config of each type, and what it reads.
_SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}
_BACKBONE = {"image_size": 32, "patch_size": 8}
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("text", _SMALL),
    "roberta": ("text", {**_SMALL, "pad_token_id": 1}),
    "distilbert": (
        "text",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "deberta-v2": ("text", {**_SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "electra": ("text", {**_SMALL, "embedding_size": 16}),
    "gpt2": ("text", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("text", _SMALL),
    "opt": ("text", {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "llama": ("text", _GROUPED),
    "mistral": ("text", _GROUPED),
    "qwen2": ("text", _GROUPED),
    "qwen3": ("text", _GROUPED),
    "gemma": ("text", _GROUPED),
    "phi": ("text", _SMALL),
    "falcon": ("text", {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("text", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "t5": (
        "pair",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "bart": ("pair", {"vocab_size": 99, "d_model": 32, **_SMALL, "encoder_layers": 2}),
    "whisper": (
        "speech",
        {"vocab_size": 99, "pad_token_id": 1, "d_model": 32, "max_source_positions": 20},
    ),
    "vit": ("image", {**_SMALL, **_BACKBONE}),
    "deit": ("image", {**_SMALL, **_BACKBONE}),
    "swin": (
        "image",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "window_size": 4,
            "depths": [2, 2],
            "num_heads": [2, 4],
        },
    ),
    "convnext": ("image", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    "segformer": ("image", {"hidden_sizes": [8, 16, 32, 64], "decoder_hidden_size": 32}),
    "detr": ("detr", {"d_model": 32}),
    "clip": ("clip", {}),
    "wav2vec2": ("sound", {**_SMALL, "conv_dim": [16, 16, 16]}),
    "mamba": ("text", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}),
}


# These are there with their language head, too: without it the residual stream is the output.
_WITH_HEAD = ("gemma", "gpt2", "llama", "mistral", "qwen3", "t5")


def _transformers(name: str) -> Built:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = name.removesuffix("-lm")
    reads, settings = _TRANSFORMERS[kind]
    config = AutoConfig.for_model(kind, **_config(kind, settings))
    config.use_cache = False
    with_head = AutoModelForSeq2SeqLM if reads == "pair" else AutoModelForCausalLM
    model: nn.Module = (AutoModel if kind == name else with_head).from_config(config)
    return model, ((), _READS[reads](config))


def _config(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    layers = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4}
    layers |= {"decoder_attention_heads": 4, "decoder_layers": 2, "encoder_layers": 2}
    if name in ("bart", "whisper"):
        return {**settings, **layers}
    if name == "detr":
        from transformers import ResNetConfig

        stages = [f"stage{number}" for number in range(1, 5)]
        backbone = ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, out_features=stages
        )
        return {
            **settings,
            **layers,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": backbone,
            "num_queries": 7,
        }
    if name == "clip":
        return {
            "text_config": {**_SMALL, "max_position_embeddings": 16},
            "vision_config": {**_SMALL, **_BACKBONE},
            "projection_dim": 24,
        }
    if name == "wav2vec2":
        return {**settings, "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2]} | {
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        }
    return settings


def _tokens(length: int = 12) -> Tensor:
    return torch.randint(5, 90, (2, length))


_READS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "text": lambda config: {"input_ids": _tokens()},
    "pair": lambda config: {
        "input_ids": _tokens(),
        "decoder_input_ids": _tokens(7),
    },
    "image": lambda config: {"pixel_values": torch.randn(2, 3, 32, 32)},
    "detr": lambda config: {"pixel_values": torch.randn(2, 3, 64, 64)},
    "clip": lambda config: {
        "input_ids": _tokens(),
        "pixel_values": torch.randn(2, 3, 32, 32),
    },
    "sound": lambda config: {"input_values": torch.randn(2, 1600)},
    "speech": lambda config: {
        "input_features": torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions),
        "decoder_input_ids": _tokens(7),
    },
}
