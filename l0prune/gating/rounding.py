"""Rounding of the weights and values of a gated model, which a feature puts on it.

It has the bank's ``quantizer`` and the ``quantizer`` of the link of each module whose weight it
rounds: what that module reads is its weight times the gates, rounded by ``weight``. It may add axes
of kind ``bits`` to the plan, whose gates it reads, and parameters, the bank's ``clips``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from l0prune.plan.cost import CostModel
from l0prune.plan.plan import Plan


class Rounding(ABC):
    """Rounding of the weights and values of one gated model.

    Attributes:
        is_on: forwards are rounded.
    """

    is_on: bool

    @property
    @abstractmethod
    def acts(self) -> bool:
        """Return whether weights are read rounded now."""

    @property
    @abstractmethod
    def by_layer(self) -> dict[str, tuple[int, int]]:
        """Bits of the weight and the input of each layer, by path; empty where none are learned."""

    @abstractmethod
    def weight(self, weight: Tensor, layer: int) -> Tensor:
        """Round the weight of this layer. Shape: ``(outputs, …)``, and so the result."""

    @abstractmethod
    def off(self) -> None:
        """Round nothing from now on."""

    @abstractmethod
    def bake(self, model: nn.Module) -> None:
        """Replace the weights of a gated model by rounded ones, where an export needs that."""

    @abstractmethod
    def for_file(self, plan: Plan, kept: Tensor) -> Any:
        """Return what a file with these slots has to know; None where nothing is rounded."""

    @abstractmethod
    def price(self, plan: Plan) -> CostModel | None:
        """Return the penalty on bits, in the unit ``bits``; None where none are learned."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the JSON data by which a file's model is rounded again (``rounded_again``)."""

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Put it on a gated model that is not cut, in the place of an earlier one."""

    @abstractmethod
    def detach(self, model: nn.Module) -> None:
        """Take it off the model that was gated; what it added to the plan stays."""

    @abstractmethod
    def remove(self, model: nn.Module) -> None:
        """Take it off, with all that it added to the bank."""
