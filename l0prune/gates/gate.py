"""What a gate is: the seam at which a second kind of gate is one more class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from l0prune.errors import UsageError


@runtime_checkable
class Gate(Protocol):
    """A stochastic multiplier z ≥ 0 per slot, learned through one number ``log_alpha`` each.

    A gate is a frozen dataclass: its fields are its settings, and they travel with the model.
    All tensors are flat, shape ``(gates,)``, of the dtype of ``log_alpha`` (float32 or float64).
    The gradients of ``sample`` and ``estimate`` must survive more than one backward pass
    through the same result, because activation checkpointing makes several.
    """

    name: ClassVar[str]

    def sample(self, log_alpha: Tensor, noise: Tensor) -> Tensor:
        """The multipliers of one training step; ``noise`` is uniform, never exactly 0 or 1."""
        ...

    def estimate(self, log_alpha: Tensor) -> Tensor:
        """The multipliers used in eval mode; a gate is closed where this is exactly 0."""
        ...

    def open_probability(self, log_alpha: Tensor) -> Tensor:
        """P(z ≠ 0), differentiable."""
        ...

    def initial(self, open_probability: float) -> float:
        """The ``log_alpha`` at which a gate is open with this probability."""
        ...


GateClass = TypeVar("GateClass", bound=type[Gate])
_kinds: dict[str, type[Gate]] = {}


def register(kind: GateClass) -> GateClass:
    """Class decorator: make a gate known by its ``name``, so that saved models find it again."""
    _kinds[kind.name] = kind
    return kind


def gate_to_dict(gate: Gate) -> dict[str, Any]:
    """The gate's name and settings as plain data."""
    return {"name": gate.name, **asdict(gate)}  # type: ignore[call-overload]


def gate_from_dict(data: Mapping[str, Any]) -> Gate:
    """Inverse of ``gate_to_dict``.

    Raises:
        UsageError: no gate of that name is known, or its settings make no sense.
    """
    settings = dict(data)
    name = settings.pop("name", None)
    if name not in _kinds:
        raise UsageError(
            f"unknown kind of gate {name!r}; this version knows {', '.join(sorted(_kinds))}. "
            "The model was probably saved by a newer version, or by code that registers its own "
            "gate and was not imported."
        )
    try:
        gate: Gate = _kinds[name](**settings)
    except TypeError as error:
        raise UsageError(f"the {name} gate does not take these settings: {error}") from error
    return gate
