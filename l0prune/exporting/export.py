"""The public export: from a gated model to a dense one, proven."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from l0prune.capture.capture import capture
from l0prune.capture.copying import copied
from l0prune.capture.modes import evaluating
from l0prune.capture.provenance import within
from l0prune.capture.recording import Inputs
from l0prune.cost.model import CostModel
from l0prune.errors import UsageError
from l0prune.exporting.certify.certificate import Certificate, cast
from l0prune.exporting.certify.proof import Cut, prove
from l0prune.exporting.own_class.choice import gathers, own_class
from l0prune.exporting.own_class.comparison import note_on
from l0prune.exporting.own_class.resizing import manifest
from l0prune.exporting.result import Export
from l0prune.exporting.slicing.dtypes import dtype_of, marked
from l0prune.exporting.slicing.program import dense_module
from l0prune.exporting.slicing.standardised_weights import with_statistics_taken
from l0prune.exporting.slicing.tensors import cut, doubled, fold
from l0prune.gating.attaching import check_intact, detach, gates_of
from l0prune.infer.build import analyse
from l0prune.infer.parts import Part, Parts, parts_of
from l0prune.plan.plan import Plan


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
    plain = copied(gated)
    bank = detach(plain)
    dtype = dtype_of(plain)
    example = cast(bank.example, dtype)
    parts = _parts(plain, example, gates.plan)
    # In float64 throughout, so that the certificate sees the cut and not the rounding of a fold.
    z = bank.double().z()
    full = {p.path: _on_plan(p.analysis.plan, gates.plan, z) for p in parts.found}
    tensors: dict[str, Tensor] = {}
    for part in parts.found:
        tensors |= _cut(plain, part, full[part.path])
    graphs = {p.path: _graph(p, tensors, full[p.path], dtype) for p in parts.found}
    state = _state_dict(plain, parts.plan, tensors)
    is_open = _on_plan(parts.plan, gates.plan, z) > 0
    kept = parts.plan.kept(is_open)
    own = own_class(plain, parts.plan, kept, tensors, state)
    picks = gathers(graphs[""], parts.plan, is_open) if "" in graphs else ""
    both = Cut(gated, own, graphs, picks)
    cost = CostModel(parts.plan)
    predicted = cost.actual(is_open, "params")
    proven = prove(both, parts, example, dtype, predicted)
    reason = " ".join(filter(None, (v.reason for v in proven.comparisons.values())))
    training = " ".join(filter(None, (v.training for v in proven.comparisons.values())))
    return Export(
        module=proven.module,
        rebuilt=not reason,
        note=note_on(proven.comparisons, parts.unused),
        pieces=tuple(proven.pieces),
        certificate=Certificate(tuple(proven.checks)),
        params=predicted,
        macs=cost.actual(is_open, "macs"),
        params_before=cost.dense("params"),
        macs_before=cost.dense("macs"),
        widths={a.name: (int(kept[a.slice].sum()), a.size) for a in parts.plan.axes},
        _state=state,
        _manifest={
            **manifest(plain, state, proven.changes),
            "rebuild": {"verified": not reason, "reason": reason, "training": training},
        },
    )


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy, also of a model that keeps tensors of its last forward.

    The hook of torch's old ``weight_norm`` leaves the weight that it computed on the module, and
    torch copies no tensor in the middle of a graph; a forward without gradients leaves another.
    """
    try:
        return copied(model)
    except RuntimeError:
        args, kwargs = gates_of(model).example
        place = next(model.parameters()).device
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to(place), (args, kwargs))
        with evaluating(model), torch.no_grad():
            model(*args, **kwargs)
        return copied(model)


def _parts(plain: nn.Module, example: Inputs, gated_by: Plan) -> Parts:
    """The model's parts, the whole with a free batch size where that finds the same plan.

    Raises:
        UsageError: the model has changed since it was gated.
    """
    if gated_by.parts == ("",):
        for dynamic in (True, False):
            analysis = analyse(capture(plain, *example, dynamic_batch=dynamic))
            if _same_gates(analysis.plan, gated_by):
                unused = analysis.captured.unused
                return Parts(analysis.plan, example, [Part("", analysis, example)], unused)
    else:
        parts = parts_of(plain, example)
        if _same_gates(parts.plan, gated_by):
            return parts
    raise UsageError(
        "The gates do not fit what a copy of the model computes. Either its forward has changed "
        "since it was gated: ungate it (l0prune.ungate) and gate it again. Or its code reaches the "
        "model by a global or another object, where a copy still finds the original: let it use "
        "self, or what self holds."
    )


def _same_gates(plan: Plan, gated_by: Plan) -> bool:
    """Do both have the same parts, and gates at the same places in whatever order?"""
    sites = plan.select(gated_by.names).sites
    return plan.parts == gated_by.parts and set(sites) == set(gated_by.sites)


def _cut(plain: nn.Module, part: Part, z: Tensor) -> dict[str, Tensor]:
    """The stored tensors of a part, folded and cut, in float64, by name."""
    plan = part.analysis.plan
    constants = part.analysis.captured.program.constants
    stored = {within(part.path, name): value for name, value in constants.items()}
    stored |= {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    tensors = {n: t.detach() for n, t in stored.items() if n in plan.tensors}
    kept = plan.kept(z > 0)
    folded = fold(plan, doubled(tensors), z)
    return cut(plan, with_statistics_taken(part.analysis, folded, kept), kept)


def _graph(part: Part, tensors: Mapping[str, Tensor], z: Tensor, dtype: torch.dtype) -> GraphModule:
    """The captured graph of a part at its new sizes, of a model in ``dtype``."""
    graph = dense_module(part.analysis, tensors, part.analysis.plan.kept(z > 0))
    return marked(graph, dtype)


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
    slices = {axis.name: axis.slice for axis in gated.axes}
    for axis in plan.axes:
        if axis.name in slices:
            full[axis.slice] = z[slices[axis.name]].cpu()
    return full
