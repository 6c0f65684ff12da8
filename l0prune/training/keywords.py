"""The settings as typed keywords, by which editors complete and mypy checks them.

Generated from the settings by ``python tests/training/test_keywords.py``; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from l0prune.plan.limits import LimitsLike
from l0prune.plan.measures import Source
from l0prune.running.criteria import Loss, Metric
from l0prune.training.gate_settings import Compact
from l0prune.training.lambdas import LambdaLike
from l0prune.training.settings import OptimizerFactory, Schedule

if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module
else:
    Device = Module = Any


class GateKeywords(TypedDict, total=False):
    """Keywords of ``GateSettings``."""

    lam: LambdaLike | None
    measures: Sequence[str]
    budget: LimitsLike | None
    latency: Source | None
    round_to: int | Literal["auto"]
    target: str
    budget_rate: float | None
    ramp: float
    branch_freeze_fraction: float | None
    counting: Literal["joint", "groups"]
    l2: float
    l2_detach: bool
    prior: float | Mapping[str, float] | None
    gate_lr: float | None
    learn: bool | Literal["gates"]
    penalty: str | None
    elements: float | None
    quantize: Literal["int8", "bits"] | None
    bits: Sequence[int]
    bits_lam: float
    compact: Compact


class DenseKeywords(TypedDict, total=False):
    """Keywords of ``DenseSettings``."""

    loss: Loss | str | None
    metric: Metric | str | None
    epochs: int
    batch_size: int
    accumulate: int
    lr: float
    optimizer: Literal["adam", "adamw", "sgd", "gsm"] | OptimizerFactory
    momentum: float
    weight_decay: float
    schedule: Literal["settle", "constant", "cosine", "step"] | Schedule
    clip: float | None
    ema: float
    distill: float
    temperature: float
    match: str | Sequence[str]
    teacher: Module | None
    recalibrate: int
    augment: bool
    seed: int
    device: str | Device
    autocast: Literal["bf16", "fp16"] | None
    compile: bool | str
    channels_last: bool
    checkpointing: bool
    distributed: Literal["ddp", "fsdp"] | None
    out: str | Path | None
    resume: bool
    progress: bool
    tensorboard: bool | None


class Keywords(DenseKeywords, GateKeywords, total=False):
    """Keywords of ``Settings``."""

    start: str
    oneshot_fraction: float
    warmup: float | None
    settle: float | None
