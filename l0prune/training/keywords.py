"""The settings as typed keywords, by which editors complete and mypy checks them.

They are those of ``Settings``, which says what each means and checks their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from l0prune.plan.limits import LimitsLike
from l0prune.plan.measures import Source
from l0prune.running.criteria import Loss, Metric
from l0prune.training.lambdas import LambdaLike

# As in settings.py, with whose annotations these are compared.
if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer
else:
    Device = Module = Optimizer = Any


class GateKeywords(TypedDict, total=False):
    """Those of ``Pruner``: ``GateSettings``."""

    lam: LambdaLike | None
    measures: Sequence[str]
    budget: LimitsLike | None
    round_to: int | Literal["auto"]
    latency: Source | None
    budget_rate: float | None
    ramp: float
    decide: float | None
    counting: Literal["joint", "groups"]
    l2: float
    l2_detach: bool
    prior: float | Mapping[str, float] | None
    gate_lr: float | None
    compact: Literal["auto", "settle", "never"]


class DenseKeywords(TypedDict, total=False):
    """Those of ``train_dense``: ``Settings`` without what is about gates."""

    loss: Loss | str | None
    metric: Metric | str | None
    epochs: int
    batch_size: int
    accumulate: int
    lr: float
    optimizer: Literal["adam", "adamw", "sgd"] | Callable[[list[dict[str, Any]]], Optimizer]
    momentum: float
    weight_decay: float
    schedule: Literal["settle", "constant", "cosine", "step"] | Callable[[float], float]
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


class Keywords(GateKeywords, DenseKeywords, total=False):
    """Those of ``finetune``: all ``Settings``."""

    learn: bool
    start: str
    at_once: float
    warmup: float | None
    settle: float | None
