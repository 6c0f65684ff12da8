"""Fake quantization over a run: when ranges are observed, and when it is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from l0prune.errors import UsageError
from l0prune.exporting.capture_parts import surveyed
from l0prune.exporting.network import copies_of
from l0prune.features.int8.bits import check_menu, with_bits
from l0prune.features.int8.fake_quantizer import FakeQuantizer
from l0prune.features.int8.layers import quantized_layers
from l0prune.features.int8.learned_bits import LearnedBits
from l0prune.features.int8.ranges import Scheme
from l0prune.gating.attaching import holder
from l0prune.gating.bank import Gates
from l0prune.running.processes import is_sharded, those_that_train
from l0prune.training.phases import Phases

_SOONER = 20  # learned bits begin after the steps of the run over this
_OPEN = 0.99  # P(z ≠ 0) of gates of bits to begin with


class Quantizing:
    """Fake quantization of a gated model over the steps of a run.

    It is off at first, on from the middle of the run, and always on in the settle phase. Ranges are
    observed from half of the steps before that on, and known after one. Learned bits take more
    steps: for them it is on after a twentieth of the steps, with the ranges observed in these.

    Args:
        model: gated and whole. Ranges of an earlier run are dropped.
        phases: of the run.
        bits: menu from which those of each tensor are learned; None for eight bits.

    Raises:
        UsageError: the model is captured in parts, its weights are in shards, or it has no layer
            that can be in eight bits.
        CaptureError: torch.export can no longer follow it.
    """

    def __init__(self, model: nn.Module, phases: Phases, bits: Sequence[int] | None = None) -> None:
        menu = () if bits is None else check_menu(bits)
        root, _ = holder(model)
        self._begins = min(phases.total // (_SOONER if menu else 2), phases.learning)
        self._from = 0 if menu else self._begins // 2
        self._until = max(1, self._begins) if menu else phases.total
        self._step = 0
        self._quantizer = _quantizer(root, tuple(menu))
        self._quantizer.attach(root)

    def begin(self, step: int) -> None:
        """Turn quantization and the observation of ranges on or off, before a step."""
        self._step = step
        self._quantizer.forget()
        self._quantizer.is_observing = self._from <= step < self._until
        self._quantizer.is_on = step >= self._begins

    def advance(self) -> None:
        """Update the ranges by the values seen in all processes, after a step."""
        if not self._quantizer.is_observing:
            return
        seen, computed, world = self._quantizer.seen, self._quantizer.computed, those_that_train()
        if world.is_shared:
            signs = seen.new_tensor([-1.0, 1.0])
            seen = world.largest_(seen * signs) * signs
            computed = seen.isfinite().all(1).nonzero().flatten().tolist()
        self._quantizer.advance(seen, computed)
        self._quantizer.is_observing &= self._step + 1 < self._until

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept beside that of the model."""
        return {"ranges": self._quantizer.ranges.cpu(), "counts": [*self._quantizer.counts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self._quantizer.load(**state)


def _quantizer(root: nn.Module, menu: tuple[int, ...]) -> FakeQuantizer:
    """Return the quantizer of a model for these bits, with the scheme of its last one, if any."""
    _, gates = holder(root)
    if gates.plan.in_parts:
        raise UsageError(
            "quantize is for models that are captured whole, and this one was captured in parts: "
            "an int8 file is made of one. Leave quantize out"
        )
    before = gates.quantizer
    assert before is None or isinstance(before, FakeQuantizer)
    if before is None or before.found.menu != menu:
        scheme = _scheme(root, sums=not menu) if before is None else before.scheme
        if before is not None:
            before.remove(root)
        if menu:
            _add_bits(gates, scheme, menu)
    else:
        scheme = before.scheme
    if menu:
        return LearnedBits(gates, scheme, menu)
    from l0prune.features.int8.quantizer import has_dot_products  # loads onnx

    largest = 127 if has_dot_products() else 63
    return FakeQuantizer(gates, scheme, largest if before is None else before.largest)


def _add_bits(gates: Gates, scheme: Scheme, menu: Sequence[int]) -> None:
    """Add gates of bits, all open, to a bank: training begins at the largest of the menu."""
    plan = with_bits(gates.plan, scheme, menu)
    start = gates.gate.initial(_OPEN)
    more = gates.log_alpha.new_full((plan.size - gates.plan.size,), start)
    gates.change_plan(plan, torch.cat([gates.log_alpha.detach(), more]))


def _scheme(root: nn.Module, *, sums: bool) -> Scheme:
    if any(map(is_sharded, root.parameters())):
        raise UsageError(
            "quantize needs whole weights, and these are in shards (FSDP): train with "
            "distributed='ddp'"
        )
    (part,) = surveyed(copies_of(root), frees_batch=False).found
    scheme = quantized_layers(part.analysis.captured, root, sums=sums)
    if not scheme.layers:
        raise UsageError(
            "quantize finds no Linear and no convolution in this model that its own forward "
            "computes, which is what can have few bits"
        )
    return scheme
