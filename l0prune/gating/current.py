"""What a bank of gates has computed for now: never saved, never copied, cheap to make again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Current:
    """The multipliers of all gates that a model uses now.

    Attributes:
        noise: what they were drawn with; None where the next are to be drawn afresh.
        z: the multipliers, flat.
        value: the parameter that they were computed from. While it is the same, unchanged, its
            noise still counts.
        version: of that parameter then.
        mode: what else they depend on.
        grad: whether gradients were on.
        in_forward: the model is in its forward, so that they hold without a further look.
    """

    def __init__(self) -> None:
        self.noise: Tensor | None = None
        self.z: Tensor | None = None
        self.value: Tensor | None = None
        self.version: int | None = None
        self.mode: tuple[object, ...] = ()
        self.grad = False
        self.in_forward = False

    def __reduce__(self) -> tuple[type[Current], tuple[()]]:
        return Current, ()


class GateValues:
    """The current multipliers along one layout, for the modules that use them.

    It has an attribute rather than a place in a list, so that torch.compile sees equal blocks
    of a model as equal.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        return {"values": None}
