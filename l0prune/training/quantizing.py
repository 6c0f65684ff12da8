"""Fake quantization over a run: when it is looked for ranges, and when it is on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from l0prune.errors import Interrupted, NotGated, UsageError
from l0prune.exporting.capture_parts import surveyed
from l0prune.exporting.network import copies_of
from l0prune.gating.attaching import holder
from l0prune.gating.fake_quantization import attach_quantizer, detach_quantizer
from l0prune.gating.fake_quantizer import FakeQuantizer
from l0prune.infer.quantized_layers import quantized_layers
from l0prune.running.processes import is_sharded, those_that_train
from l0prune.training.phases import Phases


class Quantizing:
    """Fake quantization of a gated model over the steps of a run.

    It is off while the gates start, on from the middle of the run, and in the settle phase always.
    Ranges are looked for from half of that way on, and they are known after one step.

    Args:
        model: gated and whole. Ranges of an earlier run are forgotten.
        phases: of the run.

    Raises:
        UsageError: the model is captured in parts, its weights are in shards, or it has no layer
            that can be in eight bits.
        CaptureError: torch.export can no longer follow it.
    """

    def __init__(self, model: nn.Module, phases: Phases) -> None:
        root, gates = holder(model)
        self._begins = min(phases.total // 2, phases.learning)
        self._total, self._step = phases.total, 0
        self._quantizer = _quantizer(root)
        attach_quantizer(root, gates, self._quantizer)

    def begin(self, step: int) -> None:
        """Before a step: be on or off, as the run has it."""
        self._step = step
        self._quantizer.forget()
        self._quantizer.is_observing = self._begins // 2 <= step < self._total
        self._quantizer.is_on = step >= self._begins

    def advance(self) -> None:
        """After a step, which all processes have done."""
        if not self._quantizer.is_observing:
            return
        seen, computed, world = self._quantizer.seen, self._quantizer.computed, those_that_train()
        if world.is_shared:
            signs = seen.new_tensor([-1.0, 1.0])
            seen = world.largest_(seen * signs) * signs
            computed = seen.isfinite().all(1).nonzero().flatten().tolist()
        self._quantizer.advance(seen, computed)
        self._quantizer.is_observing &= self._step + 1 < self._total

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept beside that of the model."""
        return {"ranges": self._quantizer.ranges.cpu(), "counts": [*self._quantizer.counts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        self._quantizer.load(**state)


@contextmanager
def put_back_quantizer(model: nn.Module) -> Iterator[None]:
    """Give a gated model its former fake quantization back where the context fails."""
    try:
        root, gates = holder(model)
    except NotGated:
        yield
        return
    before = gates.quantizer
    try:
        yield
    except Interrupted:
        raise
    except BaseException:
        detach_quantizer(root, gates)
        if before is not None:
            attach_quantizer(root, gates, before)
        raise


def without_quantizer(model: nn.Module) -> None:
    """Take off what an earlier run has put on: ranges do not last while weights learn without."""
    detach_quantizer(*holder(model))


def _quantizer(root: nn.Module) -> FakeQuantizer:
    _, gates = holder(root)
    if gates.plan.parts != ("",):
        raise UsageError(
            "quantize='int8' is for models that are captured whole, and this one was captured in "
            "parts: an int8 file is made of one. Leave quantize out"
        )
    if gates.quantizer is not None:
        return FakeQuantizer(gates, gates.quantizer.scheme, gates.quantizer.largest)
    if any(map(is_sharded, root.parameters())):
        raise UsageError(
            "quantize='int8' needs whole weights, and these are in shards (FSDP): train with "
            "distributed='ddp'"
        )
    from l0prune.exporting.onnx.quantizer import has_dot_products  # loads onnx

    (part,) = surveyed(copies_of(root), frees_batch=False).found
    scheme = quantized_layers(part.analysis.captured, root)
    if not scheme.layers:
        raise UsageError(
            "quantize='int8' finds no Linear and no convolution in this model that its own forward "
            "computes, which is what is in eight bits"
        )
    return FakeQuantizer(gates, scheme, 127 if has_dot_products() else 63)
