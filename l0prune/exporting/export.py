"""Public export: from a gated model to a smaller one, as lists of passes over one value.

Each pass takes a ``Network`` and returns one, and is in a file named after it or after its subject.
The first list needs no capture; where it proves no model right, the second starts again. Each list
ends in a comparison: ``verify_class`` or ``verify``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import nn

from l0prune.capture.threads import one_at_a_time
from l0prune.capture.weights import weights_of
from l0prune.errors import L0pruneError, UsageError, first_line, warn
from l0prune.exporting.capture_parts import capture_parts
from l0prune.exporting.certify.answers import BOTH, Verify
from l0prune.exporting.certify.dtypes import placed
from l0prune.exporting.certify.live import check_copy
from l0prune.exporting.certify.verify import verify, verify_class
from l0prune.exporting.network import Pass, attempt, copies_of, run
from l0prune.exporting.onnx.times import DenseNetwork
from l0prune.exporting.resize_class import check_class_alone, drop_branches, resize_class
from l0prune.exporting.result import Export
from l0prune.exporting.slice import select, slice_by_plan, slice_graphs, slice_tensors
from l0prune.exporting.write import write
from l0prune.gating.attaching import holder
from l0prune.gating.bank import Gates, asked_of
from l0prune.gating.gated_class import original_class
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage
from l0prune.running.device import device_of

BY_PLAN: tuple[Pass, ...] = (  # by the gates' plan: for models that keep their own class
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
@displayed
def export(model: nn.Module, *, verify: Verify = "float64", progress: bool = True) -> Export:
    """Remove closed slots from the weights, and verify that the outputs do not change.

    The model is left as it is. All work is on its device (on the CPU, if that has no float64).

    Args:
        model: gated, also inside a wrapper (compiled, DDP, a LightningModule).
        verify: the precision of the proof. ``"float64"`` shows faults of 1e-10 and more, and
            compares in float32, too. ``"float32"`` takes less time and shows faults of 1e-5 and
            more. Of a model that is captured in parts these are compared in both.
        progress: show progress on stderr.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a copy of the model computes something else than the model itself.
        CaptureError: torch.export can no longer follow it.
        CertificateError: the small model differs from the gated one beyond rounding.
        L0pruneError: there is not enough memory.
    """
    gated, bank = holder(model)
    _warn_of_excess(bank)
    try:
        with stage(f"exporting {original_class(gated).__name__}"):
            return _exported(model, gated, bank, verify)
    except torch.OutOfMemoryError as error:
        said = first_line(error)
    raise L0pruneError(_on_memory(gated, said))  # outside except: its tensors are freed by now


def _exported(model: nn.Module, gated: nn.Module, bank: Gates, verify: Verify) -> Export:
    network = replace(copies_of(gated), compared_in=_dtypes(verify))
    dense = DenseNetwork(network)
    unlooked = check_copy(gated, bank.example)
    weights = weights_of(network.plain)
    wrapper = "" if gated is model else _note_on_wrapper(model, network.plain)
    notes = (wrapper, unlooked, IN_FLOAT32 if verify == "float32" else "")
    result = write(
        attempt(BY_PLAN, network) or run(BY_CAPTURE, network),
        weights,
        notes,
        bank,
        dense,
    )
    quantizer = holder(network.gated)[1].quantizer
    if quantizer is not None:
        result.ranges = quantizer.for_file(result.plan, result.kept)
    placed(result.module, device_of(gated))
    return result


IN_FLOAT32 = (
    "It was compared in float32 alone, as was asked (verify='float32'): faults of less than 1e-5 "
    "of the output would not have been seen."
)


def _dtypes(verify: str) -> Sequence[torch.dtype]:
    if verify not in get_args(Verify):
        raise UsageError(f"verify is 'float64' or 'float32', not {verify!r}")
    return BOTH if verify == "float64" else BOTH[1:]


_PEAK = 1.3  # times the weights beside the model itself, if nearly all of them stay


def _on_memory(model: nn.Module, said: str) -> str:
    stored = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / 2**30
    return (
        f"There is not enough memory on {device_of(model)} for this export, which needs up to "
        f"{_PEAK * stored:.2g} GiB beside the model, {_PEAK} times its weights, and what its "
        "example takes. The model is as it was, and nothing was written. Free memory "
        "(optimizers, other models, torch.cuda.empty_cache()), gate with a smaller example, or "
        f'export on the CPU: l0prune.export(copy.deepcopy(model).to("cpu")). torch says: {said}'
    )


def _warn_of_excess(bank: Gates) -> None:
    """Warn of gates that exceed the budget of the run that trained them."""
    asked = asked_of.get(bank)
    if asked is not None and (excess := asked(bank.open().cpu())):
        warn(excess)


def _note_on_wrapper(model: nn.Module, gated: nn.Module) -> str:
    kinds = type(gated).__name__, type(model).__name__
    return "What was gated is exported: the {} in this {}.".format(*kinds)
