"""Every setting of a training run, declared once.

From these models come the keywords of Python (``keywords.py``), the options of the command line,
the settings in recipes and in ``l0prune.toml``, their help, their messages and their documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from l0prune.errors import UsageError
from l0prune.plan.numbers import LARGEST, MOST, SEEDS
from l0prune.training.fields import Declared, amount, count, documentation, share
from l0prune.training.gate_settings import GATES, GSM, Compact, GateSettings

# The command line reads its options off this file, and its help needs no torch.
if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer

    from l0prune.running.criteria import Loss, Metric
else:
    Device = Module = Optimizer = Loss = Metric = Any

STARTS = (AUTO, ALIKE) = ("auto", "alike")
NOTHING_SETTLES = (
    "with learn='gates' the weights stand, so that there is nothing to settle: leave settle out. "
    "l0prune.compensate(model, inputs) changes the weights afterwards"
)

Schedule = Callable[[float], float]
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]


class DenseSettings(Declared):
    """Settings of any training: the keywords of ``l0prune.train_dense``."""

    loss: Loss | str | None = Field(
        None,
        description="Loss of the training: auto (the loss that a model computes itself from its "
        "labels, else cross-entropy), cross-entropy, mse, l1, smooth-l1, bce, next-token or "
        "file.py:function. In Python also a function of (outputs, targets). None for what the data "
        "says, else auto. See ``Task``.",
    )
    metric: Metric | str | None = Field(
        None,
        description="Metric that is reported beside the loss: error, accuracy, label-error, mae, "
        "perplexity, the name of a loss or file.py:function. In Python also a function of "
        "(outputs, targets). None for what the data says, else error where the targets are "
        "classes.",
    )
    epochs: int = count(10, "Passes over the training data.")
    batch_size: int = count(
        100,
        "Examples in a step, over all processes and micro-batches. Data that "
        "comes in batches of its own keeps those. By default a batch of text has as many windows "
        "as hold 4,096 tokens.",
    )
    accumulate: int = count(
        1,
        "Gradient accumulation: micro-batches that a step's examples are divided into, to "
        "need less memory. Each is a forward with gates of its own.",
    )
    lr: float = amount(1e-3, "Learning rate of the weights.")
    optimizer: Literal["adam", "adamw", "sgd", "gsm"] | OptimizerFactory = Field(
        "adam",
        description="Optimizer of the weights: adam, adamw, sgd or gsm. With sgd the gates have "
        "Adam, since their gradients are too small for plain descent. gsm is sgd with penalty=gsm, "
        "in place of gates that learn: the loss reaches the slots that matter most at each step, "
        "and momentum of weight decay lets all others go to zero; its learning rate is that of "
        "SGD, such as 0.03. In Python also a function that takes the parameter groups of both and "
        "returns one optimizer.",
    )
    momentum: float = amount(0.9, "Momentum of SGD; of gsm 0.98, unless it is given.")
    weight_decay: float = amount(
        0.0,
        "Weight decay of the weights. Gates are never decayed. With gsm, unless it is "
        "given, it is such that slots which only decay shrink by e^-10 before all settles, and at "
        "most 0.01.",
    )
    schedule: Literal["settle", "constant", "cosine", "step"] | Schedule = Field(
        "settle",
        description="How the weights' learning rate changes: settle (constant, then to zero along "
        "a cosine while settling), constant, cosine (to zero over the whole run) or step (a tenth "
        "after half and after three quarters of the steps). In Python also a function from the "
        "fraction of the steps done to a factor. Gates keep their rate.",
    )
    clip: float | None = amount(
        None,
        "Largest norm of the weights' gradient, or None. The gates' gradient is left alone.",
    )
    ema: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="β of the moving average of weights, buffers and gates that is evaluated and "
        "kept. The paper's is 0.999; 0 for none.",
    )
    distill: float = share(
        0.0,
        "Share of the loss, 0 to 1, that is distillation from the dense network. From "
        "its class scores (where the outputs have one column, from that number), and from the "
        "outputs of the modules in ``match``. It costs one forward of that network a step.",
    )
    temperature: float = Field(
        4.0,
        gt=0,
        le=LARGEST,
        description="Temperature by which both networks' scores are softened for that.",
    )
    match: str | Sequence[str] = Field(
        (), description="Globs of module names whose outputs are compared in distillation."
    )
    teacher: Module | None = Field(
        None,
        repr=False,
        description="Another network to distil from; None for the dense network: this model "
        "without its gates, with the weights that it has when training begins. Once weights have "
        "learned together with gates (a second run of ``finetune``), they are no dense network's "
        "any more: then give the network as it was before.",
    )
    recalibrate: int = Field(
        100,
        ge=0,
        le=MOST,
        description="Batches from which BatchNorm statistics are computed anew while settling and "
        "at the end. None, where it is 0.",
    )
    augment: bool = Field(
        False,
        description="Vary the training images at random, in the way of the data source.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=SEEDS,
        description="Seed of the order of the data, the gates' noise and dropout.",
    )
    device: str | Device = Field(
        "auto",
        description="Device to train on: auto (a GPU if there is one), cpu, cuda, cuda:1, or "
        "another name that torch knows.",
    )
    autocast: Literal["bf16", "fp16"] | None = Field(
        None, description="Half precision: bf16 or fp16. Gates stay in float32."
    )
    compile: bool | str = Field(
        False,
        description="Compile training forwards with torch.compile. True, or the name of its "
        "backend. With FSDP each repeated block is compiled.",
    )
    channels_last: bool = Field(
        False,
        description="Use the channels-last memory format, which is faster on GPUs in half "
        "precision. Not on a CPU, where torch's convolutions may crash with it.",
    )
    checkpointing: bool = Field(
        False,
        description="Activation checkpointing of the model's repeated blocks: less memory, a third "
        "more time. Only their inputs are kept for backward, which computes them again.",
    )
    distributed: Literal["ddp", "fsdp"] | None = Field(
        "ddp",
        description="Where several processes train (torchrun): ddp, each has the whole model, or "
        "fsdp, each has a part of every weight. A process group of your own will do, too. None: "
        "each trains for itself.",
    )
    out: str | Path | None = Field(
        None, description="Folder of the checkpoint and the metrics. None writes nothing."
    )
    resume: bool = Field(
        False, description="Go on from the checkpoint in ``out``, if there is one."
    )
    progress: bool = Field(True, description="Show progress on stderr.")
    tensorboard: bool | None = Field(
        None,
        description="Write curves for TensorBoard into ``out``, by default where it is installed.",
    )

    @field_validator("loss", "metric")
    @classmethod
    def _is_known(cls, given: Any, info: ValidationInfo) -> Any:
        if given is not None:
            from l0prune.running.criteria import check_name

            check_name(given, str(info.field_name))
        return given

    @field_validator("clip")
    @classmethod
    def _leaves_something(cls, clip: float | None) -> float | None:
        if clip == 0:
            raise UsageError("clip=0 would stop all learning; clip=None turns clipping off")
        return clip

    @field_validator("teacher")
    @classmethod
    def _is_a_network(cls, teacher: Any) -> Any:
        from torch import nn

        if not isinstance(teacher, nn.Module | None):
            raise UsageError(f"teacher must be a torch.nn.Module, not a {type(teacher).__name__}")
        return teacher

    @field_validator("compile")
    @classmethod
    def _is_a_backend(cls, backend: bool | str) -> bool | str:
        if isinstance(backend, bool):
            return backend
        from torch import compiler

        if backend not in compiler.list_backends(None):
            raise UsageError(
                "compile must be true, false or a backend of torch.compile "
                f"({', '.join(compiler.list_backends())}), not {backend!r}"
            )
        return backend

    @property
    def backend(self) -> str | None:
        """Backend of torch.compile; None where nothing is compiled."""
        return "inductor" if self.compile is True else self.compile or None


class Settings(DenseSettings, GateSettings):
    """Settings of training: the keywords of ``l0prune.finetune``.

    A name that is unknown, or a value that makes no sense, is a ``UsageError``.
    """

    start: str = Field(
        AUTO,
        description="What the gates start from: alike, as they were put on; a score such as fisher "
        "or outputs; or auto, scores under a budget. A score is computed on a few batches, and the "
        "more a slot matters the further open its gate starts. auto is fisher (outputs where the "
        "loss has no gradient, as of a network's own answers), of branches ablation, where there "
        "is a budget and all gates stand alike; else alike.",
    )
    oneshot_fraction: float = share(
        0.5,
        "Where gates start from a score under a budget: the part of the way to it that "
        "the score goes before the first step, in factors, so that 0.5 cuts to a half where a "
        "quarter is asked. The rest they learn, in a network that costs less to train. 0 leaves "
        "all of it to them.",
    )
    warmup: float | None = amount(
        None,
        "Epochs, or a part of one, over which λ rises from 0, by default 5 % of the steps.",
    )
    settle: float | None = amount(
        None,
        "Epochs, or a part of one, at the end with fixed gates, by default 30 % of the "
        "steps. The weights recover then. Where there are budgets it is one step at least.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gsm_is_both(cls, given: Any) -> Any:
        """Set both optimizer and penalty to gsm if one of them is."""
        if GSM not in (given.get("optimizer"), given.get("penalty")):
            return given
        pair = {"optimizer": GSM, "penalty": GSM, **given}
        optimizer = pair["optimizer"]
        if pair["penalty"] != GSM or not (callable(optimizer) or optimizer in (GSM, "sgd")):
            raise UsageError(
                "gsm is SGD whose momentum closes slots, in the place of any other penalty or "
                "optimizer: give optimizer='gsm' alone"
            )
        return pair

    @field_validator("start")
    @classmethod
    def _is_a_start(cls, start: str) -> str:
        if start not in STARTS:
            from l0prune.selection.scores import check_name, names

            try:
                return check_name(start)
            except UsageError:
                known = ", ".join(dict.fromkeys((*STARTS, *names())))
                raise UsageError(f"start must be one of {known}, not {start!r}") from None
        return start

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if not self.learn and (self.lam is not None or self.budget is not None):
            raise UsageError(
                "with learn=False the gates do not change, so that λ and budgets have no effect; "
                "meet a budget with l0prune.fit before"
            )
        if self.penalty is not None and not (self.learn and self.start in STARTS):
            raise UsageError(
                f"penalty={self.penalty!r} closes slots by their weights, from all of them on: it "
                "goes neither with learn=False nor with a start from scores"
            )
        if self.learn == GATES and self.settle:
            raise UsageError(NOTHING_SETTLES)
        if self.quantize is not None and (self.compile or self.distributed == "fsdp"):
            raise UsageError(
                "quantize looks at what layers read in each step, of which compiled forwards and "
                "weights in shards know nothing: leave compile out, and distributed='fsdp'"
            )
        if self.teacher is not None and not self.distill:
            raise UsageError("a teacher is not used with distill=0; try distill=0.5")
        if self.accumulate > self.batch_size:
            raise UsageError(
                f"accumulate={self.accumulate} micro-batches are more than the "
                f"{self.batch_size} examples of a step"
            )
        if self.resume and self.out is None:
            raise UsageError("resume needs out: the folder in which the run keeps its checkpoint")
        return self

    @property
    def compact_when(self) -> Compact:
        """Return ``compact``; a compiled network is cut once, since each size is compiled anew."""
        return "settle" if self.backend is not None and self.compact == "auto" else self.compact


Settings.__doc__ = documentation(Settings)
