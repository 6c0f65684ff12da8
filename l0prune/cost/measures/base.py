"""Measures: a network's cost as a function of its gates, for budgets to limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from l0prune.plan.plan import Plan

Axes = frozenset[int] | None
"""Numbers of the axes that a measure goes through, or None for everything."""


class Measure(ABC):
    """Something that a network has less of when slots are cut: parameters, time, memory.

    A measure of your own is a subclass under ``@l0prune.measures.register`` that says what it
    is called and what is expected of it. A budget may then be about it: ``"memory=0.5"``.

    Attributes:
        name: what a budget says: letters, digits, ``-`` and ``_``.
        label: what people are shown.
        suffixes: what may stand after an amount, and how much it is. The first is the unit in
            which all amounts of this measure are, 1 of it; ``""`` where that has no name. Such as
            ``{"ms": 1.0, "us": 1e-3, "s": 1e3}``.
        each_axis: whether a limit is about each axis by itself, in whole slots of which one is
            always allowed, instead of about all of them together.
        plan: of the network.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    suffixes: ClassVar[Mapping[str, float]]
    each_axis: ClassVar[bool] = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    def of(cls, plan: Plan) -> Measure:
        """The measure of a network with this plan.

        Raises:
            UsageError: it takes more than a plan, or one that this is not.
        """
        return cls(plan)

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

        It may go up and down in steps. By default it is what is expected of certain gates.

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
        """The share of the dense amount that is gone once every gate is closed, from 0 to 1."""
        nothing = torch.zeros(self.plan.size, dtype=torch.float64)
        dense = self.dense()
        return (dense - float(self.expected(nothing))) / dense if dense else 0.0

    @property
    def axes(self) -> frozenset[int]:
        """Numbers of the axes whose slots count; by default all."""
        return frozenset(range(len(self.plan.axes)))

    def by_owner(self, kept: Tensor) -> dict[str, float]:
        """What each module has of it, by path, where it can be told apart; what is no module's,
        such as an overhead that no gate removes, under a text of its own.

        Args:
            kept: 1 for each slot that stays, else 0; float64, shape ``(plan.size,)``.
        """
        return {}

    def blocks(self) -> list[int] | None:
        """For each axis in how many slots at once it is worth cutting; None: it does not matter."""
        return None

    def observed(self, model: nn.Module) -> float | None:
        """The real amount of an export of this gated model, its gates as they stand now.

        None where there is no more to observe than ``actual`` says. The model has to be left as it
        is. Where several processes train together only the first is asked, and the others wait.
        """
        return None

    @classmethod
    def show(cls, amount: float) -> str:
        """An amount for people, in messages."""
        number = f"{amount:.3g}" if abs(amount) < 1000 else f"{amount:,.0f}"
        return f"{number} {next(iter(cls.suffixes))}".strip()

    @classmethod
    def brief(cls, amount: float) -> str:
        """An amount for people, in a line or a table: three digits or so."""
        return cls.show(amount)


class Source(Protocol):
    """Factory of a measure that needs more than a plan, such as a table of times.

    Its text (``str``) says which one it is: a run goes on only with the same.
    """

    @property
    def name(self) -> str:
        """Name of the measure."""

    def of(self, plan: Plan) -> Measure:
        """The measure of a network with this plan.

        Raises:
            UsageError: it was made for another network.
        """
