"""Record of the exported module's tensors, MACs and output, to detect later changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.sizes import Inputs
from l0prune.errors import CertificateError, UsageError
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.counting import MacsCounter
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import lent, placed
from l0prune.gating.bank import Gates
from l0prune.progress.stages import stage
from l0prune.running.device import device_of

_SAME = 1e-6  # of the output's scale in float32: one module run twice
_SINGLE = torch.float32


@dataclass(frozen=True)
class HandedOut:
    """Record of an export's module as it was made.

    Attributes:
        example: the inputs that it was run on.
        tensors: copies of the tensors of its state_dict.
        answer: its output in float32; None if it could not be run.
        macs: multiply-accumulates of that run for one example, as torch counts them.
        device: on which it was run.
    """

    example: Inputs
    tensors: Mapping[str, Tensor]
    answer: Any
    macs: float
    device: torch.device

    @classmethod
    @stage("running the smaller model")
    def of(cls, module: nn.Module, example: Inputs, state: Mapping[str, Tensor]) -> HandedOut:
        """Record a module; ``state`` has known copies of its tensors on the CPU, for reuse."""
        device = device_of(module)
        answer, macs = run_counted(module, example, device)
        return cls(example, _snapshot(module, state), answer, macs, device)

    def check_sizes(self, module: nn.Module) -> None:
        """Raise UsageError if names or shapes of the module's tensors differ from the record."""
        now = module.state_dict()
        names = [*self.tensors, *(name for name in now if name not in self.tensors)]
        for name in names:
            before, after = (
                "×".join(map(str, of[name].shape)) or "a number" if name in of else "not there"
                for of in (self.tensors, now)
            )
            if before != after:
                raise UsageError(
                    f"The exported module has been changed, and not by training: {name} is "
                    f"{after}, and was {before}. The sizes that a file of it would say are those "
                    "of the export. Gate and export the changed module, or write it by torch's "
                    "own means (torch.save, torch.onnx.export)."
                )

    def has_changed(self, module: nn.Module) -> bool:
        """Return whether the module's tensors or its output differ from the record."""
        for name, tensor in module.state_dict().items():
            if not _is_same(tensor.detach().cpu(), self.tensors[name]):
                return True
        answer, _ = run_counted(module, self.example, self.device)
        return self.answer is not None and difference(self.answer, answer) > _SAME


def parameters_of(module: nn.Module, unused: frozenset[str]) -> int:
    """Count the module's parameters, without ``unused`` ones and gates."""
    gates = {
        id(p) for each in module.modules() if isinstance(each, Gates) for p in each.parameters()
    }
    return sum(
        p.numel()
        for name, p in module.named_parameters()
        if name not in unused and id(p) not in gates
    )


def run_counted(module: nn.Module, example: Inputs, device: torch.device) -> tuple[Any, float]:
    """Run a module in float32 on a device; return its output and its MACs for one example."""
    with MacsCounter() as counter:
        try:
            answer = output_of(placed(lent(module, _SINGLE), device).eval(), example, _SINGLE)
        except CertificateError:
            return None, 0.0
    return answer, counter.for_one(example)


def _snapshot(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a module's tensors, reusing those of ``state`` that are equal."""
    found: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        known, own = state.get(name), tensor.detach().cpu()
        is_known = known is not None and _is_same(own, known)
        found[name] = known if is_known else own.clone()  # type: ignore[assignment]
    return found


def _is_same(some: Tensor, other: Tensor) -> bool:
    """Check that two tensors have equal dtype, shape and values; nan equals nan."""
    if (some.dtype, some.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(some, other) or bool(
        ((some == other) | (some.isnan() & other.isnan())).all()
    )
