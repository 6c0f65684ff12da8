"""Record of the exported module's tensors, MACs and output, to detect later changes."""

from __future__ import annotations

import hashlib
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
Mark = bytes | Tensor


@dataclass(frozen=True)
class HandedOut:
    """Record of an export's module as it was made.

    Attributes:
        example: the inputs that it was run on.
        sizes: of the tensors of its state_dict.
        marks: of the values of these tensors.
        answer: its output in float32; None if it could not be run.
        macs: multiply-accumulates of that run for one example, as torch counts them.
        device: on which it was run.
    """

    example: Inputs
    sizes: Mapping[str, torch.Size]
    marks: Mapping[str, Mark]
    answer: Any
    macs: float
    device: torch.device

    @classmethod
    @stage("running the smaller model")
    def of(cls, module: nn.Module, example: Inputs, marks: Mapping[str, Mark]) -> HandedOut:
        """Record a module; ``marks`` are of its tensors, or empty if they are not known."""
        device = device_of(module)
        answer, macs = run_counted(module, example, device)
        sizes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        return cls(example, sizes, marks or marks_of(module), answer, macs, device)

    def check_sizes(self, module: nn.Module) -> None:
        """Raise UsageError if names or shapes of the module's tensors differ from the record."""
        sizes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        for name in {**self.sizes, **sizes}:
            before, after = (
                "×".join(map(str, of[name])) or "a number" if name in of else "not there"
                for of in (self.sizes, sizes)
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
        if not are_marked(module, self.marks):
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


def marks_of(module: nn.Module) -> dict[str, Mark]:
    """Return the marks of the tensors of a module's state_dict, by name."""
    return {name: _mark(tensor) for name, tensor in module.state_dict().items()}


def are_marked(module: nn.Module, marks: Mapping[str, Mark]) -> bool:
    """Return whether the tensors of these names have the values that had these marks."""
    state = module.state_dict()
    return all(_has_mark(state[name], mark) for name, mark in marks.items())


def _has_mark(tensor: Tensor, mark: Mark) -> bool:
    now = _mark(tensor)
    if isinstance(now, Tensor) and isinstance(mark, Tensor):
        return torch.equal(now, mark)
    return type(now) is type(mark) and now == mark


def _mark(tensor: Tensor) -> Mark:
    """Return a digest of a tensor's values; a copy of one that has no plain memory."""
    own = tensor.detach().cpu()
    if type(own) is not Tensor or own.layout != torch.strided or own.is_quantized or own.is_meta:
        return own.clone()
    plain = own.resolve_conj().resolve_neg().contiguous().reshape(-1)
    found = hashlib.blake2b(f"{own.dtype} {[*own.shape]}".encode(), digest_size=16)
    found.update(plain.view(torch.uint8).numpy().data)
    return found.digest()
