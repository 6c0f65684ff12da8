"""What a bank of gates has computed for now: never saved, never copied, cheap to make again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Origin(NamedTuple):
    """What the current multipliers were computed from."""

    value: Tensor
    version: int | None
    mode: tuple[bool, ...]

    def same_value(self, other: Origin) -> bool:
        """Is it the same parameter, unchanged? Then its noise still counts."""
        return self.value is other.value and self.version == other.version


class Current:
    """The multipliers of all gates that a model uses now.

    Attributes:
        noise: what they were drawn with; None where the next are to be drawn afresh.
        z: the multipliers, flat.
        origin: what they were computed from.
        grad: whether gradients were on.
        in_forward: the model is in its forward, so that they hold without a further look.
    """

    def __init__(self) -> None:
        self.noise: Tensor | None = None
        self.z: Tensor | None = None
        self.origin: Origin | None = None
        self.grad = False
        self.in_forward = False

    def __reduce__(self) -> tuple[type[Current], tuple[()]]:
        return Current, ()


class Multiplier:
    """The current multipliers along one layout, for the modules that use them.

    It has an attribute rather than a place in a list, so that torch.compile sees equal blocks
    of a model as equal.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        return {"values": None}
