"""``l0prune.shrink``: make a network smaller from some of its inputs, without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied, copied_around
from l0prune.capture.model_checks import evaluating
from l0prune.data.dataset import as_arguments, map_tensors
from l0prune.errors import UsageError, warn
from l0prune.exporting.export import export
from l0prune.exporting.result import Export
from l0prune.features.unlabelled.compensate import (
    BATCH_SIZE,
    SAMPLES,
    Calibration,
    calibration,
)
from l0prune.features.unlabelled.fidelity import Classes, Fidelity, fidelity
from l0prune.features.unlabelled.fitting import fit_and_compensate
from l0prune.gating.attaching import gates_of
from l0prune.gating.gate import gate
from l0prune.plan.limits import LimitsLike, limits
from l0prune.plan.measures import Latency, Source
from l0prune.plan.numbers import check_whole, tolerance_of
from l0prune.plan.targets import TARGET, check_target
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage, steps
from l0prune.running.device import device_of, on_device
from l0prune.running.inputs import inputs_for, inputs_of
from l0prune.running.sources import with_pseudo_labels
from l0prune.running.task import Task
from l0prune.selection.fit import check_request, table_if_needed
from l0prune.selection.fitting import Widths
from l0prune.training import run
from l0prune.training.checkpoint import put_back, snapshot

_RATE = 3e-4  # learning rate of recovery: the usual 1e-3 often leaves the nearby minimum
_UNDONE = (
    "the training on the network's own answers ended farther from them on inputs that were held "
    "out, so it was undone: give more inputs (samples), or fewer epochs"
)
_WORSE = (
    "{}. Give a larger budget, more inputs (samples), or epochs of training on the network's own "
    "answers (recover); allow_worse_than_mean (--allow-worse-than-mean) returns it nevertheless"
)
MEASURES = "macs", Latency.name  # what a tolerance can spare
_TRIED = 5  # sizes that are tried for a tolerance
_SMALLEST = 0.05  # smallest share that is tried for a tolerance


@displayed
def shrink(
    model: nn.Module,
    inputs: Any,
    budget: LimitsLike | None = None,
    *,
    tolerance: float | str | None = None,
    judge: Callable[[nn.Module], float] | None = None,
    measure: str = MEASURES[0],
    recover: int | Mapping[str, Any] = 0,
    round_to: Widths = "auto",
    target: str = TARGET,
    latency: Source | Callable[[nn.Module], Source | None] | None = None,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
    class_dim: int | None = None,
    allow_worse_than_mean: bool = False,
    progress: bool = True,
    **gating: Any,
) -> Export:
    """Return a smaller network that computes nearly what a network does, from some of its inputs.

    The budget is divided over the layers by what each is worth to the outputs, slots are cut, and
    the remaining weights compensate for the removed ones. The export is proven to compute what
    the compensated network does; ``fidelity`` says how near that is to the network itself.

    Args:
        model: any network that ``gate`` takes. It stays as it is.
        inputs: a tensor of examples, a mapping or tuple of the forward's arguments, batches of
            such, or what ``finetune`` takes.
        budget: what may be left, as for ``fit``: ``"macs=0.5"``, ``"latency=0.5"``.
        tolerance: in place of a budget: the smallest network of which ``"1%"`` or 0.01 of held-out
            examples get another class, or of the outputs' variance is error without classes.
        judge: with a tolerance, a function of a network that says in its place how much worse that
            is by a measure of your own, as ``lambda network: 1 - right(network) / right(model)``.
        measure: what is spared under a tolerance: ``"macs"``, or ``"latency"`` for the fastest.
        recover: epochs in which the smaller network then learns the answers of the original one, or
            settings of ``finetune`` for that, as ``{"epochs": 8, "lr": 1e-3}``; undone where it
            ends farther away on held-out inputs. Under a tolerance each network that is tried
            learns before it is judged.
        round_to, target: see ``fit``.
        latency: a table of times for a budget or tolerance in latency, or a function that makes one
            of the gated model; one is measured where none is given.
        samples: inputs that are used, at most.
        batch_size: examples at a time, where the source lets us choose.
        device: see ``Settings``.
        seed: of the choice of inputs.
        class_dim: the dim of the outputs that holds the scores of classes, as -1; by default what
            labels, probabilities or the output's name say, of two or four dims dim 1.
        allow_worse_than_mean: return a network, too, whose outputs are farther from the original's
            than their mean is.
        progress: show progress on stderr.
        **gating: as for ``gate``, such as ``outputs``: those that matter. Without ``branches``
            whole layers stay.

    Raises:
        UsageError: neither budget nor tolerance is given, or both, or a judge without a tolerance;
            or it cannot be met; or the network is worse than the mean of the original's outputs.
        DataError: there are too few inputs, or they do not fit the model.
        L0pruneError: as for ``gate``, ``fit`` and ``export``.
    """
    settings = dict(recover) if isinstance(recover, Mapping) else {"epochs": recover}
    check_whole("recover", settings.get("epochs", 1), 0)
    if (budget is None) == (tolerance is None):
        raise UsageError("give either a budget (budget='macs=0.5') or a tolerance (tolerance='1%')")
    if judge is not None and tolerance is None:
        raise UsageError("judge decides which networks are within a tolerance: give one, too")
    if measure not in MEASURES:
        raise UsageError(f"measure is {' or '.join(MEASURES)}, not {measure!r}")
    allowed = None if tolerance is None else tolerance_of(tolerance)
    work, inputs = copied(model), inputs_for(model, inputs)
    users, model = model, copied_around(model)  # a forward may write into its module
    first, _ = next(inputs_of(inputs, 2, 2, torch.device("cpu"), seed))
    two = map_tensors(first, lambda tensor: tensor[:2].cpu() if tensor.dim() else tensor)
    gate(work, *as_arguments(two), **{"branches": False, **gating})
    widths: Any = {"round_to": round_to, "target": check_target(target)}
    table = latency(work) if callable(latency) else latency
    wanted = limits(f"{measure}=1" if budget is None else budget)
    widths["latency"] = table_if_needed(work, wanted, table, target)
    if budget is not None:
        check_request(work, budget, **widths, kinds=(), scored=True, data=False)
    curve: list[Step] = []
    with calibration(work, inputs, samples, batch_size, device, seed, class_dim) as found:
        outputs = found.gates.outputs
        held_out = _Judge(found.judged, found.classes, device_of(found.root), outputs)
        division, task = found.division(), None
        if settings.get("epochs", 1):
            task = with_pseudo_labels(
                inputs, model, device=device, held_out=held_out.batches, outputs=outputs
            )

        def cut(budget: LimitsLike | None, **options: Any) -> Fidelity:
            after = fit_and_compensate(found, budget, division, **options, **widths)[1].after
            if task is None:
                return after
            given = {"lr": _RATE, "device": device, "seed": seed, **settings}
            return _recovered(work, after, task, partial(held_out.nearness, model, work), given)

        if allowed is not None:
            curve, before = _smallest(found, cut, allowed, measure, judge)
        else:
            before = cut(budget)
    if budget is not None and before.is_useless and not allow_worse_than_mean:
        raise UsageError(_WORSE.format(before.uselessness))
    if allowed is not None:
        gates_of(work).asked = (f"tolerance={allowed:g}",)
    result = export(work)
    result.measure_rounding_of(users)
    result.fidelity = held_out.nearness(model, copied_around(result.module))
    result.curve = tuple(curve)
    return result


def _recovered(
    work: nn.Module,
    compensated: Fidelity,
    task: Task,
    nearness: Callable[[], Fidelity],
    settings: Mapping[str, Any],
) -> Fidelity:
    """Let a cut network learn, if it ends nearer than it was; return its fidelity."""
    before = snapshot(work)
    with torch.enable_grad():
        run.finetune(work, task, **{**settings, "learn": False})
    after = nearness()
    if after.error <= compensated.error:
        return after
    put_back(work, before)
    warn(_UNDONE)
    return compensated


@dataclass(frozen=True, slots=True)
class Step:
    """A network that ``shrink`` tried for a tolerance.

    Attributes:
        share: the requested share of the measure.
        measure: what is spared.
        fidelity: nearness of its outputs to the original's.
        far: what was compared with the tolerance.
    """

    share: float
    measure: str
    fidelity: Fidelity
    far: float

    def __str__(self) -> str:
        """Return how far it is as text."""
        return f"{self.far:.1%} from the original ({self.fidelity})"


@dataclass(frozen=True, slots=True)
class _Judge:
    """Measure of the nearness of two networks, on held-out inputs."""

    batches: list[Any]
    classes: Classes
    place: torch.device
    outputs: Sequence[str]

    def nearness(self, model: nn.Module, other: nn.Module) -> Fidelity:
        """Return the fidelity of another network's outputs to a model's, on the device."""
        place = self.place
        with evaluating(model), evaluating(other), on_device(model, place), on_device(other, place):
            return fidelity(model, other, self.batches, self.classes.dim_of, self.outputs)


@stage("looking for the smallest network within the tolerance")
def _smallest(
    found: Calibration,
    cut: Callable[..., Fidelity],
    allowed: float,
    measure: str,
    judge: Callable[[nn.Module], float] | None,
) -> tuple[list[Step], Fidelity]:
    """Keep the smallest network within the tolerance; return the tried sizes and its fidelity.

    Raises:
        UsageError: no size that was tried is within the tolerance.
    """
    whole = snapshot(found.root)
    best: tuple[dict[str, Tensor], Fidelity] | None = None
    tried = list[Step]()
    low, high = math.log(_SMALLEST), 0.0
    for _ in steps(range(_TRIED)):
        share = math.exp((low + high) / 2)
        put_back(found.root, whole)
        try:
            budget = f"{measure}={share:.4f}"  # it is a step of the search: nothing is timed
            after = cut(budget, observe=False)
        except UsageError:  # no cut gets down to this share
            low = math.log(share)
            continue
        if judge is not None:
            far = judge(found.root)
        elif found.classes.are_known and after.agreement is not None:
            far = 1 - after.agreement
        else:
            far = after.error
        tried.append(Step(share, measure, after, far))
        if far <= allowed:
            high = math.log(share)
            best = snapshot(found.root), after
        else:
            low = math.log(share)
    if best is None:
        nearest = max(tried, key=lambda step: step.share, default=None)
        said = f" With {nearest.measure}={nearest.share:.2f}: {nearest}." if nearest else ""
        raise UsageError(
            f"no smaller network was found that stays within {allowed:.1%}.{said} Allow more, or "
            "give more inputs"
        )
    put_back(found.root, best[0])
    return sorted(tried, key=lambda step: step.share), best[1]
