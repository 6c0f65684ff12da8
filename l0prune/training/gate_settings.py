"""Settings of how gates learn, declared once; see ``settings.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from l0prune.doors import provided
from l0prune.errors import UsageError
from l0prune.plan.numbers import check_whole, is_number
from l0prune.plan.targets import TARGET, check_target
from l0prune.training.fields import Declared, amount, documentation, share

if TYPE_CHECKING:  # the command line reads its options off this file, and its help needs no torch
    from l0prune.plan.limits import LimitsLike
    from l0prune.plan.measures import Source
    from l0prune.training.lambdas import LambdaLike
else:
    LimitsLike = Source = LambdaLike = Any

GATES = "gates"  # value of learn with frozen weights
GSM = "gsm"  # name of an optimizer and of its penalty

Compact = Literal["auto", "settle", "never"]


class GateSettings(Declared):
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
        description="Widths are multiples of this, within the budget; 1 for any. auto: the "
        "blocks that ``target`` computes fastest (of 16 channels on many processors), in small "
        "layers smaller ones; or those of ``latency``, or of another measure that the budget is "
        "about.",
    )
    target: str = Field(
        TARGET,
        description="The runtime that the result is for, by its name in ``l0prune.measure``: "
        "onnxruntime, onnxruntime-int8, openvino, torch-cuda-bf16, … It says which widths are "
        "fast: once for each machine it is timed for some seconds, or what is usual is taken where "
        "it is not here.",
    )
    budget_rate: float | None = amount(
        None,
        "Rate of ascent of the budgets' multipliers, by default chosen by the number "
        "of steps. See ``Budget``.",
    )
    ramp: float = share(
        0.6,
        "Part of the steps before settling in which a budget's target sinks from what "
        "an export would have at their beginning to what it is.",
    )
    branch_freeze_fraction: float | None = share(
        None,
        "Under a budget, part of the steps before settling after which branches that "
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
    l2: float = amount(
        0.0,
        "Weight decay weighted by the gates' probabilities (eq. 15 and 17 of the paper).",
    )
    l2_detach: bool = Field(False, description="Keep that weight decay from changing the gates.")
    prior: float | Mapping[str, float] | None = Field(
        None,
        description="P(z ≠ 0) of the gates before any data are seen, one for all or by globs over "
        "axis names: the variational objective (eq. 21 of the paper). None for λ alone.",
    )
    gate_lr: float | None = amount(
        None,
        "Learning rate of the gates, by default chosen by the number of steps in which "
        "they learn. So they can move far enough and no further.",
    )

    learn: bool | Literal["gates"] = Field(
        True,
        description="What learns: true for weights and gates, gates for these alone, false for the "
        "weights alone, after ``l0prune fit``. gates is for networks that are too large to train: "
        "weights and the statistics of BatchNorm are fixed and need no gradients, no state of an "
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
        description="Quantization-aware training: int8 for eight bits, bits to learn how "
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
    bits_lam: float = amount(
        0.0,
        "Price of a bit, in units of the loss, for quantize=bits: times the MACs of "
        "its layer over those of the largest one (the regulariser of Bayesian Bits). 0 where a "
        "budget in bops says how many there may be.",
    )
    compact: Compact = Field(
        "auto",
        description="When closed slots are cut out during training, to save time and memory: "
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
        provided("check_menu")(bits)
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

    _is_a_runtime = field_validator("target")(check_target)

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
            provided("shrinkage_of")(name)
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
        """Return whether widths in whole blocks were asked for."""
        return self.latency is not None if self.round_to == "auto" else self.round_to > 1


GateSettings.__doc__ = documentation(GateSettings)
