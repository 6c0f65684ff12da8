"""``l0prune.shrink``: make a network smaller from some of its inputs, without labels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied, copied_around
from l0prune.capture.model_checks import evaluating
from l0prune.data.dataset import as_arguments, map_tensors
from l0prune.errors import UsageError, warn
from l0prune.exporting.export import export
from l0prune.exporting.outcome import Step
from l0prune.exporting.result import Export
from l0prune.gating.attaching import gates_of
from l0prune.gating.gate import gate
from l0prune.plan.limits import LimitsLike, limits
from l0prune.plan.measures import Source
from l0prune.plan.numbers import check_whole, tolerance_of
from l0prune.plan.targets import TARGET, check_target
from l0prune.running.device import device_of, on_device
from l0prune.running.sources import with_pseudo_labels
from l0prune.selection.compensate import (
    BATCH_SIZE,
    SAMPLES,
    Calibration,
    Fidelity,
    calibration,
    fidelity,
    inputs_of,
)
from l0prune.selection.division import Division
from l0prune.selection.fit import check_request, fit_and_compensate
from l0prune.selection.fitting import Widths
from l0prune.timing.measure import measure
from l0prune.timing.table import LatencyTable
from l0prune.training import run
from l0prune.training.checkpoint import put_back, snapshot

_RATE = 1e-4  # learning rate of recovery: the usual 1e-3 would leave the nearby minimum
_UNDONE = (
    "the training on the network's own answers ended farther from them on inputs that were held "
    "out, so it was undone: give more inputs (samples), or fewer epochs"
)
_TRIED = 5  # sizes that are tried for a tolerance
_SMALLEST = 0.05  # smallest share of the MACs that is tried for a tolerance


def shrink(
    model: nn.Module,
    inputs: Any,
    budget: LimitsLike | None = None,
    *,
    tolerance: float | str | None = None,
    recover: int = 0,
    round_to: Widths = "auto",
    target: str = TARGET,
    latency: Source | None = None,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
    **gating: Any,
) -> Export:
    """Return a smaller network that computes nearly what a network does, from some of its inputs.

    The budget is divided over the layers by what each is worth to the outputs, slots are cut, and
    the weights that are left compensate for those that went. The export is proven to compute what
    the compensated network does; ``fidelity`` says how near that is to the network itself.

    Args:
        model: any network that ``gate`` takes. It stays as it is.
        inputs: a tensor or a mapping of examples, or what ``finetune`` takes.
        budget: what may be left, as for ``fit``: ``"macs=0.5"``, ``"latency=0.5"``.
        tolerance: in place of a budget: the smallest network of which ``"1%"`` or 0.01 of held-out
            examples get another class, or of the outputs' variance is error without classes.
        recover: epochs in which the smaller network then learns the answers of the original one;
            undone where it ends farther away on held-out inputs.
        round_to, target: see ``fit``.
        latency: a table of times for a budget in latency; one is measured where none is given.
        samples: inputs that are used, at most.
        batch_size: examples at a time, where the source lets us choose.
        device: see ``Settings``.
        seed: of the choice of inputs.
        **gating: as for ``gate``. Without ``branches`` whole layers stay.

    Raises:
        UsageError: neither budget nor tolerance is given, or both; or it cannot be met.
        DataError: there are too few inputs, or they do not fit the model.
        L0pruneError: as for ``gate``, ``fit`` and ``export``.
    """
    check_whole("recover", recover, 0)
    if (budget is None) == (tolerance is None):
        raise UsageError("give either a budget (budget='macs=0.5') or a tolerance (tolerance='1%')")
    allowed = None if tolerance is None else tolerance_of(tolerance)
    work = copied(model)
    model = copied_around(model)  # a forward may write into its module
    first, _ = next(inputs_of(inputs, 2, 2, torch.device("cpu"), seed))
    two = map_tensors(first, lambda tensor: tensor[:2].cpu() if tensor.dim() else tensor)
    gate(work, *as_arguments(two), **{"branches": False, **gating})
    widths: Any = {"round_to": round_to, "target": check_target(target)}
    if budget is not None:
        latency = measure(work) if latency is None and _is_about_time(budget) else latency
        widths["latency"] = latency
        check_request(work, budget, **widths, kinds=(), scored=True, data=False)
    curve: list[Step] = []
    with calibration(work, inputs, samples, batch_size, device, seed) as found:
        division = found.division()
        if allowed is not None:
            curve, before = _smallest(found, division, allowed, widths)
        else:
            before = fit_and_compensate(found, budget, division, **widths)[1].after
        judged, place = found.judged, device_of(found.root)
    if recover:
        task = with_pseudo_labels(inputs, model, device=device, held_out=judged)
        compensated = snapshot(work)
        run.finetune(work, task, learn=False, epochs=recover, lr=_RATE, device=device, seed=seed)
        if _nearness(model, work, judged, place).error > before.error:
            put_back(work, compensated)
            warn(_UNDONE)
    if allowed is not None:
        gates_of(work).asked = (f"tolerance={allowed:g}",)
    result = export(work)
    nearness = _nearness(model, copied_around(result.module), judged, place)
    result.fidelity, result.curve = nearness, tuple(curve)
    return result


def _nearness(
    model: nn.Module, other: nn.Module, judged: list[Any], place: torch.device
) -> Fidelity:
    """Return the fidelity of another network's outputs to a model's, on a device."""
    with evaluating(model), evaluating(other), on_device(model, place), on_device(other, place):
        return fidelity(model, other, judged)


def _is_about_time(budget: LimitsLike) -> bool:
    return any(limit.measure == LatencyTable.name for limit in limits(budget))


def _smallest(
    found: Calibration, division: Division, allowed: float, widths: dict[str, Any]
) -> tuple[list[Step], Fidelity]:
    """Keep the smallest network within the tolerance; return the tried sizes and its fidelity.

    Raises:
        UsageError: no size that was tried is within the tolerance.
    """
    whole = snapshot(found.root)
    best: tuple[dict[str, Tensor], Fidelity] | None = None
    steps = list[Step]()
    low, high = math.log(_SMALLEST), 0.0
    for _ in range(_TRIED):
        share = math.exp((low + high) / 2)
        put_back(found.root, whole)
        try:
            after = fit_and_compensate(found, f"macs={share:.4f}", division, **widths)[1].after
        except UsageError:  # no cut gets down to this share
            low = math.log(share)
            continue
        steps.append(Step(share, after))
        far = (
            after.error if not found.has_classes or after.agreement is None else 1 - after.agreement
        )
        if far <= allowed:
            high = math.log(share)
            best = snapshot(found.root), after
        else:
            low = math.log(share)
    if best is None:
        nearest = max(steps, key=lambda step: step.share, default=None)
        said = f" With {nearest.share:.0%} of the MACs: {nearest.fidelity}." if nearest else ""
        raise UsageError(
            f"no smaller network was found whose outputs stay within {allowed:.1%}.{said} Allow "
            "more, or give more inputs"
        )
    put_back(found.root, best[0])
    return sorted(steps, key=lambda step: step.share), best[1]
