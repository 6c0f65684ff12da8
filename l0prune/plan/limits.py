"""Limits: the most that a network may cost, in all or through some of its axes.

    macs=0.5                        half of the multiply-accumulates
    params=10k                      ten thousand parameters
    latency=12ms                    twelve milliseconds
    speed=2                         twice as fast: half of the milliseconds
    macs=50%, params=0.1            both at once
    layer3.*: params=0.3            axes named layer3.…: all that goes through them, to 30 %
    layer3.*: width=0.5             half of the slots of each of these axes
    heads=8                         eight heads in each attention; heads=1 is one, heads=100% all
    memory=6GB@8x4096               six gigabytes, with a cache of 8 sequences of 4096 tokens

A ``Bound`` is a limit on one network: the measure there, and the amount that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, nextafter

import torch
from torch import Tensor, nn

from l0prune.errors import OutOfReach, UsageError, warn
from l0prune.plan.budget_text import HELP, SPEED, Written, check_unit, written
from l0prune.plan.globs import listed, matching
from l0prune.plan.measures import Latency, Measure, Source, kind_of, measure_of
from l0prune.plan.plan import Plan
from l0prune.plan.widths import axes_written, out_of_reach, tensors_of_layers

_FEWEST = 10  # least plausible count of a network


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a network may cost.

    Attributes:
        measure: the name of the measure that it is about, such as ``"params"`` or ``"macs"`` (of
            one example).
        amount: a share of the dense amount if at most 1 and without a suffix (below 1, where a
            limit is about each axis), else the amount itself, in the unit of the measure.
        glob: names of the axes that are meant, or paths of the layers that write them: only what
            some of their slots can take away is counted, and only they are closed for it. ``"*"``
            is the whole network, with the part that no gate can remove.
        suffix: that of the measure's unit, where the amount is written with it.
        at: conditions, of a measure that has some, such as the ``8x4096`` of ``memory=6GB@8x4096``.
        written: the text of a limit that is written in another way, such as ``speed=2``.
    """

    measure: str
    amount: float
    glob: str = "*"
    suffix: str = ""
    at: str = ""
    written: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        kind = kind_of(self.measure)
        if self.at and not kind.conditions:
            raise UsageError(f"{self.measure} depends on no conditions: leave out '@{self.at}'")
        if not 0 < self.amount < float("inf"):
            raise UsageError(f"a budget must be more than 0, not {self.amount:g}; {HELP}")
        if not self.suffix and 1 < self.amount < _FEWEST and not kind.each_axis:
            raise UsageError(
                f"a budget of {self.amount:g} is neither a share, which is at most 1 (100 %), nor "
                f"a count that a network could have; {HELP}"
            )

    def __str__(self) -> str:
        if self.written:
            return self.written
        amount = f"{self.amount:g}" if self.is_share else f"{self.amount:.15g}"
        where = "" if self.glob == "*" else f"{self.glob}: "
        at = f"@{self.at}" if self.at else ""
        return f"{where}{self.measure}={amount}{self.suffix}{at}"

    @property
    def is_share(self) -> bool:
        """Return whether the amount is a share of the dense one."""
        is_one_slot = self.amount == 1 and kind_of(self.measure).each_axis
        return self.amount <= 1 and not is_one_slot and not self.suffix

    def share(self, dense: float) -> float:
        """The limit as a share of the ``dense`` amount."""
        return self.amount if self.is_share else self.amount / dense

    def most(self, dense: float) -> float:
        """Return the largest allowed amount for a dense amount of ``dense``."""
        return self.amount * dense if self.is_share else self.amount

    def axes(self, plan: Plan) -> frozenset[int] | None:
        """Return the numbers of the axes that the glob selects; None for the whole network.

        Raises:
            UsageError: no gated axis has such a name, and no layer of such a path writes one.
        """
        if self.glob == "*":
            return None
        try:
            return frozenset(matching(plan.names, self.glob, f"the budget {self}"))
        except UsageError as error:
            tensors = tensors_of_layers(plan, self.glob)
            if found := axes_written(plan, tensors):
                return found
            pins = [p for p in plan.pins if p.where.partition(" ")[0] in tensors]
            if not pins:
                raise
            raise UsageError(
                f"the budget {self} limits nothing: no axis is gated there. {pins[0].where} is "
                f"pinned, {pins[0].reason}"
            ) from error


LimitsLike = str | Limit | Mapping[str, float | str] | Iterable[str | Limit]


def limits(given: LimitsLike) -> tuple[Limit, ...]:
    """Limits from a text, a mapping such as ``{"macs": 0.5}``, or a list of those texts.

    Raises:
        UsageError: it cannot be read, or names the same thing twice.
    """
    found = tuple(_limits(given))
    keys = [(limit.measure, limit.glob) for limit in found]
    if not found:
        raise UsageError(f"an empty budget limits nothing; {HELP}")
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"the budget limits {key[0]} of {key[1]!r} twice; give one limit")
    return found


def _limits(given: LimitsLike) -> Iterable[Limit]:
    if isinstance(given, Limit):
        yield given
    elif isinstance(given, str):
        yield from map(_limit_of, written(given))
    elif isinstance(given, Mapping):
        for name, amount in given.items():
            yield from map(_limit_of, written(f"{name}={amount}"))
    elif isinstance(given, Iterable):
        for each in given:
            yield from _limits(each)
    else:
        raise UsageError(f"a {type(given).__name__} is no budget; {HELP}")


def _limit_of(part: Written) -> Limit:
    name, value = part.measure, part.value
    if name == SPEED:
        return _times_as_fast(part)
    if part.suffix == "%":
        if value > 100:
            raise UsageError(f"the budget {part.text!r} is more than the whole network; {HELP}")
        if value < 1:
            raise UsageError(
                f"the budget {part.text!r} is less than one per cent of the network: if "
                f"{value * 100:.15g} % is meant, write {name}={value:.15g} or "
                f"{name}={value * 100:.15g}%; else {name}={value * 0.01:.15g}"
            )
        value = value * 0.01
    elif part.suffix or value > 1 or (part.digits == "1" and kind_of(name).each_axis):
        return _absolute(part)
    if value == 1 and kind_of(name).each_axis:  # a share: 1 of this amount is one slot
        value = nextafter(1.0, 0.0)
    return Limit(name, value, part.glob, at=part.at)


def _times_as_fast(part: Written) -> Limit:
    """Return the limit in milliseconds of a network that is ``value`` times as fast."""
    if part.suffix not in ("", "x") or part.glob != "*" or part.at:
        raise UsageError(
            f"cannot read the budget {part.text!r}: {SPEED}=2 is twice as fast as the whole "
            "network that came in; a part of it has a budget such as 'layer3.*: latency=0.5'"
        )
    if part.value <= 1:
        raise UsageError(
            f"the budget {part.text!r} asks for a network that is no faster than the one that came "
            f"in: {SPEED} is more than 1, and {SPEED}=2 is twice as fast"
        )
    return Limit(Latency.name, 1 / part.value, written=f"{SPEED}={part.value:g}")


def _absolute(part: Written) -> Limit:
    """Return a limit in the measure's unit, from an amount that is not a share."""
    units = kind_of(part.measure).suffixes
    check_unit(part, units)
    unit = next(iter(units))
    amount = part.value * units[part.suffix]
    if not unit and part.suffix and amount < _FEWEST:
        raise UsageError(
            f"the budget {part.text!r} is {amount:g} {part.measure}, fewer than a network has; "
            f"{HELP}"
        )
    text = "" if part.suffix in ("", unit) or not unit else part.text
    return Limit(part.measure, amount, part.glob, unit, part.at, written=text)


_ROUNDING = 1e-9  # of a share of slots: 0.29 of 100 is 28.999…96


class Bound:
    """A limit on a network whose measure is known.

    Attributes:
        limit: as the user gave it.
        measure: the measure that it limits.
        through: numbers of the axes that it covers; None for the whole network.
        dense: the amount with all gates open.
        most: the largest amount that is allowed.
        share: the same as a share of the dense amount, at most 1.

    Raises:
        UsageError: no axis has such a name, or the network has nothing of it.
    """

    def __init__(self, limit: Limit, measure: Measure) -> None:
        self.limit, self.measure = limit, measure
        self.through = limit.axes(measure.plan)
        self.dense = measure.dense(self.through)
        if not self.dense > 0:
            raise UsageError(
                f"the budget {limit} limits nothing: the gates have no {measure.label} to remove "
                "there"
            )
        self.most = limit.most(self.dense)
        self.share = min(1.0, limit.share(self.dense))
        if measure.each_axis:
            self.most = float(max(1, floor(self.most + _ROUNDING)))
            self.share = min(1.0, self.most / self.dense)

    def actual(self, open_: Tensor) -> float:
        """The amount in an export with these open gates, bool and flat."""
        return self.measure.actual(open_, self.through)

    def actual_share(self, open_: Tensor) -> float:
        """The share that is left in an export with these open gates, bool and flat."""
        return self.actual(open_) / self.dense

    def expected_share(self, p: Tensor) -> Tensor:
        """The expected share that is left; a scalar of p's dtype, differentiable in ``p``."""
        return self.measure.expected(p, p.dtype, self.through) / self.dense

    def gates(self) -> Tensor:
        """Return the gates that can reduce the limited amount; bool, flat."""
        axes, plan = self.measure.axes, self.measure.plan
        wanted = axes if self.through is None else axes & self.through
        result = torch.zeros(plan.size, dtype=torch.bool)
        for number in wanted:
            result[plan.axes[number].slice] = True
        return result


def bounds(
    plan: Plan,
    wanted: Sequence[Limit],
    sources: Sequence[Source] = (),
    model: nn.Module | None = None,
) -> tuple[Bound, ...]:
    """Return the bounds that these limits set on a network with this plan, of a gated ``model``.

    Where a glob over several axes asks for a width that one of them cannot have, the closest
    possible width is its bound, and a warning says why.

    Raises:
        UsageError: one of them makes no sense there, or its measure takes a source that is not
            among ``sources``; or an axis that is named cannot have the width that is asked for.
    """
    keys = dict.fromkeys((limit.measure, limit.at) for limit in wanted)
    measures = {(name, at): measure_of(plan, name, sources, model, at) for name, at in keys}
    found: dict[tuple[str, str, frozenset[int] | None], Bound] = {}
    for limit in wanted:
        measure = measures[limit.measure, limit.at]
        for each in _by_axis(limit, measure) if measure.each_axis else (limit,):
            bound = Bound(each, measure)
            key = limit.measure, limit.at, bound.through
            if key not in found or not measure.each_axis or bound.most < found[key].most:
                found[key] = bound
    _set_within_reach(plan, [bound for bound in found.values() if bound.measure.each_axis], wanted)
    return tuple(found.values())


def _set_within_reach(plan: Plan, of_axes: Sequence[Bound], wanted: Sequence[Limit]) -> None:
    """Replace the bounds of single axes by widths that these can have; see ``bounds``."""
    by_axis = {number: bound for bound in of_axes for number in bound.through or ()}
    asked = {number: round(bound.most) for number, bound in by_axis.items()}
    missed = out_of_reach(plan, asked)
    texts: dict[str, list[str]] = {}
    for number, (left, why) in missed.items():
        name, size, bound = plan.axes[number].name, plan.axes[number].size, by_axis[number]
        text = f"{name} keeps {left} of {size} {bound.measure.label}, not {asked[number]}"
        if left > asked[number] and any(limit.glob == name for limit in wanted):
            raise OutOfReach(f"the budget {bound.limit} cannot be met: {text}: {why}")
        bound.most = float(left)
        bound.share = min(1.0, left / bound.dense)
        texts.setdefault(why, []).append(text)
    if texts:
        each = [f"{listed(names, most=3)}: {why}" for why, names in texts.items()]
        more = f"; and {len(each) - 3} more reasons" if len(each) > 3 else ""
        warn(f"not every width can be as asked: {'; '.join(each[:3])}{more}")


_LITTLE = 0.05  # of an axis' slots, at least one: warn if half of the axes keep no more
_WIDE = 8  # axes of fewer slots are not considered
_HALVINGS = 12


def warn_of_little(plan: Plan, wanted: Sequence[Bound]) -> None:
    """Warn of bounds that leave almost nothing if all axes keep an equal share of slots."""
    for bound in wanted:
        counted = bound.gates()
        axes = [axis for axis in plan.axes if axis.size >= _WIDE and counted[axis.start]]
        if bound.share > 2 * _LITTLE or bound.measure.each_axis or not axes:
            continue
        open_ = _alike(plan, bound)
        kept = {axis.name: (int(open_[axis.slice].sum()), axis.size) for axis in axes}
        little = [
            f"{k} of {n} in {axis}" for axis, (k, n) in kept.items() if k <= max(1, _LITTLE * n)
        ]
        if 2 * len(little) < len(axes):
            continue
        tenth = bound.actual_share(_part(plan, bound, 0.1))
        warn(
            f"the budget {bound.limit} leaves almost nothing: with an equal share of each axis "
            f"{listed(little, most=3)}. A tenth of the slots of each would be "
            f"{replace(bound.limit, amount=float(f'{tenth:.2g}'), suffix='', written='')}"
        )


def _alike(plan: Plan, bound: Bound) -> Tensor:
    """Return open gates with the largest equal share of each axis that meets a bound."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = bound.actual(_part(plan, bound, middle)) <= bound.most
        low, high = (middle, high) if fits else (low, middle)
    return _part(plan, bound, low)


def _part(plan: Plan, bound: Bound, part: float) -> Tensor:
    open_, counted = torch.ones(plan.size, dtype=torch.bool), bound.gates()
    for axis in plan.axes:
        if counted[axis.start]:
            open_[axis.start + max(1, ceil(part * axis.size)) : axis.start + axis.size] = False
    return open_


def _by_axis(limit: Limit, measure: Measure) -> Iterator[Limit]:
    names, meant = measure.plan.names, limit.axes(measure.plan)
    numbers = sorted(measure.axes if meant is None else measure.axes & meant)
    if not numbers:
        raise UsageError(
            f"the budget {limit} limits nothing: no axis that is gated there has {measure.label}"
        )
    yield from (replace(limit, glob=names[number]) for number in numbers)
