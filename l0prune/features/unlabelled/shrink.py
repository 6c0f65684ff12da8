"""``l0prune.shrink``: make a network smaller from some of its inputs, without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from l0prune.capture.copying import copied_around
from l0prune.capture.model_checks import evaluating, modes_kept
from l0prune.capture.undisturbed import trying
from l0prune.data.dataset import as_arguments, map_tensors
from l0prune.errors import L0pruneError, TrainingError, UsageError, first_line, warn
from l0prune.exporting.export import export
from l0prune.exporting.result import Export
from l0prune.features.unlabelled.compensate import (
    BATCH_SIZE,
    SAMPLES,
    Calibration,
    calibration,
)
from l0prune.features.unlabelled.fidelity import Classes, Fidelity, fidelity
from l0prune.features.unlabelled.within import Cuts, Step, held, hold, smallest
from l0prune.files.artifact import named_tensors
from l0prune.gating.attaching import gates_of
from l0prune.gating.gate import gate
from l0prune.plan.limits import LimitsLike, limits
from l0prune.plan.measures import Latency, Source
from l0prune.plan.numbers import check_whole, tolerance_of
from l0prune.plan.targets import TARGET, check_target
from l0prune.progress.display import displayed
from l0prune.running.device import check_values, device_of, on_device
from l0prune.running.inputs import inputs_for, inputs_of
from l0prune.running.output_parts import Parts
from l0prune.running.sources import with_pseudo_labels
from l0prune.running.task import Task
from l0prune.selection.fit import bounds_of, check_request, table_if_needed
from l0prune.selection.fitting import Widths
from l0prune.training import run

_RATE = 3e-4  # learning rate of recovery: the usual 1e-3 often leaves the nearby minimum
_UNDONE = (
    "the training on the network's own answers ended farther from them on inputs that were held "
    "out, so it was undone: give more inputs (samples), or fewer epochs"
)
_WORSE = (
    "{}. Give a larger budget, more inputs (samples), or epochs of training on the network's own "
    "answers (recover); allow_worse_than_mean (--allow-worse-than-mean) returns it nevertheless"
)
_UNSTEADY = 1e-4  # error from one call to the next that is no rounding
_DIFFERS = (
    "in eval mode the network gives other outputs for the same inputs in each call, by {:.2%} of "
    "their variance, beside which cuts are judged: it draws random numbers, which survey names, or "
    "keeps state"
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
             nn.FeatureAlphaDropout)  # fmt: skip
MEASURES = "macs", Latency.name  # what a tolerance can spare
_LARGE = 5e8  # parameters above which times are measured only if asked for: that takes long


@displayed
def shrink(
    model: nn.Module,
    inputs: Any,
    budget: LimitsLike | None = None,
    *,
    tolerance: float | str | None = None,
    judge: Callable[[nn.Module], float] | None = None,
    measure: str | None = None,
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
        measure: what is spared under a tolerance: ``"latency"`` for the fastest network, or
            ``"macs"``; by default latency, or where no time can be measured macs, with a warning.
            For another program (``loadable_by``), and above 500 M parameters, it is macs.
        recover: epochs in which the smaller network then learns the answers of the original one, or
            settings of ``finetune`` for that, as ``{"epochs": 8, "lr": 1e-3}``; undone where it
            ends farther away on held-out inputs. Under a tolerance networks that learn are cut out
            of the smallest one that is within without.
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
    if judge is not None and tolerance is None:
        raise UsageError("judge decides which networks are within a tolerance: give one, too")
    allowed = check_asked(budget, tolerance, measure)
    check_values(model, "shrink")
    users, work, inputs = model, *gated_copy(model, inputs, seed, gating)
    model = copied_around(model)  # a forward may write into its module
    widths: Any = {"round_to": round_to, "target": check_target(target)}

    def table_for(wanted: LimitsLike) -> Source | None:
        given = latency(work) if callable(latency) else latency
        return table_if_needed(work, limits(wanted), given, target)

    spared = measure or MEASURES[0]
    if budget is None and measure is None:
        is_known = latency is not None and not callable(latency)
        is_large = sum(each.numel() for each in work.parameters()) > _LARGE
        by_macs = gating.get("loadable_by") is not None or (is_large and not is_known)
        spared, widths["latency"] = (spared, None) if by_macs else _spared(table_for)
    else:
        widths["latency"] = table_for(f"{spared}=1" if budget is None else budget)
    if budget is not None:
        check_request(work, budget, **widths, kinds=(), scored=True, data=False)
    curve: list[Step] = []
    on = samples, batch_size, device, seed, class_dim
    with calibration(work, inputs, *on, is_shared=True) as found:
        outputs = found.gates.outputs
        place = device_of(found.root)
        held_out = _Judge(found.judged, found.classes, place, outputs, found.parts)
        held_out.check_steady(model, allowed)
        learn = None
        if settings.get("epochs", 1):
            task = with_pseudo_labels(
                inputs, model, device=device, held_out=held_out.batches, outputs=outputs
            )
            given = {"lr": _RATE, "device": device, "seed": seed, **settings}
            nearness = partial(held_out.nearness, model, work)
            learn = partial(_recovered, found, task, nearness, given)
        cuts = Cuts(found, widths, learn)
        if allowed is not None:
            bounds = bounds_of(work, f"{spared}=1", widths["latency"])
            curve, best = smallest(cuts, allowed, bounds[0], judge)
            gates_of(work).asked = f"tolerance={allowed:g}", f"{spared}={best.share:.3f}"
        else:
            before = cuts.cut(budget)
            before = before if learn is None else learn()
            if before.is_useless and not allow_worse_than_mean:
                raise UsageError(_WORSE.format(before.uselessness))
    result = export(work)
    result.measure_rounding_of(users)
    result.fidelity = held_out.nearness(model, copied_around(result.module))
    result.curve = tuple(curve)
    return result


def _spared(table_for: Callable[[str], Source | None]) -> tuple[str, Source | None]:
    """Return latency and a table of times, or macs where none can be made."""
    try:
        return Latency.name, table_for(f"{Latency.name}=1")
    except L0pruneError as error:
        warn(f"the network of fewest MACs is looked for, not the fastest: {first_line(error)}")
        return "macs", None


def check_asked(
    budget: LimitsLike | None, tolerance: float | str | None, measure: str | None
) -> float | None:
    """Return a tolerance as a number."""
    if (budget is None) == (tolerance is None):
        raise UsageError("give either a budget (budget='macs=0.5') or a tolerance (tolerance='1%')")
    if measure not in (None, *MEASURES):
        raise UsageError(f"measure is {' or '.join(MEASURES)}, not {measure!r}")
    return None if tolerance is None else tolerance_of(tolerance)


def is_empty(model: nn.Module) -> bool:
    """Return whether a model is on the meta device, without values."""
    return any(parameter.is_meta for parameter in model.parameters())


def gated_copy(
    model: nn.Module, inputs: Any, seed: int, gating: dict[str, Any]
) -> tuple[nn.Module, Any]:
    """Return a gated copy, which shares the weights, and the inputs."""
    work, inputs = copied_around(model), inputs_for(model, inputs)
    first, _ = next(inputs_of(inputs, 2, 2, torch.device("cpu"), seed))
    place = "meta" if is_empty(model) else "cpu"
    two = map_tensors(first, lambda tensor: tensor[:2].to(place) if tensor.dim() else tensor)
    gate(work, *as_arguments(two), **{"branches": False, **gating})
    return work, inputs


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set train mode without dropout within the context: answers are learned that had none.

    Modules without weights or statistics, of which dropout is one, stay in eval mode.
    """
    rates = [(module, module.p) for module in model.modules() if isinstance(module, _DROPOUTS)]
    with modes_kept(model):
        model.train()
        for module in model.modules():
            if not [*module.parameters(), *module.buffers()]:
                module.eval()
        for module, _ in rates:
            module.p = 0.0  # attentions read it, in their own mode
        try:
            yield
        finally:
            for module, rate in rates:
                module.p = rate


def _recovered(
    found: Calibration, task: Task, nearness: Callable[[], Fidelity], settings: Mapping[str, Any]
) -> Fidelity:
    """Let a cut network learn, if it ends nearer than it was; return its fidelity."""
    before, compensated = held(found), nearness()
    for _, tensor in named_tensors(found.root):  # of others, too, which stay as they are
        tensor.data = tensor.data.clone()
    why = _UNDONE
    try:
        with torch.enable_grad(), without_dropout(found.root):
            run.finetune(found.root, task, **{**settings, "learn": False})
        after = nearness()
        if after.error <= compensated.error:
            return after
    except TrainingError as error:
        why = f"the network did not learn: {first_line(error)}"
    hold(found, before)
    warn(why)
    return compensated


@dataclass(frozen=True, slots=True)
class _Judge:
    """Measure of the nearness of two networks, on held-out inputs."""

    batches: list[Any]
    classes: Classes
    place: torch.device
    outputs: Sequence[str]
    parts: Parts

    def check_steady(self, model: nn.Module, allowed: float | None) -> None:
        """Warn if a model's outputs differ from call to call.

        Raises:
            UsageError: they differ by more than a tolerance.
        """
        with trying(model):
            apart = replace(self, batches=self.batches[:1]).nearness(model, model).error
        if apart > _UNSTEADY:
            text = _DIFFERS.format(apart)
            if allowed is not None and apart > allowed:
                raise UsageError(f"{text}. More than the tolerance of {allowed:g}")
            warn(text)

    def nearness(self, model: nn.Module, other: nn.Module) -> Fidelity:
        """Return the fidelity of another network's outputs to a model's, on the device."""
        place = self.place
        with evaluating(model), evaluating(other), on_device(model, place), on_device(other, place):
            asked = self.classes.dim_of, self.outputs, self.parts
            return fidelity(model, other, self.batches, *asked)
