"""What the code of a model's modules knows of sizes: numbers in it, and averages that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from l0prune.plan.layout import Layout, Layouts, from_json, to_json


@dataclass(frozen=True)
class Code:
    """By the path of each module, what it would have to know to run at other sizes.

    Attributes:
        sizes: dims whose size its forward gives as a number, such as one to reshape to.
        averages: the dims of its input, for a module that averages over an axis.
    """

    sizes: Mapping[str, Layouts] = field(default_factory=dict)
    averages: Mapping[str, Layouts] = field(default_factory=dict)

    def map(self, change: Callable[[Layout], Layout]) -> Code:
        """The same with every layout changed."""
        sizes, averages = (
            {path: tuple(map(change, dims)) for path, dims in each.items()}
            for each in (self.sizes, self.averages)
        )
        return Code(sizes, averages)

    def joined(self, other: Code) -> Code:
        """What both know; they speak of different modules."""
        return Code({**self.sizes, **other.sizes}, {**self.averages, **other.averages})

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers; ``from_json`` reads them back."""
        return {
            name: {path: list(map(to_json, dims)) for path, dims in each.items()}
            for name, each in (("sizes", self.sizes), ("averages", self.averages))
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Code:
        """Inverse of ``to_json``."""
        sizes, averages = (
            {path: tuple(map(from_json, dims)) for path, dims in data.get(name, {}).items()}
            for name in ("sizes", "averages")
        )
        return Code(sizes, averages)
