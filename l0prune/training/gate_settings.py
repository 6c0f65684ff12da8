"""How gates learn: settings that every training loop has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from l0prune.errors import UsageError
from l0prune.plan.numbers import LARGEST, check_whole, is_number
from l0prune.training.fields import documentation, in_words

Compact = Literal["auto", "settle", "never"]


class GateSettings(BaseModel):
    """How gates learn: the keywords of ``l0prune.Pruner``, and with those of training ``Settings``.

    A name that is unknown, or a value that makes no sense, is a ``UsageError``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    lam: Any = Field(
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
    budget: Any = Field(
        None,
        description="What the exported model may cost: macs=0.5, params=10k, latency=12ms, "
        "'layer3.*: params=0.3', or 'layer3.*: width=0.5' for half of the slots of each of these "
        "axes. A text, a mapping such as {'macs': 0.5} or a list of those; None for no such "
        "constraint.",
    )
    latency: Any = Field(
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
    decide: float | None = Field(
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

    compact: Compact = Field(
        "auto",
        description="When the network is trained at the size that its gates leave, which takes "
        "less time and memory: auto, as soon as gates are closed for good (probability of being "
        "open below 0.1, twice in a row; while it is compiled as settle); settle, from when the "
        "gates stand; never. Only where that is shown to compute the same; in the end the model "
        "has its own size. A loop of your own that has a ``Pruner`` asks for it.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return check(given)
        except ValidationError as error:
            raise UsageError(in_words(error, cls.model_fields, given)) from None

    @field_validator("measures")
    @classmethod
    def _are_known(cls, measures: Sequence[str]) -> Sequence[str]:
        if measures:
            from l0prune.files.user_code import named
            from l0prune.plan.measures import register

            for spec in measures:
                register(named(spec))
        return measures

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

    @property
    def rounds(self) -> bool:
        """May gates be opened only to make widths whole blocks?"""
        return self.latency is not None if self.round_to == "auto" else self.round_to > 1

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Settings from keywords.

        Raises:
            UsageError: a name is unknown, or a value makes no sense.
        """
        return cls(**given)


GateSettings.__doc__ = documentation(GateSettings)
