"""The public export: from a gated model to a dense one, proven, in a line of stages.

The model's own class at fewer slots, without a capture: what it computes is the proof.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from l0prune.capture.provenance import is_within, within
from l0prune.capture.threads import one_at_a_time
from l0prune.capture.weights import weights_of
from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import L0pruneError, L0pruneWarning
from l0prune.exporting.certify.certificate import Certificate
from l0prune.exporting.certify.live import check_copy
from l0prune.exporting.certify.proof import Proven, check_own_dtypes, prove, prove_class
from l0prune.exporting.handed_out import HandedOut, parameters_of, run_counted
from l0prune.exporting.own_class.choice import constants, manifest, own_class
from l0prune.exporting.own_class.comparison import note_on
from l0prune.exporting.own_class.sizes import unread_sizes
from l0prune.exporting.own_class.skipped_modules import around, ways_around
from l0prune.exporting.pieces import InParts, Whole, in_parts, whole
from l0prune.exporting.result import Export
from l0prune.exporting.slicing.chosen import Chosen, chosen_on, chosen_slots
from l0prune.exporting.slicing.graph import dense_graphs, narrowing
from l0prune.exporting.slicing.tensors import cut_by_plan, cut_state, cut_tensors
from l0prune.exporting.subject import Subject, subject_of, surveyed
from l0prune.gating.attaching import holder
from l0prune.gating.bank import Gates, asked_of
from l0prune.infer.parts import Parts
from l0prune.plan.cost import cost_of
from l0prune.plan.globs import listed
from l0prune.plan.plan import Plan
from l0prune.plan.switches import dead_parameters


def cut_class(subject: Subject, chosen: Chosen, parts: Parts | None = None) -> Proven | None:
    """The dense model of its own class; None where that is not shown to be the same function.

    Args:
        subject: before the cut.
        chosen: the slots that stay, all whose gates are open among them.
        parts: the model as it is captured, by which ways around branches that are gone are found.
    """
    plan, counted = subject.plan, counted_in(subject.plan)
    gone = [branch.name for branch in chosen.gone]
    if plan.parts != ("",) or "" in counted:
        return None
    if not subject.dtypes.are_one and not subject.exact_alone:
        return None
    if gone and parts is None:
        return None
    tensors = cut_by_plan(subject.plain, chosen)
    if tensors is None:
        return None
    own = own_class(subject.plain, chosen, tensors)
    predicted = round(cost_of(plan).amount(chosen.kept.double(), "params"))
    found = [] if parts is None else parts.found
    by_part = {part.path: chosen.on(part.analysis.plan) for part in found}
    ways = ways_around(subject.plain, found, by_part, gone)
    classes = (around(own, way, plan, drops=False) for way in ways)
    for each in classes if gone else [own]:
        proven = prove_class(subject, each, predicted, counted)
        if proven is not None:
            return proven
    return None


def counted_in(plan: Plan) -> Set[str]:
    """The parameters that count, by name: the others were not used in eval mode."""
    return {cost.tensor for cost in plan.costs if cost.unit == "params"}


@one_at_a_time()
def export(model: nn.Module) -> Export:
    """Fold the gates, slice the closed slots out, and prove that nothing else has changed.

    The model is left as it is. All work is on the CPU, in eval mode. Of a wrapper around the model
    that was gated (compiled, DDP, a LightningModule) that model is exported. Threads take turns.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a copy of the model computes something else than the model itself.
        CaptureError: torch.export can no longer follow it.
        CertificateError: the dense model differs from the gated one beyond rounding.
    """
    gated, bank = holder(model)
    _warn_of_excess(bank)
    subject = subject_of(gated)
    unlooked = check_copy(gated, bank.example)
    weights = weights_of(subject.plain)
    cut = _as_class(subject) or _as_graph(subject)
    proven = cut.proven
    handed_out = HandedOut.of(proven.module, subject.narrow(subject.example), cut.state)
    chosen, macs, uncounted = _counted(subject, cut, handed_out.macs)
    plan, cost = chosen.plan, cost_of(chosen.plan)
    reason = " ".join(filter(None, (v.reason for v in proven.comparisons.values())))
    training = " ".join(filter(None, (v.training for v in proven.comparisons.values())))
    around = "" if gated is model else _note_on_wrapper(model, subject.plain)
    images = bank.facts.get("preprocessing")
    unclear = "" if reason else _note_on_old_sizes(subject.plain, cut)
    rebuild = {"verified": not reason, "reason": reason, "training": training}
    note = note_on(proven.comparisons, _numbers_of(subject.plain, cut.unused))
    return Export(
        module=proven.module,
        rebuilt=not reason,
        certificate=Certificate(proven.checks),
        macs=macs,
        params_before=cost.dense("params"),
        macs_before=cost.dense("macs"),
        widths={
            axis.name: (int(chosen.kept[axis.slice].sum()), axis.size)
            for axis in plan.axes
            if axis.name in subject.plan.names
        },
        plan=plan,
        kept=chosen.kept,
        weights=weights,
        _made=cut.made,
        _note="\n".join(filter(None, (around, unlooked, note, unclear, uncounted))),
        _state=cut.state,
        _manifest={
            **manifest(subject.plain, cut.state, proven.changes, proven.layers),
            "constants": cut.constants,
            "dropped": list(proven.dropped),
            "rebuild": rebuild,
        },
        _handed_out=handed_out,
        _unused=frozenset(cut.unused),
        preprocessing=None if images is None else Preprocessing.model_validate(images),
    )


def _warn_of_excess(bank: Gates) -> None:
    """Warn of gates that exceed the budget of the run that trained them."""
    asked = asked_of.get(bank)
    if asked is not None and (excess := asked(bank.open().cpu())):
        warnings.warn(
            "l0prune: the gates of this model exceed the budget of the run that trained them: an "
            f"export has {excess}. The usual cause is an average (EMA) of your own that is not "
            "recognised as one, since its gates do not move towards the model's by one factor. "
            "Export the model that was trained, or give the average its gates: "
            "l0prune.gates(average).put(l0prune.gates(model).open()); where its state is loaded, "
            "leave l0prune_gates.log_alpha out",
            L0pruneWarning,
            stacklevel=4,
        )


def _counted(subject: Subject, cut: _Cut, found: float) -> tuple[Chosen, int, str]:
    """Compare what the plan counts with what the models are seen to hold and to multiply.

    The plan of a class is that of the gates, which may come out of a file: where it does not count
    what the gated model is seen to do, the model is captured anew and counted by that.

    Args:
        subject: before the cut.
        cut: what is handed out.
        found: its MACs for one example, as torch counts them.

    Returns:
        The slots on a plan that counts right, the MACs, and what is to be said of these numbers.
    """
    chosen, unused = cut.chosen, frozenset(cut.unused)
    _, before = run_counted(subject.gated, subject.example)
    held = parameters_of(subject.plain, unused)

    def is_right(unit: str, amount: float) -> bool:
        return cost_of(chosen.plan).dense(unit) == round(amount)

    if not cut.captured and not (is_right("params", held) and is_right("macs", before)):
        try:
            chosen = chosen_on(surveyed(subject, frees_batch=False).plan, subject)
        except L0pruneError as error:
            said = f"The MACs were counted when the model was gated, and cannot be now: {error}"
            return chosen, cost_of(chosen.plan).actual(chosen.is_open, "macs"), said
    cost = cost_of(chosen.plan)
    params, macs = (cost.actual(chosen.is_open, unit) for unit in ("params", "macs"))
    lines, real = [], parameters_of(cut.proven.module, unused)
    if real != params:
        lines.append(f"It holds {real:,} parameters, where its gates leave {params:,}.")
    if is_right("macs", before) and round(found) != macs:  # torch counts all of its operators
        lines.append(f"It takes {found:,.0f} MACs, where its gates leave {macs:,}.")
        macs = round(found)
    return chosen, macs, " ".join(lines)


def _numbers_of(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return how many numbers parameters hold, by name."""
    return {name: model.get_parameter(name).numel() for name in names}


def _note_on_wrapper(model: nn.Module, gated: nn.Module) -> str:
    kinds = type(gated).__name__, type(model).__name__
    return "What was gated is exported: the {} in this {}.".format(*kinds)


def _note_on_old_sizes(plain: nn.Module, cut: _Cut) -> str:
    """Name the attributes of the smaller model that may tell sizes from before the cut."""
    told, names = unread_sizes(plain, cut.chosen.plan, cut.chosen.kept)
    names += [within(path, name) for path, of in told.items() for name in of]
    changes, layers, old = cut.proven.changes, cut.proven.layers, []
    for name in names:
        path, _, attribute = name.rpartition(".")
        is_own = not any(is_within(path, each) for each, layer in layers.items() if layer.kind)
        if is_own and attribute not in changes.get(path, {}):
            old.append(f"{name} = {getattr(plain.get_submodule(path), attribute)}")
    if not old:
        return ""
    return (
        "These attributes are as before the cut, since it is not known which size they stand for: "
        f"{listed(old)}."
    )


@dataclass(frozen=True)
class _Cut:
    """What is handed out.

    Attributes:
        chosen: the slots that stayed.
        proven: the dense model and its proof.
        unused: parameters that eval mode does not use.
        state: the model's own state_dict at the new sizes.
        made: the programs of its parts, or what that of the whole will be made from.
        constants: shapes of tensors that were cut and are not in it.
        captured: whether the plan of the slots is that of a capture of now.
    """

    chosen: Chosen
    proven: Proven
    unused: Sequence[str]
    state: Mapping[str, Tensor]
    made: Whole | InParts
    constants: Mapping[str, Any]
    captured: bool = True


def _as_class(subject: Subject) -> _Cut | None:
    """Cut by the plan that the model was gated with, of its own class; None where that fails.

    This takes no capture: that the plan still is right, and the class, is what the proof shows.
    """
    plan = subject.plan
    chosen = chosen_on(plan, subject)
    proven = cut_class(subject, chosen)
    if proven is None:
        return None
    state = _state(subject, plan, proven)
    apart = constants(subject.plain, proven.tensors)
    counted = counted_in(plan)
    unused = [name for name, _ in subject.plain.named_parameters() if name not in counted]
    proven.tensors.clear()  # what is handed out lets go of float64 one by one
    return _Cut(chosen, proven, unused, state, whole(subject, proven, None, state), apart, False)


def _as_graph(subject: Subject) -> _Cut:
    """Cut as it is captured now: its graph, or parts, and its own class where that is right."""
    parts = surveyed(subject)
    is_whole = parts.plan.parts == ("",)
    chosen, by_part = chosen_slots(subject, parts)
    if is_whole:
        narrow = narrowing(parts.found[0].analysis, by_part[""].kept)
        subject = replace(subject, narrow=narrow)
    tensors = cut_tensors(subject.plain, parts, by_part)
    graphs = dense_graphs(parts, by_part, tensors, subject.dtypes)
    own = own_class(subject.plain, chosen, tensors)
    gone = [branch.name for branch in chosen.gone]
    ways = ways_around(subject.plain, parts.found, by_part, gone)
    classes = chain((around(own, way, parts.plan) for way in ways), [own])
    predicted = cost_of(parts.plan).actual(chosen.is_open, "params")
    proven = prove(subject, parts, graphs, classes, predicted)
    state = _state(subject, parts.plan, proven, gone)
    apart = constants(subject.plain, proven.tensors)
    for each in (tensors, proven.tensors):
        each.clear()  # what is handed out lets go of float64 one by one
    made: Whole | InParts
    if is_whole:
        made = whole(subject, proven, parts.found[0].analysis.captured, state)
    else:
        made = in_parts(subject, parts, proven)
    check_own_dtypes(subject, proven)
    return _Cut(chosen, proven, parts.unused, state, made, apart)


def _state(
    subject: Subject, plan: Plan, proven: Proven, gone: Collection[str] = ()
) -> dict[str, Tensor]:
    """The model's own state_dict at the new sizes, with what its layers gain."""
    state = cut_state(subject.plain, plan, proven.tensors)
    dead, held = dead_parameters(plan, gone), proven.module.state_dict()
    for name in state.keys() - held.keys():  # what nothing is left of is in no file
        if plan.aliases.get(name, name) in dead:
            del state[name]
    for path, layer in proven.layers.items():
        state |= {within(path, name): tensor.clone() for name, tensor in layer.buffers.items()}
    return state
