"""The public export: from a gated model to a dense one, proven and written."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from l0prune.axes import Analysis, analyse
from l0prune.capture import Captured, capture, evaluating, widened
from l0prune.cost import CostModel
from l0prune.errors import CertificateError, UsageError
from l0prune.export import onnx_file
from l0prune.export.certificate import (
    Certificate,
    Inputs,
    cast,
    compare,
    compare_onnx,
    fresh_inputs,
)
from l0prune.export.manifest import manifest, verdict
from l0prune.export.program import dense_module, reexport
from l0prune.export.slicing import cut, doubled, fold
from l0prune.files import atomic_write
from l0prune.plan import Plan
from l0prune.rewrite import check_intact, detach, gates_of

BATCHES = (2, 5)


@dataclass
class Export:
    """A dense model that computes what the gated one does in eval mode.

    Attributes:
        module: the dense network, an ``nn.Module`` for evaluation.
        program: the same as a ``torch.export`` program.
        certificate: the measured errors.
        params, macs: of the dense network; MACs for one example.
        params_before, macs_before: of the network before the cut.
        widths: for each axis (kept slots, all slots).
        dynamic: whether the batch size is free.
    """

    module: nn.Module
    program: ExportedProgram
    certificate: Certificate
    params: int
    macs: int
    params_before: int
    macs_before: int
    widths: dict[str, tuple[int, int]]
    dynamic: bool
    _gated: nn.Module = field(repr=False)
    _inputs: tuple[Inputs, ...] = field(repr=False)
    _state: Mapping[str, Tensor] = field(repr=False)
    _manifest: dict[str, Any] = field(repr=False)

    def save_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write ONNX, after ONNX Runtime has shown that it computes the same.

        The certificate gains the comparison, and the file's metadata carries it.

        Raises:
            CertificateError: it does not; nothing is written.
            FileError: the file cannot be written.
        """
        proto = onnx_file.to_onnx(self.program)
        session = onnx_file.Session(proto.SerializeToString())
        checks = compare_onnx(self._gated, session, self._inputs)
        certificate = Certificate(
            tuple(c for c in self.certificate.checks if c.what != "onnx")
        ).with_checks(checks)
        facts = {
            "certificate": json.dumps(certificate.to_dict()),
            "params": self.params,
            "macs": self.macs,
            "widths": json.dumps(self.widths),
        }
        onnx_file.describe(proto, facts)
        onnx_file.write(proto, path)
        self.certificate = certificate

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write for torch: ``.pt2`` an exported program, else a state_dict with its manifest.

        The latter is a dict of ``state_dict``, and ``manifest`` as JSON text: shapes of each
        tensor, attributes of each module that have changed, and under ``rebuild`` whether the
        model's own class, resized like that, was found to compute the same, or why not.

        Raises:
            FileError: the file cannot be written.
        """
        if Path(path).suffix == ".pt2":
            atomic_write(path, lambda file: torch.export.save(self.program, file))
            return
        content = {"state_dict": dict(self._state), "manifest": json.dumps(self._manifest)}
        atomic_write(path, lambda file: torch.save(content, file))

    def to_dict(self) -> dict[str, Any]:
        """Sizes and certificate as plain data."""
        return {
            "params": self.params,
            "params_before": self.params_before,
            "macs": self.macs,
            "macs_before": self.macs_before,
            "dynamic_batch": self.dynamic,
            "widths": {name: list(width) for name, width in self.widths.items()},
            "certificate": self.certificate.to_dict(),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Sizes before and after, and the certificate, for people."""
        sizes = Table("", "before", "after", "kept", title="Cut")
        for name, before, after in (
            ("params", self.params_before, self.params),
            ("MACs", self.macs_before, self.macs),
        ):
            sizes.add_row(name, f"{before:,}", f"{after:,}", f"{after / before:.1%}")
        yield sizes
        proof = Table("compared", "precision", "batch", "error", "allowed", title="Certificate")
        for c in self.certificate.checks:
            row = (c.dtype, str(c.batch), f"{c.error:.1e}", f"{c.tolerance:.1e}")
            proof.add_row(f"gated and {c.what}", *row)
        yield proof


def export(model: nn.Module) -> Export:
    """Fold the gates, slice the closed slots out, and prove that nothing else has changed.

    The model is left as it is. All work is on the CPU, in eval mode.

    Raises:
        NotGated: the model carries no gates.
        CaptureError: torch.export can no longer follow it.
        CertificateError: the dense model differs from the gated one beyond rounding.
    """
    gates = gates_of(model)
    check_intact(model)
    gated = _copy(model).cpu().eval()
    plain = copy.deepcopy(gated)
    bank = detach(plain)
    dtype = next((p.dtype for p in plain.parameters() if p.is_floating_point()), torch.float32)
    example = cast(bank.example, dtype)
    analysis = _analysis(plain, example, gates.plan)
    plan = analysis.plan
    # In float64 throughout, so that the certificate sees the cut and not the rounding of a fold.
    z = _on_plan(plan, gates.plan, bank.double().z())
    kept = plan.kept(z > 0)
    named = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    constants = {n: t for n, t in analysis.captured.program.constants.items() if n in plan.tensors}
    stored = {n: t.detach() for n, t in {**named, **constants}.items() if isinstance(t, Tensor)}
    stored = {name: t for name, t in stored.items() if name in plan.tensors}
    exact = cut(plan, fold(plan, doubled(stored), z), kept)
    module = dense_module(analysis, exact, kept)
    batches = BATCHES if analysis.captured.dynamic else (analysis.captured.batch,)
    inputs = tuple(fresh_inputs(example, batch, seed) for seed, batch in enumerate(batches))
    certificate = compare(gated, module, inputs)
    module.to(dtype)
    state = _state_dict(plain, plan, exact)
    shapes = manifest(plain, state)
    shapes["rebuild"] = verdict(plain, module, shapes, state, inputs[0])
    program, dynamic = reexport(module, *widened(*example), analysis.captured.dynamic)
    cost = CostModel(plan)
    _check_count(module, cost.actual(z > 0, "params"))
    return Export(
        module=module,
        program=program,
        certificate=certificate,
        params=cost.actual(z > 0, "params"),
        macs=cost.actual(z > 0, "macs"),
        params_before=cost.dense("params"),
        macs_before=cost.dense("macs"),
        widths={a.name: (int(kept[a.slice].sum()), a.size) for a in plan.axes},
        dynamic=dynamic,
        _gated=gated,
        _inputs=inputs,
        _state=state,
        _manifest=shapes,
    )


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that keeps tensors of its last forward.

    The hook of torch's old ``weight_norm`` leaves the weight that it computed on the module, and
    torch copies no tensor in the middle of a graph; a forward without gradients leaves another.
    """
    try:
        return copy.deepcopy(model)
    except RuntimeError:
        args, kwargs = gates_of(model).example
        place = next(model.parameters()).device
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to(place), (args, kwargs))
        with evaluating(model), torch.no_grad():
            model(*args, **kwargs)
        return copy.deepcopy(model)


def _analysis(plain: nn.Module, example: Inputs, plan: Plan) -> Analysis:
    """The model's analysis, with a free batch size where that finds the plan it was gated by.

    Raises:
        UsageError: the model has changed since it was gated.
    """
    for dynamic in (True, False):
        captured: Captured = capture(plain, *example, dynamic_batch=dynamic)
        analysis = analyse(captured)
        if analysis.plan.select(plan.names).sites == plan.sites:
            return analysis
    raise UsageError(
        "The model's forward has changed since it was gated: its gates no longer fit. Ungate it "
        "(l0prune.ungate) and gate it again."
    )


def _state_dict(plain: nn.Module, plan: Plan, exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The cut tensors under every key of the model's own state_dict, in their own dtypes."""
    state = {}
    for key, old in plain.state_dict().items():
        name = plan.aliases.get(key, key)
        state[key] = exact[name].to(old.dtype) if name in exact else old
    return state


def _on_plan(plan: Plan, gated: Plan, z: Tensor) -> Tensor:
    """Gate values for every axis of ``plan``: 1 where ``gated`` has none."""
    full = torch.ones(plan.size, dtype=z.dtype)
    slices = {axis.name: axis.slice for axis in plan.axes}
    for axis in gated.axes:
        full[slices[axis.name]] = z[axis.slice].cpu()
    return full


def _check_count(module: nn.Module, predicted: int) -> None:
    found = sum(p.numel() for p in module.parameters())
    if found != predicted:
        raise CertificateError(
            f"The sliced model has {found:,} parameters where the plan predicts {predicted:,}: "
            "please report this with the model's code. Nothing was written."
        )
