"""Choice of the slots of highest score, as many as the limits allow in the exported model.

Gates learn by expected amounts. The export has the actual amount of the sliced model, and widths
come in whole slots (or blocks of them): here the last few gates are opened and closed, in the order
of their scores, until that amount is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.doors import provided
from l0prune.errors import OutOfReach, UsageError, warn
from l0prune.gating.attaching import gates_of, holder
from l0prune.gating.bank import Gates
from l0prune.plan.budget_text import SPEED
from l0prune.plan.limits import Bound, Limit, LimitsLike, bounds, limits, warn_of_little
from l0prune.plan.measures import Latency, Measure, Source
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switches_of, without_idle
from l0prune.plan.targets import TARGET, check_target
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage
from l0prune.running.batches import usual_batch_size
from l0prune.running.device import check_values
from l0prune.running.processes import run_on_first
from l0prune.running.task import Task
from l0prune.selection import fitted
from l0prune.selection.correction import corrected, observations, observed
from l0prune.selection.fitting import Fitting, Movable, Widths, blocks_of, times_on
from l0prune.selection.oneshot import OneShot
from l0prune.selection.score_input import ScoreInput
from l0prune.selection.scores import score
from l0prune.selection.time_ranking import ranked_by_time

_UNLEARNED = (
    "the gates that this budget moves have not learned, so slots are ranked by the score "
    "'magnitude'. Give scores, such as l0prune.score(model, 'auto', data), or train the "
    "gates with l0prune.finetune first"
)
_DATA_ALONE = (
    "data tells how many branches go when scores and a budget say what goes: give both "
    "and no kinds, or no data"
)
LOOKS = 8, 128  # batches, and examples of each, whose loss decides how many branches go


@displayed
def fit(
    model: nn.Module,
    budget: LimitsLike | None = None,
    scores: Tensor | None = None,
    *,
    round_to: Widths = "auto",
    target: str = TARGET,
    fill: bool = True,
    latency: Source | None = None,
    kinds: str | Sequence[str] = (),
    data: Any = None,
    loss: Any = None,
    compensate: bool = False,
    observe: bool = True,
    progress: bool = True,
) -> dict[str, float]:
    """Open and close gates, in place, so that an export just meets a budget.

    Gates of lowest score close first; if the budget leaves room, those of highest score open again.
    At least one slot of an axis stays. Measures that can be observed, such as time, correct the
    choice.

    Args:
        model: a gated model.
        budget: such as ``"speed=2"``, ``"macs=0.5"``, ``{"params": 0.1}``, ``"latency=12ms"``,
            ``"layer3.*: params=0.3"``, or several; None to round widths only.
        scores: importance of each slot, higher is kept; shape ``(plan.size,)``. By default the
            gates' own log α; of gates that have not learned yet, the score ``"magnitude"``.
        round_to: open slots of an axis (but heads, groups, single inputs) come in multiples of
            this, or all of them. ``"auto"`` takes blocks that the target computes fastest, or those
            of a measure of the budget that has its own; 1 takes any widths.
        target: the runtime that the result is for, by its name in ``measure``.
        fill: open more where the budget leaves room.
        latency: a table of times, for a budget in latency, or for the widths of ``round_to``; for
            the former one is made on the target where none is given.
        kinds: of the axes whose gates move; by default all, with scores all but branches.
        data: as for ``finetune``: branches go, too, so many that the loss is least half way.
        loss: see ``Task``; None for that of the data, or ``"auto"``.
        compensate: let the weights that are left make up for those that go, by ``data``; without
            scores the slots go that then leave the least error.
        observe: time the network that is chosen, where a budget can be observed, and correct the
            choice; else a budget in latency is met by the table's prediction.
        progress: show progress on stderr.

    Returns:
        The export's amounts by the text of each limit, in its unit; as observed, where they are.

    Raises:
        NotGated: the model carries no gates.
        UsageError: the budget cannot be met, or the arguments do not go together.
        DataError: the data is empty or does not fit the model.
    """
    gates = gates_of(model)
    check_values(model, "choose from")
    gates.make_whole()
    latency = table_if_needed(model, () if budget is None else limits(budget), latency, target)
    wanted = bounds_of(model, budget, latency)
    if compensate:
        options: Any = {"fill": fill, "latency": latency, "kinds": kinds, "scores": scores}
        options |= {"round_to": round_to, "target": target, "observe": observe}
        blocks_for(gates.plan, wanted, round_to, latency, target=target)
        counts: dict[str, float] = provided("fit_compensated")(model, data, budget, **options)
        return counts
    asked = (kinds,) if isinstance(kinds, str) else kinds
    open_ = gates.open().cpu()
    by_magnitude = scores is None and _are_unlearned(gates, wanted, open_, asked)
    if data is not None and (scores is None or kinds or not wanted):
        raise UsageError(_DATA_ALONE)
    scores = score(model, "magnitude") if by_magnitude else scores
    worth = gates.log_alpha.detach() if scores is None else scores
    _check_scores(worth, gates.plan.size)
    asked = asked or (() if scores is None else _scored(gates.plan))
    blocks = partial(blocks_for, gates.plan, wanted, round_to, latency, target=target)
    movable: Movable | None
    movable = widths = _movable(gates.plan, open_, asked)
    if data is not None:
        oneshot = OneShot(wanted, blocks(), worth)
        open_, movable = _without_branches(model, oneshot, Task.of(data, loss), widths, blocks)
    in_blocks = blocks(movable)
    warn_of_little(gates.plan, wanted)
    if by_magnitude:
        warn(_UNLEARNED)
    with stage("fitting to the budget"):
        if scores is not None and round_to == "auto" and latency is None:
            start = open_

            def choose(by: Tensor) -> Tensor:
                fitting = Fitting(gates.plan, by, wanted, in_blocks, movable)
                return fitting.choose(start, fill=fill).open_

            worth = ranked_by_time(gates.plan, times_on(target), wanted, worth.cpu(), choose)
        where: Any = {"movable": movable, "start": open_}
        return meet(model, wanted, worth, in_blocks, fill=fill, observe=observe, **where)


def check_request(
    model: nn.Module,
    budget: LimitsLike | None,
    *,
    round_to: Widths,
    target: str,
    latency: Source | None,
    kinds: Sequence[str],
    scored: bool,
    data: bool,
) -> None:
    """Raise the errors of ``fit`` that do not depend on scores, before these are computed.

    Raises:
        UsageError: see ``fit``.
    """
    gates = gates_of(model)
    wanted = bounds_of(model, budget, latency)
    asked = kinds or (_scored(gates.plan) if scored else ())
    movable = None if data else _movable(gates.plan, gates.open().cpu(), asked)
    blocks_for(gates.plan, wanted, round_to, latency, movable, target)
    warn_of_little(gates.plan, wanted)


def bounds_of(
    model: nn.Module, budget: LimitsLike | None, latency: Source | None
) -> tuple[Bound, ...]:
    """Return the bounds of a budget, with the table of times that it needs, on a gated model."""
    sources = () if latency is None else (latency,)
    wanted = () if budget is None else limits(budget)
    return bounds(gates_of(model).plan, wanted, sources, model)


def _scored(plan: Plan) -> list[str]:
    """Return the kinds of axes without branches and bits: their scores are comparable."""
    return sorted({axis.kind for axis in plan.axes if axis.is_width})


def _are_unlearned(
    gates: Gates, wanted: Sequence[Bound], open_: Tensor, kinds: Sequence[str]
) -> bool:
    """Return whether the budget needs a choice among gates that are as they started, about equal.

    It needs none if all are open and the budget allows that.
    """
    if not wanted:
        return False
    counted = torch.stack([bound.gates() for bound in wanted]).any(0)
    counted &= _movable(gates.plan, open_, kinds).gates
    are_met = all(bound.actual(open_) <= bound.most for bound in wanted)
    closing = counted & open_
    if int(closing.sum()) < 2 or (are_met and bool(torch.equal(closing, counted))):
        return False
    return gates.are_uniform(closing)


def _check_scores(scores: Tensor, size: int) -> None:
    if not isinstance(scores, Tensor):
        raise UsageError(
            f"scores are a tensor with a number for each slot, not {type(scores).__name__}: "
            "scores=l0prune.score(model, 'magnitude')"
        )
    if scores.shape != (size,) or not bool(torch.isfinite(scores).all()):
        raise UsageError(
            f"scores must be {size} finite numbers in one flat vector, one per gate; these have "
            f"the shape {tuple(scores.shape)}"
        )


def _movable(plan: Plan, open_: Tensor, kinds: Sequence[str]) -> Movable:
    """Return the gates of axes of these kinds (of all if empty), with the other open gates."""
    there = {axis.kind for axis in plan.axes}
    if strange := [kind for kind in kinds if kind not in there]:
        raise UsageError(
            f"no axis that is gated is of the kind {strange[0]!r}; there are "
            f"{', '.join(sorted(there))}"
        )
    gates = torch.zeros(plan.size, dtype=torch.bool)
    for axis in plan.axes:
        gates[axis.slice] = not kinds or axis.kind in kinds
    return Movable.of(gates, open_)


def blocks_for(
    plan: Plan,
    wanted: Sequence[Bound],
    round_to: Widths,
    latency: Source | None,
    movable: Movable | None = None,
    target: str = TARGET,
) -> list[int]:
    """Return for each axis how many slots open and close together, by the options of ``fit``.

    With ``"auto"`` an axis whose width a limit gives in slots has any width, and blocks are halved
    until the limits can be met with them.

    Raises:
        UsageError: ``round_to`` makes no sense, or the table is of another network; or the limits
            cannot be met with every gate closed that may be: names what cannot be removed, and why
            it is pinned.
    """
    measures: dict[str, Measure] = {bound.measure.name: bound.measure for bound in wanted}
    if latency is not None and latency.name not in measures:
        measures[latency.name] = latency.of(plan)
    blocks = blocks_of(plan, round_to, measures.values(), target)
    if round_to == "auto":
        given = _given_widths(wanted)
        blocks = [1 if number in given else block for number, block in enumerate(blocks)]
    if movable is not None:
        of_axes = zip(plan.axes, blocks, strict=True)
        blocks = [block if movable.gates[axis.start] else 1 for axis, block in of_axes]
    smaller = [blocks]
    while round_to == "auto" and max(smaller[-1], default=1) > 1:
        smaller.append([max(1, block // 2) for block in smaller[-1]])
    refusals = []
    for tried in smaller:
        missed = unmet(plan, wanted, tried, movable)
        if missed is None:
            return tried
        refusals.append(_refusal(*missed, max(tried, default=1)))
    raise refusals[0]


def table_if_needed(
    model: nn.Module, wanted: Sequence[Limit], latency: Source | None, target: str
) -> Source | None:
    """Return the table of times for budgets in latency; on the target one is made if none is given.

    In all processes it is that of the first one.
    """
    if latency is not None or all(limit.measure != Latency.name for limit in wanted):
        return latency
    found: Source = run_on_first(lambda: provided("latency_table")(model, check_target(target)))
    return found


def _given_widths(wanted: Sequence[Bound]) -> frozenset[int]:
    """Return the axes, by number, that are limited to a number of slots and not to a share."""
    numbers = (b.through for b in wanted if b.measure.each_axis and not b.limit.is_share)
    return frozenset().union(*(of for of in numbers if of is not None))


def unmet(
    plan: Plan, wanted: Sequence[Bound], blocks: Sequence[int], movable: Movable | None
) -> tuple[Bound, Tensor] | None:
    """Return a bound exceeded with all movable gates closed, and the open gates; or None."""
    fitting = Fitting(plan, torch.zeros(plan.size), wanted, blocks, movable)
    floors = ((bound, fitting.least(bound)) for bound in wanted)
    return next((each for each in floors if each[0].actual(each[1]) > each[0].most), None)


def _refusal(bound: Bound, least: Tensor, widest: int) -> OutOfReach:
    amount, measure = bound.actual(least), bound.measure
    in_blocks = f", in blocks of {widest}" if widest > 1 else ""
    return OutOfReach(
        f"the budget {bound.limit} cannot be met: with every gate closed that may be"
        f"{in_blocks}, {measure.show(amount)} of {measure.show(bound.dense)} "
        f"{measure.label} stay ({amount / bound.dense:.1%}). {_in_the_way(measure, least)}"
        f"{_remedy(bound, amount)}, or gate more axes (include, exclude)."
    )


def _remedy(bound: Bound, least: float) -> str:
    """Return the nearest budget that can be met, as a request; with two digits."""
    share = least / bound.dense
    if bound.limit.written.startswith(SPEED):
        return f"Ask for less: {SPEED}={floor(10 / share) / 10:g} at most"
    return f"Give a larger budget: {ceil(1000 * share) / 10:g}% at least"


def _in_the_way(measure: Measure, least: Tensor, most: int = 3) -> str:
    """Describe which modules have most of the amount that cannot be removed, and why."""
    kept = measure.plan.kept(least).to(torch.float64)
    taking = ((owner, amount) for owner, amount in measure.by_owner(kept).items() if amount)
    owners = sorted(taking, key=lambda item: -item[1])
    reasons = []
    for owner, amount in owners[:most]:
        pins = [p for p in measure.plan.pins if p.where.startswith(f"{owner}.")]
        why = "; ".join(dict.fromkeys(f"{pin.where} is pinned, {pin.reason}" for pin in pins[:2]))
        shown = measure.show(amount)
        reasons.append(f"{owner or 'no layer of its own'} ({shown}{f': {why}' if why else ''})")
    return f"Most of it is in {', '.join(reasons)}. " if reasons else ""


def meet(
    model: nn.Module,
    wanted: Sequence[Bound],
    worth: Tensor,
    blocks: Sequence[int],
    *,
    fill: bool = True,
    observe: bool = True,
    movable: Movable | None = None,
    start: Tensor | None = None,
) -> dict[str, float]:
    """Fit a model to bounds that it can meet, in place; see ``fit``."""
    gates = gates_of(model)
    before = gates.log_alpha.detach().clone()
    if start is None:
        start = gates.open().cpu()

    def restore() -> None:
        with torch.no_grad():
            gates.log_alpha.copy_(before)

    def put(open_: Tensor) -> None:
        restore()
        gates.set_open(open_)

    def seen(open_: Tensor) -> dict[Bound, float]:
        put(open_)
        return observed(model, wanted) if observe else {}

    fitting = Fitting(gates.plan, worth, wanted, blocks, movable)
    try:
        choice, tried = corrected(fitting, start, seen, fill=fill)
        put(without_idle(gates.plan, choice.open_))  # what costs nothing fits at any width
        gates.asked = tuple(str(bound.limit) for bound in wanted)
    except BaseException:
        restore()
        raise
    filling = {
        axis.name: count
        for axis in gates.plan.axes
        if (count := int(choice.slots.filling[axis.slice].sum()))
    }
    fitted.done(fitted.Fitted(filling, observations(tried, choice)))
    return {str(b.limit): choice.seen.get(b, b.actual(choice.open_)) for b in wanted}


@stage("choosing how many branches go")
def _without_branches(
    model: nn.Module,
    oneshot: OneShot,
    task: Task,
    widths: Movable,
    blocks: Callable[[Movable], list[int]],
) -> tuple[Tensor, Movable | None]:
    """Let the loss decide which branches go; return the open gates, and those that may move.

    ``widths`` are the gates of no branch, which move if the loss does not decide; ``blocks`` raises
    UsageError if these gates alone cannot meet the limits.
    """
    size = min(LOOKS[1], 2 * usual_batch_size(task.train))
    of = ScoreInput(*holder(model), task, LOOKS[0], size, "auto", seed=0)
    plan, open_ = of.plan, of.gates.open().cpu()
    left, is_settled = oneshot.choose(of)
    if is_settled:
        start = torch.where(switches_of(plan), left, open_)
        return start, Movable.of(~switches_of(plan), start)
    try:
        blocks(widths)
    except UsageError:
        return left, None  # branches have to go for the rest of the way, too
    return open_, widths
