"""Fifteen cases on which users of other tools failed: what they wrote of, and what is built for it.

Numbers are those of the threads. Networks come from the package that the thread is about, or from
another one that builds the same; what no package holds is rebuilt (``benchmarks.rebuilt``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks import rebuilt
from benchmarks import thread_models as make
from benchmarks.thread_models import SMALL, Built, images


@dataclass(frozen=True)
class Model:
    """A network of a case.

    Attributes:
        build: makes it.
        what: for the page.
        prepare: how its gates come to stand as they do, see ``benchmarks.thread_steps``.
        closed: the share of gates that close.
        round_to: widths are multiples of this.
        evenly: of each axis that share closes exactly.
        exclude: axes that get no gates.
    """

    build: Callable[[], Built]
    what: str
    prepare: str = "scrambled"
    closed: float = 0.5
    round_to: int = 8
    evenly: bool = False
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A row of the table: what users wrote, and the networks that stand for it."""

    threads: str
    situation: str
    models: dict[str, Model]


TP, OTO, NNCF, MODELOPT = "Torch-Pruning", "OTO", "NNCF", "ModelOpt"
VISION, SWIN, QWEN2 = "torchvision", partial(make.swin, "swin"), partial(make.language, "qwen2")

CASES = (
    Case(
        f"{TP} 147, 503",
        "YOLOv8: C2f splits what one convolution made into two halves; index 768 is out of range",
        {"yolov8n": Model(lambda: make.yolo("yolov8n.yaml"), "ultralytics, `yolov8n.yaml`")},
    ),
    Case(f"{TP} 287", "MViTv2: heads, pooled by depthwise convolutions", {
        "mvitv2_tiny": Model(
            lambda: make.timm("mvitv2_tiny", 96), "timm, images of 96, attention stays whole",
            exclude=("*.attn", "*.attn.branch"),  # it returns sizes, too: no class without it
        ),
    }),
    Case(f"{TP} 340", "DeiT: `num_heads` and `head_dim` stay at their old values", {
        "deit_small": Model(make.deit, "timm, three blocks, images of 64"),
    }),
    Case(
        f"{TP} 393",
        "DINO's ViT: q, k and v by their index; Restormer: depthwise convolutions, then chunk",
        {
            "dino": Model(lambda: make.vit(rebuilt.FusedQkv), "rebuilt, three blocks"),
            "restormer": Model(lambda: (rebuilt.Restormer(), images(2, 3, 48, 48)), "rebuilt"),
        },
    ),
    Case(f"{TP} 357, 450", "fused qkv, split by einops", {
        "vit_pytorch": Model(make.vit_pytorch, "vit-pytorch's ViT, three blocks"),
        "flash_vit": Model(lambda: make.vit(rebuilt.EinopsQkv), "flash-attn's way, rebuilt"),
    }),
    Case(
        f"{TP} 490, 258",
        "Swin: a fifth cut, and half (patch merging joins four times the width); SwinV2",
        {
            "swin_fifth": Model(SWIN, "transformers, a fifth closed", closed=0.2),
            "swin": Model(SWIN, "transformers"),
            "swinv2": Model(lambda: make.swin("swinv2"), "transformers"),
            "swinv2_timm": Model(make.timm_swin_v2, "timm"),
        },
    ),
    Case(f"{TP} 307; {OTO} 54", "DETR and DINO-DETR: tracing, frozen BatchNorms", {
        "detr": Model(lambda: make.detr("detr"), "transformers"),
        "deformable_detr": Model(
            lambda: make.detr("deformable_detr", two_stage=True, with_box_refine=True),
            "transformers, in two stages, which DINO-DETR builds on",
        ),
    }),
    Case(f"{TP} 125", "Linear, view, ConvTranspose2d", {
        "generator": Model(lambda: (rebuilt.Generator(), images(4, 512)), "as in the thread"),
    }),
    Case(f"{TP} 179, 126", "a convolution with one output, taken for a depthwise one", {
        "one_output": Model(
            lambda: (rebuilt.OneOutput(), images(2, 3, 224, 224)), "as in the thread"
        ),
        "salience": Model(
            lambda: (rebuilt.Salience(), images(2, 3, 128, 128)), "one in the middle, too"
        ),
    }),
    Case(
        f"{TP} 328, 303, 9",
        "layers of MobileNetV3 and V2 that stay whole; groups of ResNeXt",
        {
            "mobilenet_v3": Model(lambda: make.torchvision("mobilenet_v3_small", 224), VISION),
            "mobilenet_v2": Model(lambda: make.torchvision("mobilenet_v2", 160), VISION),
            "resnext50": Model(lambda: make.torchvision("resnext50_32x4d", 96), VISION),
        },
    ),
    Case(
        f"{TP} 495, 439, 461, 527",
        "Qwen2 to 3: grouped queries, norms of q and k; the file loads again",
        {
            "qwen2": Model(QWEN2, "transformers, four queries to a key"),
            "qwen2_even": Model(
                QWEN2, "transformers, half of each axis, heads keep their size",
                evenly=True, exclude=("*.head_dim",),
            ),
            "qwen3": Model(
                lambda: make.language("qwen3"), "transformers, four queries to a key", "beside_8b"
            ),
        },
    ),
    Case(f"{TP} 468", "a LLaMA at half the width: nothing is left of its quality", {
        "llama": Model(
            lambda: make.language("llama", **SMALL),
            "transformers, learned under params=0.27", "learned",
        ),
    }),
    Case(
        f"{NNCF} 851, 1057, 1038",
        "YOLOv5s: export and network disagree; a 3D U-Net, whose InstanceNorms keep 128 "
        "channels of 120; counts stay what they were",
        {
            "yolov5s": Model(lambda: make.yolo("yolov5s.yaml"), "ultralytics, `yolov5s.yaml`"),
            "unet_3d": Model(make.unet_3d, "MONAI"),
        },
    ),
    Case(
        f"{OTO} 57, 44; {MODELOPT} 506",
        "FastSpeech 2: nothing is found; a run in DDP; a YOLOv8 from its checkpoint",
        {
            "fastspeech2": Model(make.fast_speech, "transformers' FastSpeech2Conformer"),
            "resnet18_ddp": Model(
                make.resnet18,
                "torchvision, CIFAR's size, learned by two processes under macs=0.3", "in_ddp",
            ),
            "yolov8n_restored": Model(
                lambda: make.yolo("yolov8n.yaml"), "ultralytics, `yolov8n.yaml`", "restored"
            ),
        },
    ),
    Case(f"{TP} 38", "the pruned network is not faster", {
        "mobilenet_v2_fast": Model(
            lambda: make.torchvision("mobilenet_v2", 224), "torchvision, widths by 16", round_to=16
        ),
    }),
)  # fmt: skip
MODELS = {name: model for case in CASES for name, model in case.models.items()}
