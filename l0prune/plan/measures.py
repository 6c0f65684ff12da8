"""Measures: a network's cost as a function of its gates, for budgets to limit.

Params, MACs and slots are counted exactly; milliseconds come from a table of times; a measure of
your own is a class under ``@register``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from l0prune.doors import Registry
from l0prune.errors import UsageError
from l0prune.plan.budget_text import COUNTED, UNITS, check_measure
from l0prune.plan.cost import Amounts, Axes, CostModel, cost_of
from l0prune.plan.layout import Slots
from l0prune.plan.numbers import LARGE, in_thousands
from l0prune.plan.plan import Axis, Cost, Plan


class Measure(ABC):
    """Something that a network has less of when slots are cut: parameters, time, memory.

    A measure of your own is a subclass under ``@l0prune.measures.register`` that says what it
    is called and what is expected of it. A budget may then be about it: ``"memory=0.5"``.

    Attributes:
        name: its name in budgets: letters, digits, ``-`` and ``_``.
        label: its name in messages and reports.
        suffixes: the suffixes of an amount, with their values. The first one is the unit of all
            amounts of this measure, with the value 1; ``""`` where that has no name. Such as
            ``{"ms": 1.0, "us": 1e-3, "s": 1e3}``.
        each_axis: whether a limit is about each axis by itself, in whole slots of which one is
            always allowed, instead of about all of them together.
        conditions: what a budget may say behind ``@``, for messages; empty for a measure that
            depends on nothing but the network.
        plan: of the network.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    suffixes: ClassVar[Mapping[str, float]]
    each_axis: ClassVar[bool] = False
    conditions: ClassVar[str] = ""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    def of(cls, plan: Plan) -> Measure:
        """Return the measure of a network with this plan.

        Raises:
            UsageError: it takes more than a plan, or one that this is not.
        """
        return cls(plan)

    @classmethod
    def of_model(cls, model: nn.Module, plan: Plan, at: str) -> Measure:
        """Return the measure of a gated model with this plan, under the conditions ``at``.

        Raises:
            UsageError: the conditions cannot be read, or are missing; or as for ``of``.
        """
        return cls.of(plan)

    @abstractmethod
    def expected(self, p: Tensor, dtype: torch.dtype | None = None, through: Axes = None) -> Tensor:
        """Return the expected amount under independent gates, differentiable in ``p``.

        Args:
            p: P(z ≠ 0) of each gate, shape ``(plan.size,)``.
            dtype: of the result; None for the most precise one.
            through: count only what these axes could take away; None to count everything.

        Returns:
            A scalar that is differentiable in ``p``, smoothly enough to descend. A budget compares
            it with a share of ``dense()``, which it should be where all gates are open.
        """

    def actual(self, open_: Tensor, through: Axes = None) -> float:
        """The amount of the model that an export with these open gates makes.

        It may be a step function. By default it is the expected amount of gates that are 0 or 1.

        Args:
            open_: bool per gate, shape ``(plan.size,)``.
            through: as for ``expected``.
        """
        kept = self.plan.kept(open_).to(torch.float64)
        return float(self.expected(kept, through=through))

    def dense(self, through: Axes = None) -> float:
        """The amount with all gates open; ``through`` as for ``expected``."""
        return self.actual(torch.ones(self.plan.size, dtype=torch.bool), through)

    def reachable(self) -> float:
        """Return the share of the dense amount removed with every gate closed, from 0 to 1."""
        nothing = torch.zeros(self.plan.size, dtype=torch.float64)
        dense = self.dense()
        return (dense - float(self.expected(nothing))) / dense if dense else 0.0

    @property
    def axes(self) -> frozenset[int]:
        """Numbers of the axes whose slots count; by default all."""
        return frozenset(range(len(self.plan.axes)))

    def by_owner(self, kept: Tensor) -> dict[str, float]:
        """Return each module's amount by path, as far as it can be attributed.

        An amount of no module, such as an overhead that no gate removes, has a separate key.

        Args:
            kept: 1 for each slot that stays, else 0; float64, shape ``(plan.size,)``.
        """
        return {}

    def blocks(self) -> list[int] | None:
        """Return for each axis the number of slots worth cutting at once; None for any number."""
        return None

    def observed(self, model: nn.Module) -> float | None:
        """Return the observed amount of an export of this gated model with its present gates.

        None where an observation would add nothing to ``actual``. The model must not be changed.
        Where several processes train together only the first calls this, and the others wait.
        """
        return None

    @classmethod
    def show(cls, amount: float) -> str:
        """Format an amount for messages."""
        number = f"{amount:.3g}" if abs(amount) < 1000 else f"{amount:,.0f}"
        return f"{number} {next(iter(cls.suffixes))}".strip()

    @classmethod
    def brief(cls, amount: float) -> str:
        """Format an amount for a line or a table: about three digits."""
        return cls.show(amount)


class Source(Protocol):
    """Factory of a measure that needs more than a plan, such as a table of times.

    Its text (``str``) identifies it: a run resumes only with the same source.
    """

    @property
    def name(self) -> str:
        """Name of the measure."""

    def of(self, plan: Plan) -> Measure:
        """The measure of a network with this plan.

        Raises:
            UsageError: it was made for another network.
        """


class SumOfTerms(Measure):
    """``Σ scale × Π open size of dims``: exact under independent gates, in one evaluation.

    A subclass may use the terms for the expected amount only, and override ``actual``.

    Attributes:
        costs: the terms.

    Args:
        plan: of the network.
        costs: terms whose unit is the measure's name; None for those of the plan.
    """

    def __init__(self, plan: Plan, costs: CostModel | None = None) -> None:
        super().__init__(plan)
        self.costs = cost_of(plan) if costs is None else costs

    def expected(self, p: Tensor, dtype: torch.dtype | None = None, through: Axes = None) -> Tensor:
        """The expected amount at open probabilities ``p``; see ``Measure``."""
        return self.costs.expected(p, self.name, dtype=dtype, through=through)

    def actual(self, open_: Tensor, through: Axes = None) -> float:
        """The amount of the model that an export with these open gates makes."""
        kept = self.plan.kept(open_).to(torch.float64)
        return self.costs.amount(kept, self.name, through)

    def dense(self, through: Axes = None) -> float:
        """The amount with all gates open."""
        return self.costs.dense_amount(self.name, through)

    def reachable(self) -> float:
        """Return the share of the dense amount removed with every gate closed, from 0 to 1."""
        return self.costs.reachable(self.name)

    @property
    def axes(self) -> frozenset[int]:
        """Numbers of the axes whose slots count."""
        return self.costs.axes_in(self.name)

    def by_owner(self, kept: Tensor) -> dict[str, float]:
        """Return each module's amount, by path."""
        return self.costs.by_owner(kept, self.name)


M = TypeVar("M", bound=type[Measure])

MEASURES: Registry[type[Measure]] = Registry("measure", "measures")
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_SUFFIX = re.compile(r"[^\W\d_]*")


def register(kind: M) -> M:
    """Class decorator: register a measure for use in budgets.

    Raises:
        UsageError: it is no measure, or another one has its name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Measure)):
        raise UsageError(f"{kind!r} is no measure: register a subclass of l0prune.Measure")
    missing = [a for a in ("name", "label", "suffixes") if not getattr(kind, a, None)]
    if missing:
        raise UsageError(f"the measure {kind.__qualname__} has no {' and no '.join(missing)}")
    if not _NAME.fullmatch(kind.name):
        raise UsageError(f"a measure cannot be called {kind.name!r}: use letters, digits, - and _")
    if 1.0 not in list(kind.suffixes.values())[:1] or not all(
        _SUFFIX.fullmatch(suffix) for suffix in kind.suffixes
    ):
        raise UsageError(
            f"the suffixes of {kind.name} must be letters only, the first of them worth 1, "
            f"such as {{'kB': 1.0, 'MB': 1e3}}, not {dict(kind.suffixes)!r}"
        )
    other = MEASURES.get(kind.name)
    if other is not None and other.__qualname__ != kind.__qualname__:  # a cell that is run again
        raise UsageError(
            f"there is another measure called {kind.name!r} ({other.__module__}."
            f"{other.__qualname__}); give {kind.__qualname__} a name of its own"
        )
    MEASURES[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """The names of all measures, in the order in which they were registered."""
    return tuple(MEASURES)


def kind_of(name: str) -> type[Measure]:
    """Return the measure class of this name.

    Raises:
        UsageError: there is none.
    """
    check_measure(name, MEASURES)
    return MEASURES[name]


def measure_of(
    plan: Plan,
    name: str,
    sources: Iterable[Source] = (),
    model: nn.Module | None = None,
    at: str = "",
) -> Measure:
    """Return the measure of this name for a network with this plan, under the conditions ``at``.

    ``sources`` make the measures that need more than a plan, or the gated ``model``.

    Raises:
        UsageError: there is no such measure, or it takes a source that is not given.
    """
    for source in sources:
        if source.name == name:
            return source.of(plan)
    kind = kind_of(name)
    return kind.of(plan) if model is None else kind.of_model(model, plan, at)


class Count(SumOfTerms):
    """Measure that is a whole number, such as parameters or MACs."""

    suffixes: ClassVar[Mapping[str, float]] = COUNTED

    def actual(self, open_: Tensor, through: Axes = None) -> int:
        """The count of the model that an export with these open gates makes."""
        return self.costs.actual(open_, self.name, through)

    def dense(self, through: Axes = None) -> int:
        """The count with all gates open."""
        return self.costs.dense(self.name, through)

    @classmethod
    def show(cls, amount: float) -> str:
        """Format an amount with all digits: ``77,312``."""
        return f"{round(amount):,}"

    @classmethod
    def brief(cls, amount: float) -> str:
        """Format an amount with three digits: ``77.3 k``."""
        return in_thousands(amount, LARGE)


@register
class Params(Count):
    """Parameters that an export has."""

    name, label = "params", "params"


@register
class Macs(Count):
    """Multiply-accumulates of one example; 1 MAC is 2 FLOPs."""

    name, label = "macs", "MACs"


@register
class Width(Count):
    """Slots of an axis: channels, neurons, heads; a branch has no width."""

    name, label = "width", "slots"
    suffixes: ClassVar = UNITS[name]
    each_axis = True

    def __init__(self, plan: Plan) -> None:
        slots = (
            Cost(axis.name, self.name, 1.0, (Slots(number, 0, axis.size),))
            for number, axis in enumerate(plan.axes)
            if self.counts(axis)
        )
        super().__init__(plan, CostModel(plan, [*slots]))
        self._left: tuple[bytes, Tensor] = b"", torch.zeros(0)

    def actual(self, open_: Tensor, through: Axes = None) -> int:
        """The slots that an export with these open gates has."""
        key = open_.cpu().numpy().tobytes()  # each bound of an axis asks for the same gates
        if self._left[0] != key:
            self._left = key, self.plan.kept(open_)
        kept = self._left[1]
        axes = self.axes if through is None else self.axes & through
        return sum(int(kept[self.plan.axes[number].slice].sum()) for number in axes)

    @staticmethod
    def counts(axis: Axis) -> bool:
        """Return whether the slots of an axis count."""
        return axis.is_width


@register
class Heads(Width):
    """Heads of each attention; groups of them, where some share keys and values."""

    name, label = "heads", "heads"

    @staticmethod
    def counts(axis: Axis) -> bool:
        """Return whether the slots of an axis are heads."""
        return axis.kind == "head"


@register
class Latency(SumOfTerms):
    """The time of one call in milliseconds. A table of times makes it (a ``Source``)."""

    name, label = "latency", "latency"
    suffixes: ClassVar = UNITS[name]

    @classmethod
    def of(cls, plan: Plan) -> Measure:
        """Raise UsageError: a plan alone does not determine the latency on a machine."""
        raise UsageError(
            f"a budget in {cls.name} needs the times of this network on the machine that will "
            "serve it: `l0prune measure model.gated.pt` writes a table, to be given as "
            f"--{cls.name} FILE; in Python, {cls.name}=l0prune.measure(model)"
        )


FLOAT = 32  # bits of values that are not quantized


@register
class Bops(Count):
    """Weight bits times input bits, summed over all multiply-accumulates of one example.

    Both are 32 in floating point, and so in the dense network; see the feature ``int8`` for learned
    bits. The expected amount is exact for independent gates.
    """

    name, label = "bops", "BOPs"

    def __init__(self, plan: Plan) -> None:
        known = any(cost.unit == self.name for cost in plan.costs)
        super().__init__(plan, None if known else CostModel(plan, [*_in_float32(plan)]))
        self._float = CostModel(plan, [*_in_float32(plan)])

    def dense(self, through: Axes = None) -> int:
        """The count of the dense network in float32."""
        return self._float.dense(self.name, through)

    def reachable(self) -> float:
        """Return the share of the dense amount removed with every gate closed, from 0 to 1."""
        return Measure.reachable(self)


def _in_float32(plan: Plan) -> Iterable[Cost]:
    for cost in plan.costs:
        if cost.unit == Macs.name:
            yield replace(cost, unit=Bops.name, scale=cost.scale * FLOAT**2)


__all__ = [
    "Amounts",
    "Bops",
    "Count",
    "Heads",
    "Latency",
    "Macs",
    "Measure",
    "Params",
    "Source",
    "SumOfTerms",
    "Width",
    "kind_of",
    "measure_of",
    "names",
    "register",
]
