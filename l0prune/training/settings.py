"""Every setting of a training run, checked before anything is touched."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from l0prune.cost.limits import limits
from l0prune.errors import UsageError
from l0prune.objective.divergence import Prior

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train.

    Attributes:
        lam: λ of the penalty: a number, an expression in N such as ``"0.1/N"``, or one for each
            axis by glob. None is 0.1/N, or 0 where there is a budget.
        budget: what the exported model may cost: ``"macs=0.5"``, ``{"params": 0.1}``,
            ``"layer3.*: params=0.3"``, several of them; None for no such constraint.
        round_to: open slots of an axis come in multiples of this, within the budget.
        budget_rate: of ascent of the budgets' multipliers (see ``Budget``); None to choose it by
            the number of steps.
        ramp: part of the steps before settling in which a budget's target sinks from the dense
            count to what it is.
        counting: how the penalty counts: ``"joint"`` or ``"groups"`` (see ``penalty``).
        l2: weight decay weighted by the gates' probabilities (eq. 15 and 17 of the paper).
        l2_detach: keep that weight decay from changing the gates.
        prior: P(z ≠ 0) of the gates before any data are seen, one for all or by globs over axis
            names: the variational objective (eq. 21 of the paper); None for λ alone.
        epochs: passes over the training data.
        batch_size: examples a step, of all processes and micro-batches together; data that
            comes in batches of its own keeps those.
        accumulate: micro-batches that a step's examples are worked through in, one after
            another, to need less memory. Each is a forward with gates of its own.
        lr: learning rate of the weights.
        gate_lr: learning rate of the gates; None to choose it by the number of steps in which
            they learn, so that they can move far enough and no further.
        optimizer: of the weights, ``"adam"``, ``"adamw"`` or ``"sgd"``, with Adam for the gates,
            since their gradients are too small for plain descent; or a function that takes the
            parameter groups of both and returns one optimizer.
        momentum: of SGD.
        weight_decay: of the weights; gates are never decayed.
        schedule: ``"settle"`` (constant, then to zero along a cosine while settling),
            ``"constant"``, ``"cosine"`` (to zero over the whole run), ``"step"`` (a tenth after
            half and after three quarters of the steps), or a function from the fraction of the
            steps done to a factor. It applies to every learning rate.
        clip: largest norm of the weights' gradient, or None. The gates' gradient is left alone.
        ema: β of the moving average of weights, buffers and gates that is evaluated and kept
            (the paper's is 0.999); 0 for none.
        distill: share of the loss, 0 to 1, by which the model learns what its teacher answers:
            the class scores (where the outputs have one column, that number), and the outputs of
            the modules in ``match``. It costs one forward of the teacher a step.
        temperature: by which both networks' scores are softened for that.
        match: globs of module names.
        teacher: another network to learn from; None for the dense network: this model without
            its gates, with the weights that it has when training begins. Once weights have
            learned together with gates (a second run of ``finetune``), they are no dense network's
            any more: then give the network as it was before.
        learn: let the gates learn; else they stand as they are (after ``l0prune.fit``), and only
            the weights learn: all of the run is settling.
        warmup: epochs, or a part of one, over which λ rises from 0; None for 5 % of the steps.
        settle: epochs, or a part of one, at the end in which gates stand still and weights
            recover; None for 30 % of the steps, and one step at least where there are budgets.
        recalibrate: batches from which BatchNorm statistics are computed anew while settling and
            at the end; 0 leaves them alone.
        augment: let the data source augment its training batches.
        seed: of the order of the data, the gates' noise and dropout.
        device: ``"auto"`` is the GPU if there is one, else the CPU; or any name torch knows.
        autocast: ``"bf16"``, ``"fp16"`` or None for full precision. Gates stay in float32.
        compile: let torch.compile make training forwards faster: True, or the name of its
            backend. With FSDP each repeated block is compiled.
        channels_last: filters and images lie in memory with their channels last, which GPUs
            like in half precision.
        checkpointing: keep only the inputs of the model's repeated blocks for backward and
            compute them anew then: less memory, a third more work.
        distributed: where several processes train (``torchrun``, or a process group of your
            own): ``"ddp"``, each has the whole model; ``"fsdp"``, each has a part of every
            weight; None, each trains for itself.
        out: folder of the checkpoint and the metrics; None writes nothing.
        resume: go on from the checkpoint in ``out``, if there is one.
        progress: show progress on stderr.
        tensorboard: write curves for TensorBoard into ``out``; None if it is installed.
    """

    lam: Any = None
    budget: Any = None
    round_to: int = 1
    budget_rate: float | None = None
    ramp: float = 0.6
    counting: Literal["joint", "groups"] = "joint"
    l2: float = 0.0
    l2_detach: bool = False
    prior: Prior | None = None
    epochs: int = 10
    batch_size: int = 100
    accumulate: int = 1
    lr: float = 1e-3
    gate_lr: float | None = None
    optimizer: str | OptimizerFactory = "adam"
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str | Callable[[float], float] = "settle"
    clip: float | None = None
    ema: float = 0.999
    distill: float = 0.0
    temperature: float = 4.0
    match: str | Sequence[str] = ()
    teacher: nn.Module | None = None
    learn: bool = True
    warmup: float | None = None
    settle: float | None = None
    recalibrate: int = 100
    augment: bool = False
    seed: int = 0
    device: str | torch.device = "auto"
    autocast: Literal["bf16", "fp16"] | None = None
    compile: bool | str = False
    channels_last: bool = False
    checkpointing: bool = False
    distributed: Literal["ddp", "fsdp"] | None = "ddp"
    out: str | Path | None = None
    resume: bool = False
    progress: bool = True
    tensorboard: bool | None = None

    def __post_init__(self) -> None:
        _whole("epochs", self.epochs, least=1)
        _whole("batch_size", self.batch_size, least=1)
        _whole("accumulate", self.accumulate, least=1)
        _whole("recalibrate", self.recalibrate, least=0)
        _whole("round_to", self.round_to, least=1)
        for name in ("lr", "weight_decay", "l2", "momentum"):
            _number(name, getattr(self, name))
        for name in ("gate_lr", "clip", "warmup", "settle", "budget_rate"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name))
        if self.clip == 0:
            raise UsageError("clip=0 would stop all learning; clip=None turns clipping off")
        if not 0 <= self.ramp <= 1:
            raise UsageError(f"ramp is a part of the steps, from 0 to 1, not {self.ramp}")
        if self.budget is not None:
            limits(self.budget)
        if not self.learn and (self.lam is not None or self.budget is not None):
            raise UsageError(
                "with learn=False gates stand as they are, so that λ and budgets have nothing to "
                "act on; meet a budget with l0prune.fit before"
            )
        if not 0 <= self.distill <= 1:
            raise UsageError(f"distill is a share of the loss, from 0 to 1, not {self.distill}")
        if not self.temperature > 0:
            raise UsageError(f"temperature must be more than 0, not {self.temperature}")
        if self.teacher is not None and not self.distill:
            raise UsageError("a teacher teaches nothing with distill=0; try distill=0.5")
        if not 0 <= self.ema < 1:
            raise UsageError(f"ema must lie in [0, 1), like the paper's 0.999; not {self.ema}")
        _choice("counting", self.counting, ("joint", "groups"))
        _choice("autocast", self.autocast, (None, "bf16", "fp16"))
        _choice("distributed", self.distributed, (None, "ddp", "fsdp"))
        if not isinstance(self.compile, bool):
            _compiler(self.compile)
        if self.accumulate > self.batch_size:
            raise UsageError(
                f"accumulate={self.accumulate} micro-batches are more than the "
                f"{self.batch_size} examples of a step"
            )
        if not callable(self.optimizer):
            _choice("optimizer", self.optimizer, ("adam", "adamw", "sgd"))
        if not callable(self.schedule):
            _choice("schedule", self.schedule, ("settle", "constant", "cosine", "step"))
        if self.resume and self.out is None:
            raise UsageError("resume needs out: the folder in which the run keeps its checkpoint")

    @staticmethod
    def of(given: Mapping[str, Any]) -> Settings:
        """Settings from keywords.

        Raises:
            UsageError: a name is unknown, or a value makes no sense.
        """
        known = [field.name for field in fields(Settings)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}."
                raise UsageError(f"there is no setting {name!r}; {hint}")
        return Settings(**given)

    @property
    def backend(self) -> str | None:
        """What torch.compile is to use, None where nothing is compiled."""
        return "inductor" if self.compile is True else self.compile or None


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _number(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 <= value < math.inf):
        raise UsageError(f"{name} must be a number of at least 0, not {value!r}")


def _compiler(value: Any) -> None:
    if value not in torch.compiler.list_backends(None):
        raise UsageError(
            "compile must be true, false or a backend of torch.compile "
            f"({', '.join(torch.compiler.list_backends())}), not {value!r}"
        )


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
