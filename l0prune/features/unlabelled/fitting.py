"""The choice of slots by what each is worth to the outputs, and weights that make up for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.features.unlabelled.compensate import Calibration, Compensation, calibration
from l0prune.features.unlabelled.division import Division
from l0prune.plan.limits import LimitsLike
from l0prune.plan.measures import Source
from l0prune.plan.targets import TARGET
from l0prune.selection.fit import blocks_for, bounds_of, fit
from l0prune.selection.fitting import Widths


def fit_compensated(
    model: nn.Module, data: Any, budget: LimitsLike | None, **options: Any
) -> dict[str, float]:
    """Run ``fit`` with compensation, and return the export's amounts.

    Raises:
        UsageError: there is no data.
    """
    if data is None:
        raise UsageError("compensate=True takes inputs to compensate with: give data")
    with calibration(model, data) as found:
        division = found.division() if options["scores"] is None and budget is not None else None
        counts, gain = fit_and_compensate(found, budget, division, **options)
        gain.warn_if_useless()
        return counts


def fit_and_compensate(
    found: Calibration,
    budget: LimitsLike | None,
    division: Division | None,
    *,
    scores: Tensor | None = None,
    round_to: Widths = "auto",
    target: str = TARGET,
    latency: Source | None = None,
    **options: Any,
) -> tuple[dict[str, float], Compensation]:
    """Cut a network, by the scores of a division if there is one, and compensate it.

    Returns:
        What ``fit`` returns, and the gain of the compensation.
    """
    if division is not None:
        wanted = bounds_of(found.root, budget, latency)
        blocks = blocks_for(found.gates.plan, wanted, round_to, latency, target=target)
        scores = division.scores_for(wanted, blocks)
    options |= {"round_to": round_to, "target": target, "latency": latency}
    counts = fit(found.root, budget, scores, **options)
    return counts, found.compensate()
