"""Gates of a model as parameters, and the multipliers that they give in each forward.

Call order of a forward: ``begin_forward`` (the model's pre-hook; the forward itself if compiled),
``_compute`` unless the last multipliers are still valid, ``Spreader`` for all layouts,
``Products.begin`` for all weights at once (on a GPU). Gated layers then read these products, or
call ``scale``; ``end_forward`` drops the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.capture.compat import version_of, without_compiler
from l0prune.gating.compiled_products import CompiledProducts
from l0prune.gating.kinds.base import Gate, LearnsTemperature
from l0prune.gating.multiplying import GateValues, MultiplierCache, Spreader
from l0prune.gating.products import Products, is_joined
from l0prune.plan.layout import Layout
from l0prune.plan.plan import Plan, Site

# P(z = 0) below which a gate of bits is open in eval mode (Bayesian Bits, eq. 22).
_THRESHOLD = 0.34


class SampledGates(nn.Module):
    """Gates that are sampled once per forward of their model; attributes: see ``Gates``."""

    log_alpha: nn.Parameter
    temperature: nn.Parameter | None
    clips: nn.Parameter | None
    kept: Tensor | None = None

    def __init__(self, plan: Plan, gate: Gate, log_alpha: Tensor) -> None:
        super().__init__()
        self.plan = plan
        self.gate = gate
        self.fixed = False
        self.bypassed = False
        self._given: Tensor | None = None  # z that ``using`` sets; None: z of the gates
        self.log_alpha = nn.Parameter(log_alpha)
        self.register_parameter("temperature", None)
        self.register_parameter("clips", None)
        self._start_temperature()
        self._values = {_place(plan, site): GateValues() for site in plan.sites}
        self._spread_over(None)
        self._now = MultiplierCache()  # multipliers in use, and what they were computed from
        self.products = Products()

    def _start_temperature(self) -> None:
        """Create the temperature parameter if the gate learns one; keep entries already learned."""
        if not isinstance(self.gate, LearnsTemperature):
            return
        sizes, before = [axis.size for axis in self.plan.axes], self.temperature
        if (started := self.gate.temperature_start(sizes)) is not None:
            started = started.to(self.log_alpha.detach())
            if before is not None:
                count = min(len(started), len(before))
                started[:count] = before.detach()[:count]
            self.temperature = nn.Parameter(started)
            self._temperature_index = self.gate.temperature_index(sizes)

    def change_plan(self, plan: Plan, log_alpha: Tensor) -> None:
        """Replace the plan by one with axes added or removed at its end.

        The parameters become new objects, so no optimizer may hold the former ones.

        Shape: log_alpha ``(plan.size,)``.
        """
        self.plan = plan
        self.log_alpha = nn.Parameter(log_alpha.detach(), self.log_alpha.requires_grad)
        self._start_temperature()
        self._spread_over(self.kept)
        self._forget()

    @property
    def learned(self) -> list[nn.Parameter]:
        """Parameters of the gates themselves, without ``clips``."""
        return [p for p in (self.log_alpha, self.temperature) if p is not None]

    @property
    def gate_now(self) -> Gate:
        """The kind of gate, at the learned temperature if there is one."""
        if self.temperature is None or not isinstance(self.gate, LearnsTemperature):
            return self.gate
        if self._temperature_index.device != self.temperature.device:
            self._temperature_index = self._temperature_index.to(self.temperature.device)
        return self.gate.at_temperature(self.temperature, self._temperature_index)

    @torch.no_grad()
    def z(self) -> Tensor:
        """The multipliers of eval mode, shape ``(plan.size,)``, without gradient."""
        return self.estimated(self.log_alpha)

    def estimated(self, log_alpha: Tensor) -> Tensor:
        """Return the eval-mode multipliers for this ``log_alpha``, shape ``(plan.size,)``."""
        with nullcontext() if log_alpha.requires_grad else torch.no_grad():
            z = self.gate_now.estimate(log_alpha)
            if (first := self._slots) < len(z):
                chances = self.gate_now.open_probability(log_alpha.detach())[first:]
                z = torch.cat([z[:first], (chances > 1 - _THRESHOLD).to(z)])
        return self._with_one(z, log_alpha)

    def _with_one(self, z: Tensor, log_alpha: Tensor) -> Tensor:
        """Return z with one multiplier set to 1 in each ``keeps_one`` axis whose z is all 0.

        That is the gate of largest log α among the slots that are not cut; the last one of
        several.
        """
        kept = [axis for axis in self.plan.axes if axis.keeps_one]
        if not kept:
            return z
        values, opened = log_alpha.detach(), torch.zeros_like(z)
        if self.kept is not None:
            values = values.masked_fill(~self.kept.to(values.device), float("-inf"))
        for axis in kept:
            best = F.one_hot(values[axis.slice].flip(0).argmax(), axis.size).flip(0)
            opened[axis.slice] = best * (z.detach()[axis.slice] == 0).all()
        return z + opened

    def open_probability(self) -> Tensor:
        """P(z ≠ 0) of each gate, shape ``(plan.size,)``, differentiable."""
        return self.gate_now.open_probability(self.log_alpha)

    def current(self) -> Tensor:
        """Return the current multipliers, shape ``(plan.size,)``."""
        self.refresh()
        assert self._now.z is not None
        return self._now.z

    @contextmanager
    def using(self, z: Tensor) -> Iterator[None]:
        """Use ``z`` as the multipliers within the context, in every mode, with its gradient.

        Shape: z ``(plan.size,)``, of the dtype and on the device of ``log_alpha``.
        """
        before, self._given = self._given, z
        try:
            yield
        finally:
            self._given = before

    def multiplier(self, site: Site) -> GateValues:
        """Return the object that holds a site's current multipliers."""
        return self._values[_place(self.plan, site)]

    def cut_to(self, kept: Tensor | None) -> None:
        """Compute multipliers for parameters that are cut to these slots; None for uncut ones.

        The gates do not change: those of removed slots multiply nothing.

        Args:
            kept: as ``plan.kept`` gives it, bool, shape ``(plan.size,)``.
        """
        self.__dict__["kept"] = kept  # not a buffer: it is not part of the state_dict
        self._spread_over(kept)
        self._forget()

    def _spread_over(self, kept: Tensor | None) -> None:
        """Build the spreader for the positions that these slots leave; None for all slots."""
        self._slots = self.plan.slots  # known here, since compilers cannot follow a search
        shared: dict[tuple[Layout, bytes], tuple[Tensor | None, list[GateValues]]] = {}
        for (layout, dim), values in self._values.items():
            mask = None if kept is None else self.plan.mask(layout if dim is None else dim, kept)
            left = None if mask is None or bool(mask.all()) else mask.nonzero().flatten().cpu()
            key = b"" if left is None else left.numpy().tobytes()
            shared.setdefault((layout, key), (left, []))[1].append(values)
        self._spreader = Spreader(self.plan, [(of[0], left) for of, (left, _) in shared.items()])
        self._by_layout = [places for _, places in shared.values()]
        for begin, places in zip(self._spreader.begins, self._by_layout, strict=True):
            for place in places:
                place.begin = begin
        sites = [(site.tensor, self.multiplier(site), site.dim) for site in self.plan.sites]
        self._compiled = CompiledProducts(sites)

    def forward(self, x: Any) -> Any:
        """Return ``x``, so that a model that runs all its children in turn computes the same."""
        return x

    def before_forward(self, model: nn.Module, *_: Any) -> None:
        """Forward pre-hook of the model; a compiled forward calls ``begin_forward`` itself."""
        if not torch.compiler.is_compiling():
            self.begin_forward(model)

    def begin_forward(self, model: nn.Module | None = None) -> None:
        """Compute the multipliers and products of a forward that begins."""
        if not self.bypassed:
            self._now.noise = None
            if not self._now.is_still_valid(self.log_alpha, self._mode):
                self._compute()
            self._now.in_forward = True
            assert self._now.spread is not None
            if torch.compiler.is_compiling():
                if model is not None:
                    self.products.given(self._compiled.made(model, self._now.spread))
                return
            self.products.begin(self._now.spread)
            if model is not None:
                self._now.note_own(model)

    def is_own(self, module: nn.Module, name: str, parameter: Tensor) -> bool:
        """Return whether this tensor was the module's parameter when the model's forward began."""
        return self._now.is_own(module, name, parameter)

    def end_forward(self, *_: Any) -> None:
        """Forward hook of the model: from here on, multipliers are checked before each use.

        A backward pass that recomputes parts of the forward finds them unchanged.
        """
        self._now.in_forward = False
        self._now.own = None
        self.products.end()
        if torch.compiler.is_compiling():
            self._forget()  # a tracer's tensors are invalid outside its graph

    @property
    def in_forward(self) -> bool:
        """Return whether the model is in its forward right now."""
        return self._now.in_forward

    @property
    def is_flat_at_zero(self) -> bool:
        """Return whether a multiplier of 0 has no gradient, whatever the loss is."""
        return self._given is None and getattr(self.gate, "is_flat_at_zero", False)

    def refresh(self) -> None:
        """Compute the multipliers unless the present ones are still valid."""
        now = self._now
        if not (now.in_forward and now.grad == torch.is_grad_enabled()):
            self._refresh_outside()

    @without_compiler
    def _refresh_outside(self) -> None:
        """Refresh for a part of the model that is called alone, or recomputed in backward."""
        now, value = self._now, self.log_alpha
        if now.value is not value or now.version != version_of(value):
            now.noise = None
        elif now.mode == self._mode():
            return
        self._compute()

    def _mode(self) -> tuple[object, ...]:
        inference = torch.is_inference_mode_enabled()
        grad = torch.is_grad_enabled()
        learned = None if self.temperature is None else version_of(self.temperature)
        return (self.gate, learned, id(self._given), self.training, self.fixed, grad, inference)

    def _compute(self) -> None:
        now, value = self._now, self.log_alpha
        if self._given is not None:
            now.z = self._given
        elif self.training and not self.fixed:
            if now.noise is None:
                now.noise = _uniform(value)
            now.z = self._with_one(self.gate_now.sample(value, now.noise), value)
            now.z = self._waited_for(now.z, [p for p in (self.clips,) if p is not None])
        elif self.fixed:
            now.z = self.estimated(value.detach())
            now.z = self._waited_for(now.z, self.parameters())
        else:
            now.z = self.estimated(value)
        now.spread, parts = self._spreader(now.z)
        for places, values in zip(self._by_layout, parts, strict=True):
            for place in places:
                place.values = values
        now.grad = torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            now.note(
                value, self._mode(), is_fleeting=now.noise is not None or self._given is not None
            )

    def _waited_for(self, z: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Add 0·Σp to z for each parameter p, so that it gets a gradient: DDP waits for one."""
        if self.training and is_joined():
            for each in parameters:
                z = z + 0 * each.sum()
        return z

    def _forget(self) -> None:
        """Drop the computed multipliers and products, which are cheap to recompute."""
        self._now = MultiplierCache()
        self.products = Products()
        for place in self._values.values():
            place.values = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the model, but only to float32 or float64: exp and log need that precision."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            exact = moved.dtype in (torch.float32, torch.float64)
            return moved if exact else tensor.to(moved.device)

        super()._apply(move, recurse)
        self._forget()
        return self


def _place(plan: Plan, site: Site) -> tuple[Layout, Layout | None]:
    """Return the key of a site's multipliers: its layout, and that of the dim, for cuts."""
    dims = plan.tensors.get(site.tensor)
    return site.layout, None if dims is None else dims[site.dim]


def _uniform(like: Tensor) -> Tensor:
    """Return noise strictly between 0 and 1 from the device's global generator."""
    epsilon = torch.finfo(like.dtype).eps
    return torch.empty_like(like).uniform_(epsilon, 1 - epsilon)
