"""Interface of a kind of gate, and the clamped sigmoid that the kinds share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import Function

from l0prune.capture.compat import functorch_is_active
from l0prune.errors import UsageError, unknown
from l0prune.plan.expected import first_order


@runtime_checkable
class Gate(Protocol):
    """A multiplier z ≥ 0 per slot, learned through one number ``log_alpha`` each.

    A gate is a frozen dataclass: its fields are its settings, and they travel with the model.
    All tensors are flat, shape ``(gates,)``, of the dtype of ``log_alpha`` (float32 or float64).
    The scale of ``log_alpha`` depends on the kind of gate, so that a learning rate or a distance
    does not carry over to another kind; a larger value is always more open.

    The gradients of ``sample`` and ``estimate`` must survive more than one backward pass
    through the same result, because activation checkpointing makes several (``hard_sigmoid``
    does). An ``estimate`` may have no gradient at all.

    A kind whose multiplier has no slope where it is exactly 0, as a clamp or a sigmoid has none,
    may set a class attribute ``is_flat_at_zero = True``; a first layer then trains faster.
    """

    name: ClassVar[str]

    def at(self, progress: float) -> Gate:
        """Return the gate at this progress, from 0 to 1, through the steps in which gates learn.

        A gate that is the same all through training returns itself. The result depends on
        ``progress`` and the settings alone, not on what was asked before.
        """
        ...

    def sample(self, log_alpha: Tensor, noise: Tensor) -> Tensor:
        """The multipliers of one training step; ``noise`` is uniform, never exactly 0 or 1."""
        ...

    def estimate(self, log_alpha: Tensor) -> Tensor:
        """The multipliers used in eval mode; a gate is closed where this is exactly 0."""
        ...

    def open_probability(self, log_alpha: Tensor) -> Tensor:
        """Return P(z ≠ 0), or the gate's substitute, which penalties count; differentiable."""
        ...

    def initial(self, open_probability: float) -> float:
        """The ``log_alpha`` at which a gate is open with this probability.

        A likely gate must be open in eval mode and an unlikely one closed: ``estimate`` is above
        0 at ``initial(1 - 1e-4)`` and exactly 0 at ``initial(1e-4)``.
        """
        ...


@runtime_checkable
class LearnsTemperature(Protocol):
    """A gate whose temperature may learn, too, as a separate parameter beside ``log_alpha``."""

    def temperature_start(self, sizes: Sequence[int]) -> Tensor | None:
        """Return the parameter's start, by the sizes of the axes; None where only log α learns."""
        ...

    def temperature_index(self, sizes: Sequence[int]) -> Tensor:
        """Return the index of each gate's entry in the parameter; int64, shape ``(gates,)``."""
        ...

    def at_temperature(self, parameter: Tensor, index: Tensor) -> AtTemperature:
        """Return the gate at the temperature in the parameter, differentiable in the latter."""
        ...


@runtime_checkable
class AtTemperature(Gate, Protocol):
    """A gate at a learned temperature; ``initial`` is for the temperature at the start."""

    @property
    def shift_learned(self) -> Tensor:
        """Summand to ``initial`` for the same P(z ≠ 0) now; shape ``(gates,)``."""
        ...

    def among(self, chosen: Tensor) -> AtTemperature:
        """The gate for some of the slots."""
        ...


GateClass = TypeVar("GateClass", bound=type[Gate])
_kinds: dict[str, type[Gate]] = {}


def register(kind: GateClass) -> GateClass:
    """Class decorator: make a gate known by its ``name``, so that saved models find it again."""
    _kinds[kind.name] = kind
    return kind


def gate_of(kind: str, settings: Mapping[str, Any]) -> Gate:
    """The gate of this name, hyphens or underscores, with settings as a user gives them."""
    name = kind.replace("-", "_")
    if name not in _kinds:
        known = [each.replace("_", "-") for each in sorted(_kinds)]
        raise unknown(f"there is no gate {kind!r}", kind, known)
    return _made(name, settings)


def gate_to_dict(gate: Gate) -> dict[str, Any]:
    """The gate's name and settings as plain data."""
    return {"name": gate.name, **asdict(gate)}  # type: ignore[call-overload]


def gate_from_dict(data: Mapping[str, Any]) -> Gate:
    """Inverse of ``gate_to_dict``."""
    settings = dict(data)
    name = settings.pop("name", None)
    if name not in _kinds:
        raise UsageError(
            f"unknown kind of gate {name!r}; this version knows {', '.join(sorted(_kinds))}. "
            "The model was probably saved by a newer version, or by code that registers its own "
            "gate and was not imported."
        )
    return _made(name, settings)


def _made(name: str, settings: Mapping[str, Any]) -> Gate:
    """A gate of a known name; UsageError where it does not take these settings."""
    try:
        gate: Gate = _kinds[name](**settings)
    except TypeError as error:
        shown = name.replace("_", " ")
        raise UsageError(f"the {shown} gate does not take these settings: {error}") from error
    return gate


def logit(open_probability: float) -> float:
    """log(p/(1−p)), for gates to start from."""
    if not 0 < open_probability < 1:
        raise UsageError(
            "the open probability of a gate must lie strictly between 0 and 1 (log α would be "
            f"infinite), not {open_probability}; 0.99 is nearly open"
        )
    return math.log(open_probability) - math.log1p(-open_probability)


def hard_sigmoid(
    log_alpha: Tensor,
    logistic: Tensor | None,
    rate: float | Tensor,
    gamma: float = 0.0,
    zeta: float = 1.0,
) -> Tensor:
    """``clamp(s·(ζ−γ) + γ, 0, 1)`` with ``s = σ((log α + logistic)·rate)``; by default s itself.

    Its backward pass may run any number of times over, but cannot be differentiated; within
    transforms of torch.func (``vmap``, ``grad``) it consists of torch's operations, and can.

    Shape: log_alpha, logistic, result and a rate that is a tensor ``(gates,)``.
    """
    if functorch_is_active():
        logits = log_alpha if logistic is None else log_alpha + logistic
        return torch.rsub((logits * rate).sigmoid(), gamma, alpha=gamma - zeta).clamp(0, 1)
    learns = log_alpha.requires_grad or (isinstance(rate, Tensor) and rate.requires_grad)
    if not (learns and torch.is_grad_enabled()):
        logits = log_alpha if logistic is None else log_alpha + logistic
        return _stretched((logits * rate).sigmoid(), gamma, zeta)
    z: Tensor = _HardSigmoid.apply(log_alpha, logistic, rate, gamma, zeta)
    return z


def _stretched(s: Tensor, gamma: float, zeta: float) -> Tensor:
    return torch.rsub(s, gamma, alpha=gamma - zeta).clamp(0, 1)


class _HardSigmoid(Function):
    """One node of the graph instead of seven.

    It keeps s as an attribute, not as a saved tensor: autograd frees those after the first
    backward pass, while every segment of a checkpointed model makes a pass of its own through
    the one sample.

    Its result comes from an out-of-place operation, as in every Function here: in a graph of
    torch 2.11 a tensor that is written in place and returned has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_alpha: Tensor,
        logistic: Tensor | None,
        rate: float | Tensor,
        gamma: float,
        zeta: float,
    ) -> Tensor:
        logits = log_alpha if logistic is None else log_alpha + logistic
        ctx.logits = logits if isinstance(rate, Tensor) else None
        ctx.s = (logits * rate).sigmoid()
        ctx.rate, ctx.gamma, ctx.zeta = rate, gamma, zeta
        return _stretched(ctx.s, gamma, zeta)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stretch = ctx.zeta - ctx.gamma
        # s inside these bounds is z strictly inside (0, 1); outside, the clamp has no slope.
        lower, upper = -ctx.gamma / stretch, (1 - ctx.gamma) / stretch
        inside = torch.ops.aten.hardtanh_backward(grad, ctx.s, lower, upper)
        slope = torch.ops.aten.sigmoid_backward(inside, ctx.s)
        of_rate = None if ctx.logits is None else slope * ctx.logits * stretch
        return slope * (ctx.rate * stretch), None, of_rate, None, None
