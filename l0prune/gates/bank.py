"""The one bank of gates that a gated model carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.gates.gate import Gate
from l0prune.gates.spreader import Spreader
from l0prune.layout import Layout
from l0prune.plan import Plan

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GateAxis:
    """An axis of a gated model as it stands now.

    Attributes:
        name: the axis' name in the plan.
        kind: ``channel``, ``neuron``, ``head``, ``head_dim``, ``group`` or ``input``.
        size: number of slots.
        slice: their range in ``log_alpha``.
        open: which slots an export would keep; bool, shape ``(size,)``, on the CPU.
    """

    name: str
    kind: str
    size: int
    slice: slice
    open: Tensor


class Gates(nn.Module):
    """All gates of one model: one flat parameter, one sample per forward of the model.

    In train mode each forward of the model draws new multipliers z; in eval mode, and while
    ``fixed`` is set, z is the gate's estimate. A submodule called on its own draws once after
    every change of ``log_alpha``.

    Attributes:
        log_alpha: the gates' parameter, shape ``(plan.size,)``; float32, or float64 in a model
            of doubles, and never less precise than that.
        plan: where the gates act.
        gate: the kind of gate and its settings.
        example: positional and keyword arguments of the model's forward, on the CPU.
        fixed: gates stand at their eval values, and do not learn, even in train mode.
        bypassed: the model reads its plain parameters, as if it had no gates.
    """

    log_alpha: nn.Parameter

    def __init__(
        self, plan: Plan, gate: Gate, log_alpha: Tensor, example: Example = ((), {})
    ) -> None:
        super().__init__()
        self.plan = plan
        self.gate = gate
        self.example = example
        self.fixed = False
        self.bypassed = False
        self.log_alpha = nn.Parameter(log_alpha)
        self._layouts = tuple(dict.fromkeys(site.layout for site in plan.sites))
        self._spreader = Spreader(plan, self._layouts)
        self._forget()

    @property
    def axes(self) -> tuple[GateAxis, ...]:
        """The gated axes, in the order of ``log_alpha``.

        A slot counts as open where an export would keep it: a map that no open fine gate reads
        is closed, and an axis whose gates are all closed keeps one slot.
        """
        kept = self.plan.kept(self.open())
        return tuple(
            GateAxis(a.name, a.kind, a.size, a.slice, kept[a.slice]) for a in self.plan.axes
        )

    @torch.no_grad()
    def z(self) -> Tensor:
        """The multipliers of eval mode, shape ``(plan.size,)``, without gradient."""
        return self.gate.estimate(self.log_alpha)

    def open(self) -> Tensor:
        """Which gates are open (z > 0) in eval mode: bool, shape ``(plan.size,)``."""
        return self.z() > 0

    def open_probability(self) -> Tensor:
        """P(z ≠ 0) of each gate, shape ``(plan.size,)``, differentiable."""
        return self.gate.open_probability(self.log_alpha)

    def current(self) -> Tensor:
        """The multipliers that the model uses now, shape ``(plan.size,)``."""
        self._refresh()
        assert self._z is not None
        return self._z

    def multiplier(self, number: int) -> Tensor:
        """The current multipliers along layout ``number``, shape ``(size_of(layout),)``."""
        self._refresh()
        return self._spread[number]

    def layout_number(self, layout: Layout) -> int:
        """The number by which ``multiplier`` knows a layout of one of the plan's sites."""
        return self._layouts.index(layout)

    def forward(self, x: Any) -> Any:
        """``x`` itself, so that a model that runs its children in turn computes what it did."""
        return x

    def begin_forward(self, *_: Any) -> None:
        """Forward pre-hook of the model: from here on, new multipliers."""
        if not self.bypassed:
            self._noise = None
            self._compute(self._state())

    def _refresh(self) -> None:
        """Compute z unless what there is still holds."""
        state = self._state()
        if self._z is None or state != self._computed_in:
            before, now = self._computed_in, state
            if before is None or before[:2] != now[:2]:
                self._noise = None
            self._compute(state)

    def _state(self) -> tuple[Any, ...]:
        """What the current multipliers depend on: the parameter and its version, and the mode."""
        value = self.log_alpha
        version = 0 if value.is_inference() else value._version
        stochastic = self.training and not self.fixed
        inference = torch.is_inference_mode_enabled()
        return (id(value), version, stochastic, torch.is_grad_enabled(), inference)

    def _compute(self, state: tuple[Any, ...]) -> None:
        value = self.log_alpha
        if self.training and not self.fixed:
            if self._noise is None:
                self._noise = _uniform(value)
            z = self.gate.sample(value, self._noise)
        else:
            z = self.gate.estimate(value.detach() if self.fixed else value)
        self._z = z
        self._spread = self._spreader(z)
        self._computed_in = state

    def _forget(self) -> None:
        """Drop what is computed: it belongs to this very object, and is cheap to compute again."""
        self._noise: Tensor | None = None
        self._z: Tensor | None = None
        self._spread: list[Tensor] = []
        self._computed_in: tuple[Any, ...] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gates:
        """Move with the model, but never to a dtype in which exp and log lose the gates."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            exact = moved.dtype in (torch.float32, torch.float64)
            return moved if exact else tensor.to(moved.device)

        super()._apply(move, recurse)
        self._forget()
        return self

    def __getstate__(self) -> Mapping[str, Any]:
        empty = {"_noise": None, "_z": None, "_spread": [], "_computed_in": None}
        return {**self.__dict__, **empty}

    def extra_repr(self) -> str:
        return f"{self.plan.size} gates on {len(self.plan.axes)} axes, {self.gate}"


def _uniform(like: Tensor) -> Tensor:
    """Noise strictly between 0 and 1 from the device's global generator."""
    epsilon = torch.finfo(like.dtype).eps
    return torch.empty_like(like).uniform_(epsilon, 1 - epsilon)
