"""Networks that people prune today, as a zoo of their own: small, with random weights.

pip install ultralytics transformers diffusers dynamic-network-architectures

Each is built by its library's own classes from a configuration with few and narrow layers. Beside
it stands the library's own loss, where it has one, on random targets.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from benchmarks.scramble import Example

Loss = Callable[[nn.Module], Tensor]
Made = tuple[nn.Module, Example, Loss | None]

_LIBRARIES = ("torch", "transformers", "ultralytics", "diffusers", "dynamic-network-architectures")
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LAYERS |= {"intermediate_size": 48}
_DETR = {
    "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_layers": 2,
    "num_queries": 7, "num_labels": 5,
}  # fmt: skip


def versions() -> str:
    """The versions of the libraries that build the networks."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)


def _images(side: int = 64, count: int = 2) -> Tensor:
    return torch.randn(count, 3, side, side)


def ultralytics(kind: str, config: str, side: int = 96, classes: int = 5) -> Made:
    """A network of ultralytics by its configuration file, with the loss of its trainer."""
    os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    from ultralytics.cfg import get_cfg
    from ultralytics.nn import tasks

    model: Any = getattr(tasks, kind)(config, nc=classes, verbose=False)
    model.args, model.nc = get_cfg(), classes  # as its trainer does
    # As its own export does where sizes are to be free; RT-DETR's code then asks for values.
    model.model[-1].dynamic = kind != "RTDETRDetectionModel"
    if kind == "RTDETRDetectionModel":
        # Of 300 each of the 189 positions would be one, in the order of their scores, of which some
        # differ by less than float32 rounds.
        model.model[-1].num_queries = 30
    image = torch.rand(2, 3, side, side)
    boxes = torch.tensor([[0.4, 0.4, 0.3, 0.3], [0.6, 0.5, 0.4, 0.2], [0.5, 0.5, 0.5, 0.5]])
    batch = {
        "img": image,
        "batch_idx": torch.tensor([0.0, 0.0, 1.0]),
        "cls": torch.tensor([[0.0], [1.0], [2.0]]),
        "bboxes": boxes,
        "masks": torch.zeros(2, side // 4, side // 4).index_fill_(1, torch.tensor([9, 10]), 1),
        "keypoints": torch.rand(3, 17, 3),
        "sem_masks": torch.zeros(2, side // 4, side // 4),
    }
    return model, ((image,), {}), lambda trained: trained.train()(batch)[0].sum()


def yolo(version: int) -> dict[str, Callable[[], Made]]:
    """The detector of a version, and its heads for segmentation and poses."""
    kinds = {"": "DetectionModel", "-seg": "SegmentationModel", "-pose": "PoseModel"}
    return {
        f"yolo{version}n{head}": partial(ultralytics, kind, f"yolo{version}n{head}.yaml")
        for head, kind in kinds.items()
    }


def transformers(
    kind: str, inputs: dict[str, Any], targets: dict[str, Any] | None, auto: str, **settings: Any
) -> Made:
    """A class of transformers by its type; its loss is what it returns where targets are given."""
    import transformers as library

    config = library.AutoConfig.for_model(kind, **settings)
    return _of_transformers(getattr(library, auto)(config), inputs, targets)


def _of_transformers(
    model: nn.Module, inputs: dict[str, Any], targets: dict[str, Any] | None
) -> Made:
    return model, ((), inputs), targets and (lambda trained: trained(**inputs, **targets).loss)


def _boxes() -> list[dict[str, Tensor]]:
    boxes = torch.tensor([[0.4, 0.4, 0.3, 0.3], [0.6, 0.5, 0.4, 0.2]])
    return [{"class_labels": torch.tensor([0, 1]), "boxes": boxes} for _ in range(2)]


def rt_detr() -> Made:
    from transformers import RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    return transformers(
        "rt_detr", {"pixel_values": _images()}, {"labels": _boxes()}, "RTDetrForObjectDetection",
        backbone_config=backbone, encoder_in_channels=[16, 24, 32], encoder_hidden_dim=32,
        encoder_attention_heads=4, decoder_in_channels=[32] * 3, decoder_attention_heads=4,
        num_denoising=4, initializer_range=0.1, freeze_backbone_batch_norms=False, **_DETR,
    )  # fmt: skip


def rf_detr() -> Made:
    from transformers import RfDetrDinov2Config

    backbone = RfDetrDinov2Config(
        image_size=64, patch_size=8, num_windows=2, mlp_ratio=2, hidden_size=32,
        num_hidden_layers=3, num_attention_heads=4, out_features=["stage2", "stage3"],
    )  # fmt: skip
    return transformers(
        "rf_detr", {"pixel_values": _images()}, {"labels": _boxes()}, "RfDetrForObjectDetection",
        backbone_config=backbone, decoder_self_attention_heads=4, decoder_cross_attention_heads=4,
        group_detr=2, c2f_num_blocks=1, **_DETR,
    )  # fmt: skip


def _swin() -> Any:
    from transformers import SwinConfig

    return SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[1] * 4, num_heads=[2, 2, 4, 4],
        window_size=4, out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


_MASKS = {
    "hidden_dim": 32, "encoder_feedforward_dim": 48, "encoder_layers": 1, "decoder_layers": 2,
    "dim_feedforward": 48, "num_attention_heads": 4, "num_queries": 7, "num_labels": 5,
    "train_num_points": 64,
}  # fmt: skip


def _masked() -> dict[str, Any]:
    masks = (torch.arange(64) < 32).float().expand(2, 64, 64)
    return {
        "mask_labels": [torch.stack([m, 1 - m]) for m in masks],
        "class_labels": [torch.tensor([0, 1])] * 2,
    }


def mask2former() -> Made:
    return transformers(
        "mask2former", {"pixel_values": _images()}, _masked(),
        "Mask2FormerForUniversalSegmentation", backbone_config=_swin(), feature_size=32,
        mask_feature_size=32, **_MASKS,
    )  # fmt: skip


def oneformer() -> Made:
    inputs = {"pixel_values": _images(), "task_inputs": torch.randint(5, 90, (2, 8))}
    return transformers(
        "oneformer", inputs, _masked(),
        "OneFormerForUniversalSegmentation", backbone_config=_swin(), conv_dim=32, mask_dim=32,
        task_seq_len=8, query_dec_layers=1, **_MASKS,
    )  # fmt: skip


def sam2_encoder() -> Made:
    from transformers import Sam2HieraDetConfig

    backbone = Sam2HieraDetConfig(
        hidden_size=16, image_size=[64, 64], blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 4, 2], window_positional_embedding_background_size=[4, 4],
        global_attention_blocks=[3],
    )  # fmt: skip
    return transformers(
        "sam2_vision_model", {"pixel_values": _images()}, None, "Sam2VisionModel",
        backbone_config=backbone, backbone_channel_list=[128, 64, 32, 16], fpn_hidden_size=32,
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )  # fmt: skip


def depth_anything() -> Made:
    from transformers import Dinov2Config

    backbone = Dinov2Config(
        image_size=56, patch_size=14, mlp_ratio=2, hidden_size=32, num_hidden_layers=4,
        num_attention_heads=4, out_indices=[1, 2, 3, 4], reshape_hidden_states=False,
    )  # fmt: skip
    return transformers(
        "depth_anything", {"pixel_values": _images(56)}, None, "DepthAnythingForDepthEstimation",
        backbone_config=backbone, reassemble_hidden_size=32, neck_hidden_sizes=[8, 16, 24, 32],
        fusion_hidden_size=16, head_hidden_size=8, depth_estimation_type="metric",
        initializer_range=0.1,  # else the depth is the same whatever the image
    )  # fmt: skip


def siglip2() -> Made:
    inputs = {
        "input_ids": torch.randint(5, 90, (2, 8)),
        "pixel_values": torch.randn(2, 16, 192),
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[16], [8]])).long(),
        "spatial_shapes": torch.tensor([[4, 4], [4, 2]]),
    }
    return transformers(
        "siglip2", inputs, {"return_loss": True}, "Siglip2Model",
        text_config={**_LAYERS, "vocab_size": 99, "max_position_embeddings": 8},
        vision_config={**_LAYERS, "patch_size": 8, "num_patches": 16},
    )  # fmt: skip


def qwen_vision(kind: str) -> Made:
    """The vision tower of a Qwen-VL on one image of 8 by 8 patches."""
    settings: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    settings |= {"intermediate_size": 48, "out_hidden_size": 24}
    settings |= (
        {"fullatt_block_indexes": [1], "window_size": 16}
        if kind == "qwen2_5_vl"
        else {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    )
    inputs = {
        "hidden_states": torch.randn(64, 3 * 2 * 16), "grid_thw": torch.tensor([[1, 8, 8]]),
    }  # fmt: skip
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config, made = {
        "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VisionTransformerPretrainedModel),
        "qwen3_vl": (Qwen3VLConfig, Qwen3VLVisionModel),
    }[kind]
    tower = made._from_config(config(vision_config=settings).vision_config)
    return _of_transformers(tower, inputs, None)


def whisper() -> Made:
    inputs = {
        "input_features": torch.randn(2, 16, 60), "decoder_input_ids": torch.randint(5, 90, (2, 7)),
    }  # fmt: skip
    return transformers(
        "whisper", inputs, {"labels": torch.randint(5, 90, (2, 7))},
        "WhisperForConditionalGeneration", vocab_size=99, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, num_mel_bins=16,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=30, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip


def moonshine() -> Made:
    inputs = {
        "input_values": torch.randn(2, 4000), "decoder_input_ids": torch.randint(5, 90, (2, 7)),
    }  # fmt: skip
    return transformers(
        "moonshine", inputs, {"labels": torch.randint(5, 90, (2, 7))},
        "MoonshineForConditionalGeneration", vocab_size=99, hidden_size=32, intermediate_size=48,
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4, use_cache=False,
    )  # fmt: skip


def wav2vec2_bert() -> Made:
    return transformers(
        "wav2vec2-bert", {"input_features": torch.randn(2, 40, 20)},
        {"labels": torch.randint(3, 30, (2, 5))}, "Wav2Vec2BertForCTC", vocab_size=32, **_LAYERS,
        feature_projection_input_dim=20, conv_depthwise_kernel_size=7, layerdrop=0.0,
        mask_time_length=4,
    )  # fmt: skip


def vits() -> Made:
    model, example, loss = transformers(
        "vits", {"input_ids": torch.randint(1, 38, (2, 12))}, None, "VitsModel", hidden_size=32,
        num_hidden_layers=2, ffn_dim=48, flow_size=32, spectrogram_bins=17,
        use_stochastic_duration_prediction=False, upsample_initial_channel=32,
        upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4], resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]], prior_encoder_num_flows=2, noise_scale=0.0,
        prior_encoder_num_wavenet_layers=2, posterior_encoder_num_wavenet_layers=2,
        duration_predictor_filter_channels=24,
    )  # fmt: skip
    for module in model.modules():  # a norm of weights is computed in each forward, without need
        if is_parametrized(module, "weight"):
            remove_parametrizations(module, "weight")
    return model, example, loss


def patchtst() -> Made:
    return transformers(
        "patchtst", {"past_values": torch.randn(2, 32, 3)},
        {"future_values": torch.randn(2, 8, 3)}, "PatchTSTForPrediction", num_input_channels=3,
        context_length=32, patch_length=8, patch_stride=8, num_hidden_layers=2, d_model=32,
        num_attention_heads=4, ffn_dim=48, prediction_length=8,
    )  # fmt: skip


def timesfm() -> Made:
    return transformers(
        "timesfm", {"past_values": torch.randn(2, 64)}, {"future_values": torch.randn(2, 16)},
        "TimesFmModelForPrediction", patch_length=8, context_length=64, horizon_length=16,
        head_dim=8, **_LAYERS,
    )  # fmt: skip


def _denoising(model: nn.Module, sample: Tensor, **inputs: Any) -> Made:
    """A network of diffusers, trained as its scripts do: on the squared error of the noise."""
    noise = torch.randn_like(sample)

    def loss(trained: nn.Module) -> Tensor:
        found = trained(**given).sample[:, : noise.shape[1]]
        return nn.functional.mse_loss(found, noise)

    given = {next(iter(inspect.signature(model.forward).parameters)): sample} | inputs
    return model, ((), given), loss


_UNET = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1}
_UNET |= {"norm_num_groups": 4}


def diffusers_unet() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=8,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **_UNET,
    )  # fmt: skip
    return _denoising(model, torch.randn(2, 3, 16, 16), timestep=torch.tensor([3, 7]))


def diffusers_unet_condition() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=24, **_UNET,
    )  # fmt: skip
    return _denoising(
        model, torch.randn(2, 4, 16, 16), timestep=torch.tensor([3, 7]),
        encoder_hidden_states=torch.randn(2, 6, 24),
    )  # fmt: skip


def diffusers_dit() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=8, patch_size=2, norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip
    return _denoising(
        model, torch.randn(2, 4, 8, 8), timestep=torch.tensor([3, 7]),
        class_labels=torch.tensor([1, 4]),
    )  # fmt: skip


def nnunet(residual: bool) -> Made:
    """What nnU-Net v2 plans: plain or residual stages, InstanceNorm, outputs at each depth."""
    from dynamic_network_architectures.architectures import unet

    blocks = {"n_blocks_per_stage": [1, 1, 1]} if residual else {"n_conv_per_stage": [2, 2, 2]}
    model = (unet.ResidualEncoderUNet if residual else unet.PlainConvUNet)(
        1, 3, [8, 16, 24], nn.Conv3d, 3, [1, 2, 2], **blocks, num_classes=3,
        n_conv_per_stage_decoder=[1, 1], conv_bias=True, norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True}, deep_supervision=False,
    )  # fmt: skip
    image, classes = torch.randn(2, 1, 16, 16, 16), torch.randint(0, 3, (2, 16, 16, 16))
    return model, ((image,), {}), lambda net: nn.functional.cross_entropy(net(image), classes)


MODELS: dict[str, Callable[[], Made]] = {
    **yolo(11),
    **yolo(12),
    "rtdetr-l (ultralytics)": lambda: ultralytics("RTDETRDetectionModel", "rtdetr-l.yaml"),
    "rt_detr": rt_detr,
    "rf_detr": rf_detr,
    "mask2former": mask2former,
    "oneformer": oneformer,
    "sam2_encoder": sam2_encoder,
    "depth_anything": depth_anything,
    "siglip2": siglip2,
    "qwen2_5_vl_vision": lambda: qwen_vision("qwen2_5_vl"),
    "qwen3_vl_vision": lambda: qwen_vision("qwen3_vl"),
    "whisper": whisper,
    "moonshine": moonshine,
    "wav2vec2_bert": wav2vec2_bert,
    "vits": vits,
    "patchtst": patchtst,
    "timesfm": timesfm,
    "diffusers_unet2d": diffusers_unet,
    "diffusers_unet2d_condition": diffusers_unet_condition,
    "diffusers_dit": diffusers_dit,
    "nnunet_plain": lambda: nnunet(residual=False),
    "nnunet_residual": lambda: nnunet(residual=True),
}
