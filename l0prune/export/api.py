"""The public export: from a gated model to a dense one, proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from l0prune.axes import analyse
from l0prune.calls import Inputs, filled, record
from l0prune.capture import capture, evaluating, within
from l0prune.copies import copied
from l0prune.cost import CostModel
from l0prune.errors import CertificateError, UsageError
from l0prune.export.certificate import (
    Certificate,
    Check,
    cast,
    compare,
    compare_in_parts,
    is_valid,
)
from l0prune.export.dtypes import dtype_of, marked
from l0prune.export.inputs import trials
from l0prune.export.own_class import OwnClass, Reference, choose, gathers, own_class
from l0prune.export.program import dense_module, programs, reexport, reexport_part
from l0prune.export.resize import Changes, manifest
from l0prune.export.result import Export, Piece
from l0prune.export.slicing import cut, doubled, fold
from l0prune.export.stand_in import stand_in
from l0prune.export.standardised import with_statistics_taken
from l0prune.export.verdict import Verdict, note_on
from l0prune.parts import Part, Parts, parts_of
from l0prune.plan import Plan
from l0prune.rewrite import check_intact, detach, gates_of

BATCHES = (2, 5)


@dataclass
class _Cut:
    """A model before and after the cut, in float64 where it was cut.

    Attributes:
        gated: the gated model, on the CPU, in eval mode.
        own: what the model's own class may be at the new sizes.
        graphs: by path, the captured parts at the new sizes.
        gathers: why its own class cannot be right, where that is known beforehand.
    """

    gated: nn.Module
    own: OwnClass
    graphs: dict[str, GraphModule]
    gathers: str


@dataclass
class _Proven:
    """What is left to hand out once the certificate stands."""

    module: nn.Module
    pieces: list[Piece]
    checks: list[Check]
    verdicts: dict[str, Verdict]
    changes: Changes


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
    both = _Cut(gated, own, graphs, picks)
    cost = CostModel(parts.plan)
    predicted = cost.actual(is_open, "params")
    prove = _prove_whole if "" in both.graphs else _prove_parts
    proven = prove(both, parts, example, dtype, predicted)
    reason = " ".join(filter(None, (v.reason for v in proven.verdicts.values())))
    training = " ".join(filter(None, (v.training for v in proven.verdicts.values())))
    return Export(
        module=proven.module,
        rebuilt=not reason,
        note=note_on(proven.verdicts, parts.unused),
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


def _prove_whole(
    both: _Cut, parts: Parts, example: Inputs, dtype: torch.dtype, predicted: int
) -> _Proven:
    """A model of one piece: its graph must be right, its own class may be."""
    captured = parts.found[0].analysis.captured
    graph = both.graphs[""]
    _check_count(graph, parts, predicted)
    batches = BATCHES if captured.dynamic else (captured.batch,)
    against = partial(compare, both.gated, graph)
    inputs, certificate = _certified(both.gated, example, batches, against)
    own, changes, verdict = None, both.own.tries[0], Verdict(both.gathers)
    if not both.gathers:
        choice = choose(both.own, [Reference("", both.gated, inputs)])
        own, changes, verdict = choice.module, choice.changes, choice.verdicts[""]
    export = partial(reexport, dynamic=captured.dynamic)
    program, single, dynamic = programs(graph, dtype, example, export)
    return _Proven(
        module=graph if verdict.reason or own is None else own.to(dtype),
        pieces=[Piece("", program, single, dynamic, both.gated, inputs)],
        checks=[*certificate.checks, *verdict.checks],
        verdicts={"": verdict},
        changes=changes,
    )


def _prove_parts(
    both: _Cut, parts: Parts, example: Inputs, dtype: torch.dtype, predicted: int
) -> _Proven:
    """A model of which only islands were captured: their own classes, or else their graphs."""
    paths = list(both.graphs)
    # one candidate for all parts, so that what they share stays shared
    references = [Reference(p.path, both.graphs[p.path], [p.example]) for p in parts.found]
    choice = choose(both.own, references)
    dense, changes = choice.module, choice.changes
    for path, verdict in choice.verdicts.items():
        if verdict.reason:
            stand_in(dense, path, both.graphs[path])
            changes = {p: c for p, c in changes.items() if not f"{p}.".startswith(f"{path}.")}
    _check_count(dense, parts, predicted)
    against = partial(compare_in_parts, both.gated, dense, paths)
    try:
        inputs, certificate = _certified(both.gated, example, (None, None), against)
    except CertificateError as error:
        raise CertificateError(
            f"{error}\nOnly parts of this model could be captured ({', '.join(paths)}), and the "
            "code around them may read what was cut off them (a weight, a size). What it reads has "
            f"to stay: gate with exclude=... for those axes, such as exclude='{paths[0]}.*'."
        ) from error
    received: dict[str, list[Inputs]] = {path: [] for path in paths}
    for given in inputs:
        for call in record(both.gated, paths, cast(given, dtype)):
            received[call.path].append(filled(call.inputs))
    pieces, part_examples = [], {part.path: part.example for part in parts.found}
    for path, verdict in choice.verdicts.items():
        received[path] = received[path] or [part_examples[path]]
        part = dense.get_submodule(path)
        program, single, dynamic = programs(part, dtype, received[path][0], reexport_part)
        dynamic = dynamic and not verdict.reason  # a graph was captured at the example's sizes
        submodule = both.gated.get_submodule(path)
        pieces.append(Piece(path, program, single, dynamic, submodule, tuple(received[path])))
    dense.to(dtype)
    return _Proven(dense, pieces, list(certificate.checks), choice.verdicts, changes)


def _certified(
    gated: nn.Module,
    example: Inputs,
    batches: Sequence[int | None],
    against: Callable[[Sequence[Inputs]], list[Check]],
) -> tuple[tuple[Inputs, ...], Certificate]:
    """The certificate, and the inputs that it was given on: the first kind that the model takes.

    Raises:
        CertificateError: the comparison failed, or the model takes not even its example.
    """
    failures = []
    for inputs in trials(example, batches):
        try:
            return inputs, Certificate(tuple(against(inputs)))
        except CertificateError as error:
            if all(is_valid(gated, given) for given in inputs):
                raise
            failures.append(error)
    raise CertificateError(
        "There is nothing to compare the exported model with, so nothing was written: on the "
        "example that it was gated with, the gated model itself fails in float64 or gives nan. The "
        "usual causes are weights or gates that hold nan, and an example with which no output can "
        f"be computed. At first it was: {failures[0]}"
    ) from failures[-1]


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
                return Parts(analysis.plan, [Part("", analysis, example)], unused)
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


def _check_count(module: nn.Module, parts: Parts, predicted: int) -> None:
    """Raise CertificateError where the parameters left are not those that the plan counts."""
    named = module.named_parameters()
    found = sum(p.numel() for name, p in named if name not in parts.unused)
    if found != predicted:
        raise CertificateError(
            f"The sliced model has {found:,} parameters where the plan predicts {predicted:,}: "
            "please report this with the model's code. Nothing was written."
        )
