"""Public export: from a gated model to a dense one, as lists of passes over one value.

Each pass takes a ``Network`` and gives one, and has a file of its name or of what it works on. The
first list needs no capture; where it shows no model to be right, the second begins anew. ``verify``
is the only way out of both.
"""

from __future__ import annotations

from torch import nn

from l0prune.capture.threads import one_at_a_time
from l0prune.capture.weights import weights_of
from l0prune.errors import warn
from l0prune.exporting.capture_parts import capture_parts
from l0prune.exporting.certify.live import check_copy
from l0prune.exporting.certify.verify import verify, verify_class
from l0prune.exporting.network import Pass, attempt, copies_of, run
from l0prune.exporting.resize_class import check_class_alone, drop_branches, resize_class
from l0prune.exporting.result import Export
from l0prune.exporting.select import select
from l0prune.exporting.slice import slice_by_plan, slice_graphs, slice_tensors
from l0prune.exporting.write import write
from l0prune.gating.attaching import holder
from l0prune.gating.bank import Gates, asked_of

BY_PLAN: tuple[Pass, ...] = (  # of the gates: for models that keep their own class
    select,
    check_class_alone,
    slice_by_plan,
    resize_class,
    verify_class,
)
BY_CAPTURE: tuple[Pass, ...] = (
    capture_parts,
    select,
    slice_tensors,
    slice_graphs,
    resize_class,
    drop_branches,
    verify,
)


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
    network = copies_of(gated)
    unlooked = check_copy(gated, bank.example)
    weights = weights_of(network.plain)
    notes = ("" if gated is model else _note_on_wrapper(model, network.plain), unlooked)
    return write(
        attempt(BY_PLAN, network) or run(BY_CAPTURE, network),
        weights,
        notes,
        bank.facts.get("preprocessing"),
    )


def _warn_of_excess(bank: Gates) -> None:
    """Warn of gates that exceed the budget of the run that trained them."""
    asked = asked_of.get(bank)
    if asked is not None and (excess := asked(bank.open().cpu())):
        warn(
            "the gates of this model exceed the budget of the run that trained them: an "
            f"export has {excess}. The usual cause is an average (EMA) of your own that is not "
            "recognised as one, since its gates do not move towards the model's by one factor. "
            "Export the model that was trained, or give the average its gates: "
            "l0prune.gates(average).set_open(l0prune.gates(model).open()); where its state is "
            "loaded, leave l0prune_gates.log_alpha out"
        )


def _note_on_wrapper(model: nn.Module, gated: nn.Module) -> str:
    kinds = type(gated).__name__, type(model).__name__
    return "What was gated is exported: the {} in this {}.".format(*kinds)
