"""The public export: from a gated model to a dense one, proven, in a line of stages."""

from __future__ import annotations

from torch import nn

from l0prune.cost.model import cost_of
from l0prune.exporting.certify.certificate import Certificate
from l0prune.exporting.certify.proof import check_own_dtypes, prove
from l0prune.exporting.own_class.choice import own_class
from l0prune.exporting.own_class.comparison import note_on
from l0prune.exporting.own_class.resizing import manifest
from l0prune.exporting.pieces import note_on_batches, pieces_of
from l0prune.exporting.result import Export, note_on_draws
from l0prune.exporting.slicing.chosen import chosen_slots
from l0prune.exporting.slicing.graph import dense_graphs
from l0prune.exporting.slicing.tensors import cut_state, cut_tensors
from l0prune.exporting.subject import subject_of, surveyed


def export(model: nn.Module) -> Export:
    """Fold the gates, slice the closed slots out, and prove that nothing else has changed.

    The model is left as it is. All work is on the CPU, in eval mode.

    Raises:
        NotGated: the model carries no gates.
        CaptureError: torch.export can no longer follow it.
        CertificateError: the dense model differs from the gated one beyond rounding.
    """
    subject = subject_of(model)
    parts = surveyed(subject)
    chosen, by_part = chosen_slots(subject, parts)
    tensors = cut_tensors(subject.plain, parts, by_part)
    graphs = dense_graphs(parts, by_part, tensors, subject.dtypes)
    own = own_class(subject.plain, chosen, tensors, graphs)
    cost = cost_of(parts.plan)
    params = cost.actual(chosen.is_open, "params")
    proven = prove(subject, parts, graphs, own, params)
    pieces = pieces_of(subject, parts, proven)
    check_own_dtypes(subject, proven)
    state = cut_state(subject.plain, parts.plan, tensors)
    reason = " ".join(filter(None, (v.reason for v in proven.comparisons.values())))
    training = " ".join(filter(None, (v.training for v in proven.comparisons.values())))
    note_on_own = note_on(proven.comparisons, parts.unused)
    rebuild = {"verified": not reason, "reason": reason, "training": training}
    return Export(
        module=proven.module,
        rebuilt=not reason,
        note="\n".join(
            filter(None, (note_on_own, note_on_batches(pieces), note_on_draws(parts.draws)))
        ),
        pieces=pieces,
        certificate=Certificate(proven.checks),
        params=params,
        macs=cost.actual(chosen.is_open, "macs"),
        params_before=cost.dense("params"),
        macs_before=cost.dense("macs"),
        widths={a.name: (int(chosen.kept[a.slice].sum()), a.size) for a in parts.plan.axes},
        _state=state,
        _manifest={**manifest(subject.plain, state, proven.changes), "rebuild": rebuild},
    )
