"""Last pass of an export: from a verified network to the ``Export`` that the user gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from l0prune.capture.example_inputs import tensors_in
from l0prune.capture.provenance import is_within, within
from l0prune.capture.weights import Weight
from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import L0pruneError
from l0prune.exporting.capture_parts import surveyed
from l0prune.exporting.certify.certificate import Certificate, Check
from l0prune.exporting.certify.verify import check_own_dtypes, counted_in
from l0prune.exporting.handed_out import HandedOut, parameters_of, run_counted
from l0prune.exporting.network import Network
from l0prune.exporting.onnx.times import DenseNetwork
from l0prune.exporting.own_class.choice import constants, manifest
from l0prune.exporting.own_class.comparison import note_on
from l0prune.exporting.own_class.sizes import unread_sizes
from l0prune.exporting.pieces import InParts, Whole, in_parts, whole
from l0prune.exporting.result import Export
from l0prune.exporting.slice import chosen_on
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.tensors import cut_state
from l0prune.files.earlier_cuts import remember, since_the_first
from l0prune.files.source_file import SourceFile, source_file_of
from l0prune.gating.bank import Gates
from l0prune.plan.cost import cost_of
from l0prune.plan.globs import listed
from l0prune.plan.plan import BITS
from l0prune.plan.switches import dead_parameters
from l0prune.running.device import device_of


def write(
    network: Network,
    weights: tuple[Weight, ...],
    notes: Sequence[str],
    bank: Gates,
    dense: DenseNetwork,
) -> Export:
    """Make the ``Export`` of a verified network; programs and files are made on demand.

    The float64 tensors of the network are freed if the caller keeps no other reference to it.

    Raises:
        CaptureError: a program of a part cannot be made.
        CertificateError: the model does not run in its own dtypes.
    """
    state, unused = _state(network), _unused(network)
    apart = constants(network.plain, network.tensors)
    network = replace(network, tensors={})  # the model frees its float64 tensors one by one
    made = _programs(network)
    marks = made.marks if isinstance(made, Whole) else {}
    handed_out = HandedOut.of(network.small, network.narrow(network.example), marks)
    chosen, macs, uncounted = _counted(network, unused, handed_out.macs)
    plan, cost = chosen.plan, cost_of(chosen.plan)
    comparisons = network.comparisons.values()
    reason = " ".join(filter(None, (each.reason for each in comparisons)))
    training = " ".join(filter(None, (each.training for each in comparisons)))
    unclear = "" if reason else _note_on_old_sizes(network)
    origin = source_file_of(network.plain)
    sizes = {name: network.plain.get_parameter(name).numel() for name in unused}
    note, images = note_on(network.comparisons, sizes), bank.facts.get("preprocessing")
    cut = {
        **manifest(network.plain, state, network.changes, network.layers),
        "constants": apart,
        "dropped": dict(network.dropped),
        "rebuild": {"verified": not reason, "reason": reason, "training": training},
    }
    if not reason:
        cut = since_the_first(network.plain, cut)
        remember(network.small, cut)
    return Export(
        module=network.small,
        rebuilt=not reason,
        certificate=Certificate((*network.checks, *_checks_of(origin))),
        macs=macs,
        params_before=cost.dense("params"),
        macs_before=cost.dense("macs"),
        widths={
            axis.name: (int(chosen.kept[axis.slice].sum()), axis.size)
            for axis in plan.axes
            if axis.name in network.plan.names and axis.kind != BITS
        },
        plan=plan,
        kept=chosen.kept,
        weights=weights,
        _made=made,
        _note="\n".join(filter(None, (*notes, note, unclear, uncounted))),
        _state=state,
        _manifest=cut,
        _handed_out=handed_out,
        _unused=frozenset(unused),
        _dense=dense,
        asked=bank.asked,
        source=origin,
        preprocessing=None if images is None else Preprocessing.model_validate(images),
    )


def _checks_of(origin: SourceFile | None) -> tuple[Check, ...]:
    """Comparison of the dense network with the ONNX file that it was converted from, if any."""
    if origin is None:
        return ()
    return (Check("source", "float32", origin.batch, origin.error, origin.tolerance),)


def _unused(network: Network) -> Sequence[str]:
    """Return the parameters that eval mode does not use, by name."""
    if network.parts is not None:
        return network.parts.unused
    counted = counted_in(network.plan)
    return [name for name, _ in network.plain.named_parameters() if name not in counted]


def _programs(network: Network) -> Whole | InParts:
    """Return the programs of a model's parts, or the recipe for the program of a whole model."""
    if network.parts is None:
        made: Whole | InParts = whole(network, None)
    elif "" in network.graphs:
        made = whole(network, network.parts.found[0].analysis.captured)
    else:
        made = in_parts(network)
    check_own_dtypes(network)
    return made


def _state(network: Network) -> dict[str, Tensor]:
    """Return the model's state_dict at the new sizes, with the buffers that its layers gain.

    Tensors that the small module holds are without values, which are read there when needed.
    """
    plan, held = network.selected.plan, network.small.state_dict()
    state = cut_state(network.plain, plan, network.tensors, held)
    dead = dead_parameters(plan, network.gone)
    for name in state.keys() - held.keys():  # removed parameters are in no file
        if plan.aliases.get(name, name) in dead:
            del state[name]
    for path, layer in network.layers.items():
        state |= {within(path, name): tensor.clone() for name, tensor in layer.buffers.items()}
    return state


def _counted(network: Network, unused: Sequence[str], found: float) -> tuple[KeptSlots, int, str]:
    """Check the plan's parameters and MACs against those counted on the models.

    Without a capture the plan is the gates', which may come from a file: if it does not give the
    gated model's counts, the model is captured anew and counted by the new plan.

    Returns:
        The slots on a plan that counts right, the MACs, and a note on these numbers.
    """
    chosen, left_out = network.selected, frozenset(unused)
    held = parameters_of(network.plain, left_out)

    def is_right(unit: str, amount: float) -> bool:
        return cost_of(chosen.plan).dense(unit) == round(amount)

    before = _macs_seen(network)
    if before is None or not is_right("macs", before):
        _, before = run_counted(network.gated, network.example, device_of(network.gated))

    if network.parts is None and not (is_right("params", held) and is_right("macs", before)):
        try:
            chosen = chosen_on(surveyed(network, frees_batch=False).plan, network)
        except L0pruneError as error:
            said = f"The MACs were counted when the model was gated, and cannot be now: {error}"
            return chosen, cost_of(chosen.plan).actual(chosen.is_open, "macs"), said
    cost = cost_of(chosen.plan)
    params, macs = (cost.actual(chosen.is_open, unit) for unit in ("params", "macs"))
    lines, real = [], parameters_of(network.small, left_out)
    if real != params:
        lines.append(f"It holds {real:,} parameters, where its gates leave {params:,}.")
    if is_right("macs", before) and round(found) != macs:  # torch counts all of its operators
        lines.append(f"It takes {found:,.0f} MACs, where its gates leave {macs:,}.")
        macs = round(found)
    return chosen, macs, " ".join(lines)


def _macs_seen(network: Network) -> float | None:
    """Return the MACs of the gated model on inputs like the example, if it was run on such."""
    shapes = [tensor.shape for tensor in tensors_in(network.example)]
    for answer in network.answers.get("", ()):
        if [tensor.shape for tensor in tensors_in(answer.inputs)] == shapes:
            return answer.macs
    return None


def _note_on_old_sizes(network: Network) -> str:
    """Return a note on attributes of the small model that may hold sizes from before the cut."""
    plain, chosen = network.plain, network.selected
    told, names = unread_sizes(plain, chosen.plan, chosen.kept)
    names += [within(path, name) for path, of in told.items() for name in of]
    ours = [path for path, layer in network.layers.items() if layer.kind]
    old = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        is_own = not any(is_within(path, each) for each in ours)
        if is_own and attribute not in network.changes.get(path, {}):
            old.append(f"{name} = {getattr(plain.get_submodule(path), attribute)}")
    if not old:
        return ""
    return (
        "These attributes are as before the cut, since it is not known which size they stand for: "
        f"{listed(old)}."
    )
