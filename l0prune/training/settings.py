"""Every setting of a training run, declared once.

From these models come the keywords of Python (``keywords.py``), the options of the command line,
the settings in recipes and in ``l0prune.toml``, their help, their messages and their documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from l0prune.errors import UsageError, warn_renamed
from l0prune.plan.numbers import LARGEST, MOST, SEEDS, check_whole, is_number
from l0prune.training.fields import documentation, in_words

# The command line reads its options off this file, and its help needs no torch.
if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer

    from l0prune.plan.limits import LimitsLike
    from l0prune.plan.measures import Source
    from l0prune.running.criteria import Loss, Metric
    from l0prune.training.lambdas import LambdaLike
else:
    Device = Module = Optimizer = LimitsLike = Source = Loss = Metric = LambdaLike = Any

STARTS = (AUTO, ALIKE) = ("auto", "alike")
GATES = "gates"  # what learns, where weights stand
GSM = "gsm"  # an optimizer that is a penalty
NOTHING_SETTLES = (
    "with learn='gates' the weights stand, so that there is nothing to settle: leave settle out. "
    "l0prune.compensate(model, inputs) changes the weights afterwards"
)
# Spellings of before, which are accepted with a DeprecationWarning.
RENAMED = {"at_once": "oneshot_fraction", "decide": "branch_freeze_fraction"}

Compact = Literal["auto", "settle", "never"]
Schedule = Callable[[float], float]
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]


def current_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their names of today; a renamed one is deprecated."""
    found = {}
    for name, value in given.items():
        if (new := RENAMED.get(name)) is not None:
            if new in given:
                raise UsageError(f"{name} is the former name of {new}: give one of them")
            warn_renamed(f"the setting {name}", new)
        found[new or name] = value
    return found


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        given = current_names(given)
        try:
            return check(given)
        except ValidationError as error:
            raise UsageError(in_words(error, cls.model_fields, given)) from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make settings from keywords."""
        return cls(**given)


class GateSettings(_Declared):
    """Settings of how gates learn: the keywords of ``l0prune.Pruner``, and part of ``Settings``.

    A name that is unknown, or a value that makes no sense, is a ``UsageError``.
    """

    lam: LambdaLike | None = Field(
        None,
        description="λ, the price of a parameter in units of the loss; N is the number of training "
        "examples: 0.1/N, aic, bic, or 'conv*=10/N,*=0.1/N' by globs over axis names. A number, "
        "such a text or a mapping from globs; None is 0.1/N, or 0 where there is a budget.",
    )
    measures: Sequence[str] = Field(
        (),
        description="Measures of your own that budgets are about, as file.py:Class. In Python it "
        "is enough that the class is registered: ``l0prune.measures.register``.",
    )
    budget: LimitsLike | None = Field(
        None,
        description="What the exported model may cost: macs=0.5, params=10k, latency=12ms, "
        "'layer3.*: params=0.3', or 'layer3.*: width=0.5' for half of the slots of each of these "
        "axes. A text, a mapping such as {'macs': 0.5} or a list of those; None for no such "
        "constraint.",
    )
    latency: Source | None = Field(
        None,
        description="A table of times, as ``l0prune.measure`` makes it, for budgets in latency and "
        "for ``round_to``.",
    )
    round_to: int | Literal["auto"] = Field(
        "auto",
        description="Widths are multiples of this, within the budget. auto for what the runtime of "
        "``latency`` likes, or another measure that the budget is about.",
    )
    budget_rate: float | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="Rate of ascent of the budgets' multipliers, by default chosen by the number "
        "of steps. See ``Budget``.",
    )
    ramp: float = Field(
        0.6,
        ge=0,
        le=1,
        description="Part of the steps before settling in which a budget's target sinks from what "
        "an export would have at their beginning to what it is.",
    )
    branch_freeze_fraction: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Under a budget, part of the steps before settling after which branches that "
        "have gates of their own stay or are gone, so that the widths of what stays can still "
        "learn what it leaves them. None for 0.7; and for 0 where part of the network was cut at "
        "once by scores, which is when the loss told how many branches go. Under a price branches "
        "learn after the first half instead.",
    )
    counting: Literal["joint", "groups"] = Field(
        "joint",
        description="How the penalty counts: joint, exactly E‖θ‖₀; or groups, as the paper's "
        "eq. 16 does. See ``penalty``.",
    )
    l2: float = Field(
        0.0,
        ge=0,
        le=LARGEST,
        description="Weight decay weighted by the gates' probabilities (eq. 15 and 17 of the "
        "paper).",
    )
    l2_detach: bool = Field(False, description="Keep that weight decay from changing the gates.")
    prior: float | Mapping[str, float] | None = Field(
        None,
        description="P(z ≠ 0) of the gates before any data are seen, one for all or by globs over "
        "axis names: the variational objective (eq. 21 of the paper). None for λ alone.",
    )
    gate_lr: float | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="Learning rate of the gates, by default chosen by the number of steps in which "
        "they learn. So they can move far enough and no further.",
    )

    learn: bool | Literal["gates"] = Field(
        True,
        description="What learns: true for weights and gates, gates for these alone, false for the "
        "weights alone, after ``l0prune fit``. gates is for networks that are too large to train: "
        "weights and the statistics of BatchNorm stand and need no gradients, no state of an "
        "optimizer and, with ``distill``, no copy for a teacher. Nothing settles then: after the "
        "last step the gates are fitted to the budget, and ``l0prune.compensate`` changes the "
        "weights. With false all of the run is settling.",
    )
    penalty: str | None = Field(
        None,
        description="A penalty on the weights of each slot in place of gates that learn: "
        "group-lasso, group-lq, q-shrinkage, scad, mcp, firm, trimmed-l1, l0-projection, gsm (see "
        "``optimizer``), or your own. Its strength is λ or a budget. A slot whose weights have "
        "become zero is closed.",
    )
    elements: float | None = Field(
        None,
        gt=0,
        le=1,
        description="The penalty acts on single weights, of which this share may stay non-zero: "
        "0.02, or 1 for as many as λ leaves. Files stay dense, since zeros are stored; slots whose "
        "weights are all zero are cut. None for whole slots.",
    )
    quantize: Literal["int8", "bits"] | None = Field(
        None,
        description="int8 lets the network know that it will be in eight bits, bits learns how "
        "many. With int8, weights and what layers read are fake-quantized from the middle of the "
        "run on, and always while settling; save_onnx(int8=…) writes an int8 file with these "
        "ranges. With bits, each weight and each input of a layer learns its own number of them "
        "(Bayesian Bits), under a budget such as bops=0.01, or a price (bits_lam). None for "
        "floating point.",
    )
    bits: Sequence[int] = Field(
        (0, 2, 4, 8, 16),
        description="Menu of bits for quantize=bits: 0 for slots that are pruned, then those of "
        "what stays, of which each divides the next: (0, 8) or (0, 4, 8) for runtimes that have "
        "no others.",
    )
    bits_lam: float = Field(
        0.0,
        ge=0,
        le=LARGEST,
        description="Price of a bit, in units of the loss, for quantize=bits: times the MACs of "
        "its layer over those of the largest one (the regulariser of Bayesian Bits). 0 where a "
        "budget in bops says how many there may be.",
    )
    compact: Compact = Field(
        "auto",
        description="When closed slots are cut out while training goes on, for time and memory: "
        "auto, as soon as they are closed for good; settle, once the gates are fixed; or never. "
        "Closed for good: open with a probability below 0.1, twice in a row; a compiled network is "
        "cut as with settle. Only where that is shown to compute the same; in the end the model "
        "has its own size. A loop of your own that has a ``Pruner`` asks for it.",
    )

    @field_validator("measures")
    @classmethod
    def _are_known(cls, measures: Sequence[str]) -> Sequence[str]:
        if measures:
            from l0prune.files.user_code import named
            from l0prune.plan.measures import register

            for spec in measures:
                register(named(spec))
        return measures

    @field_validator("bits")
    @classmethod
    def _is_a_menu(cls, bits: Sequence[int]) -> Sequence[int]:
        from l0prune.plan.bits import check_menu

        check_menu(bits)
        return bits

    @field_validator("budget")
    @classmethod
    def _can_be_read(cls, budget: Any) -> Any:
        from l0prune.plan.limits import limits

        if budget is not None:
            limits(budget)
        return budget

    @field_validator("round_to")
    @classmethod
    def _is_a_width(cls, width: Any) -> Any:
        if width != "auto":
            check_whole("round_to", width)
        return width

    @field_validator("prior")
    @classmethod
    def _are_probabilities(cls, prior: Any) -> Any:
        for each in prior.values() if isinstance(prior, Mapping) else (prior,):
            if each is not None and not (is_number(each) and 0 < each < 1):
                raise UsageError("prior is a probability, strictly between 0 and 1")
        return prior

    @field_validator("latency")
    @classmethod
    def _is_a_table(cls, table: Any) -> Any:
        if table is not None and not (hasattr(table, "name") and hasattr(table, "of")):
            raise UsageError(
                f"latency is a table of times, such as l0prune.measure(model), not {table!r}"
            )
        return table

    @field_validator("penalty")
    @classmethod
    def _is_a_penalty(cls, name: str | None) -> str | None:
        if name is not None:
            from l0prune.training.shrinkage import shrinkage_of

            shrinkage_of(name)
        return name

    @model_validator(mode="after")
    def _weights_stand(self) -> Self:
        if self.learn == GATES and self.penalty is not None:
            raise UsageError(
                f"penalty={self.penalty!r} closes slots by their weights, which stand with "
                "learn='gates': leave one of the two out"
            )
        if self.learn == GATES and self.l2:
            raise UsageError("l2 decays weights, and these stand with learn='gates': leave l2 out")
        return self

    @model_validator(mode="after")
    def _penalty_or_gates(self) -> Self:
        if self.penalty is None:
            if self.elements is not None:
                raise UsageError(
                    "elements says what a penalty acts on, and there is none: give "
                    "penalty='trimmed-l1', or optimizer='gsm'"
                )
            return self
        for name in ("prior", "l2", "gate_lr"):
            if getattr(self, name):
                raise UsageError(
                    f"{name} is of gates that learn, and penalty={self.penalty!r} acts on the "
                    "weights of the same slots in their place: leave one of the two out"
                )
        if self.quantize == "bits":
            raise UsageError(
                f"bits are learned by gates, and penalty={self.penalty!r} is in the place of these:"
                " leave one of the two out"
            )
        is_bounded = self.budget is not None or (self.elements or 1) < 1
        if self.elements is not None and (self.budget is not None or self.rounds):
            raise UsageError(
                "budgets and widths are of slots, and elements is of single weights, which files "
                "keep as zeros: leave one of the two out"
            )
        if self.penalty == GSM and (self.lam is not None or not is_bounded):
            raise UsageError(
                "gsm has no price: a budget, such as macs=0.5, says how many slots the loss "
                "reaches, or elements=0.02 how many weights. Leave lam out, and give one of them"
            )
        if self.lam is None and not is_bounded:
            raise UsageError(
                f"penalty={self.penalty!r} needs a strength: lam=1e-4 (a price of each weight's "
                "size, in units of the loss), a budget such as macs=0.5, or elements=0.02"
            )
        return self

    @property
    def rounds(self) -> bool:
        """Return whether gates may be opened only to make widths whole blocks."""
        return self.latency is not None if self.round_to == "auto" else self.round_to > 1


GateSettings.__doc__ = documentation(GateSettings)


class DenseSettings(_Declared):
    """Settings of any training: the keywords of ``l0prune.train_dense``."""

    loss: Loss | str | None = Field(
        None,
        description="What is learned from: auto (the loss that a model computes itself from its "
        "labels, else cross-entropy), cross-entropy, mse, l1, smooth-l1, bce, next-token or "
        "file.py:function. In Python also a function of (outputs, targets). None for what the data "
        "says, else auto. See ``Task``.",
    )
    metric: Metric | str | None = Field(
        None,
        description="What is reported beside the loss: error, accuracy, label-error, mae, "
        "perplexity, the name of a loss or file.py:function. In Python also a function of "
        "(outputs, targets). None for what the data says, else error where the targets are "
        "classes.",
    )
    epochs: int = Field(10, ge=1, le=MOST, description="Passes over the training data.")
    batch_size: int = Field(
        100,
        ge=1,
        le=MOST,
        description="Examples a step, of all processes and micro-batches together. Data that "
        "comes in batches of its own keeps those. Of windows of text, unless a number is given, as "
        "many as have 4,096 tokens.",
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=MOST,
        description="Micro-batches that a step's examples are computed in, one after another, to "
        "need less memory. Each is a forward with gates of its own.",
    )
    lr: float = Field(1e-3, ge=0, le=LARGEST, description="Learning rate of the weights.")
    optimizer: Literal["adam", "adamw", "sgd", "gsm"] | OptimizerFactory = Field(
        "adam",
        description="Optimizer of the weights: adam, adamw, sgd or gsm. With sgd the gates have "
        "Adam, since their gradients are too small for plain descent. gsm is sgd with penalty=gsm, "
        "in place of gates that learn: the loss reaches the slots that matter most at each step, "
        "and momentum of weight decay lets all others go to zero; its learning rate is that of "
        "SGD, such as 0.03. In Python also a function that takes the parameter groups of both and "
        "returns one optimizer.",
    )
    momentum: float = Field(
        0.9, ge=0, le=LARGEST, description="Momentum of SGD; of gsm 0.98, unless it is given."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=LARGEST,
        description="Weight decay of the weights. Gates are never decayed. With gsm, unless it is "
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
    clip: float | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="Largest norm of the weights' gradient, or None. The gates' gradient is left "
        "alone.",
    )
    ema: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="β of the moving average of weights, buffers and gates that is evaluated and "
        "kept. The paper's is 0.999; 0 for none.",
    )
    distill: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the loss, 0 to 1, that is distillation from the dense network. From "
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
        description="Filters and images lie in memory with their channels last. GPUs like that in "
        "half precision. Not on a CPU, where torch's convolutions may crash with it.",
    )
    checkpointing: bool = Field(
        False,
        description="Less memory, a third more time: backward computes the model's repeated blocks "
        "again. Only their inputs are kept for it.",
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
    oneshot_fraction: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Where gates start from a score under a budget: the part of the way to it that "
        "the score goes before the first step, in factors, so that 0.5 cuts to a half where a "
        "quarter is asked. The rest they learn, in a network that costs less to train. 0 leaves "
        "all of it to them.",
    )
    warmup: float | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="Epochs, or a part of one, over which λ rises from 0, by default 5 % of the "
        "steps.",
    )
    settle: float | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="Epochs, or a part of one, at the end with fixed gates, by default 30 % of the "
        "steps. The weights recover then. Where there are budgets it is one step at least.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gsm_is_both(cls, given: Any) -> Any:
        """The optimizer of this name and the penalty are one."""
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
            from l0prune.selection.scores import current_name, names

            try:
                return current_name(start)
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
