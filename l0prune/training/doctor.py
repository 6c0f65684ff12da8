"""Diagnoses of gates that do not learn or close as they should, with causes and remedies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from l0prune.errors import TrainingError
from l0prune.gating.kinds.base import Gate
from l0prune.plan.plan import BITS
from l0prune.plan.switches import idle
from l0prune.running.task import amounts
from l0prune.training.gate_settings import GATES
from l0prune.training.gate_terms import ALWAYS, GateTerms
from l0prune.training.history import Record
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings

Complaint = tuple[str, str]
"""Subject, which is reported once in a run, and text."""
_Held: TypeAlias = tuple[Optimizer, dict[str, Any]]

# Gates are stuck that moved less than this part of the distance to where they close.
_STUCK = 0.1
# The part of the learning steps after which this is checked.
_TIME_TO_MOVE = 0.5
# Range of P(z ≠ 0) of a gate that is undecided when learning ends.
_UNDECIDED = (0.1, 0.9)
# Allowed difference of expected and actual counts then, as a share of the dense count.
_APART = 0.1
# An axis is about to lose all slots if fewer open ones are expected.
_DYING = 1.5
# Budgets may pull this many times as hard as the loss does.
_RUNAWAY = 1e4
# Allowed growth of the task's loss; its first value, if that is larger.
_GROWTH = 0.5
# The part of the training's seconds that compiling may take.
_COMPILING = 0.1
# Changes of training and test loss, in opposite directions, from which on a network overfits.
_PART = 0.2
_PARTED = "overfits"
# Complaints whose advice is that gates are to close faster or in greater number, and the opposite.
_FASTER = frozenset({"out of reach", "stuck", "nothing closes", "runs away"})
_SLOWER = frozenset({"overwhelmed"})


class Doctor:
    """Monitor of the gates of one run, which reports each problem once.

    No complaint contradicts the advice of an earlier one: the problem seen first is the cause.
    """

    def __init__(self, terms: GateTerms, phases: Phases) -> None:
        self._terms, self._gates, self._phases = terms, terms.gates, phases
        self._rate = terms.gate_lr
        self._start = _values(self._gates.log_alpha)
        self._threshold = closes_below(self._gates.gate)
        ways = (self._start - self._threshold).clamp(min=0)
        self._way = float(ways.mean())
        self._shortest = float(ways[ways > 0].min()) if self._way else 0.0
        self._losses: list[float] = []
        self._said: set[str] = set()
        self._steppers: list[ref[Optimizer]] = []

    def go_on_from(self, records: Sequence[Record]) -> None:
        """Restore the losses measured before a stop; past complaints are in the state."""
        self._losses = [float(record["train_loss"]) for record in records]

    def state_dict(self) -> dict[str, Any]:
        """Return the initial gates and the complaints so far."""
        return {"start": self._start, "said": sorted(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self._start, self._said = state["start"], set(state["said"])

    def before(self, optimizers: Sequence[Optimizer], *, is_taken: bool = False) -> dict[str, str]:
        """Return new complaints before the first step."""
        if not self._terms.learns:
            return {}
        self._steppers = [] if is_taken else [*map(ref, optimizers)]
        held = self._held()
        return self._new(
            chain(
                self._not_learning(optimizers, held, is_taken),
                self._decayed(held),
                self._out_of_reach(held),
            )
        )

    def after(self, record: Record) -> dict[str, str]:
        """Return new complaints after an epoch, while the model is as it was measured.

        Without ``train_loss`` in the record the loss is not checked.
        """
        if "train_loss" in record:
            self._losses.append(float(record["train_loss"]))
        if record["phase"] == "settle" or not self._terms.learns:
            return {}
        return self._new(self._after(record))

    def _after(self, record: Record) -> Iterator[Complaint]:
        steps, all_steps = record["step"], self._phases.learning
        next_steps = steps + steps / record["epoch"]
        if steps >= _TIME_TO_MOVE * all_steps:
            yield from self._stuck()
        yield from self._dying(record)
        yield from self._overwhelmed()
        is_last = next_steps > all_steps  # the next record is of settling, or there is none
        if is_last:
            yield from self._runs_away(record)
            yield from self._undecided(record)
        if steps >= _TIME_TO_MOVE * all_steps:
            yield from self._nothing_closes(is_last)

    def _new(self, complaints: Iterator[Complaint]) -> dict[str, str]:
        new = {}
        for about, text in complaints:
            opposite = _SLOWER if about in _FASTER else _FASTER if about in _SLOWER else set()
            if about not in self._said and self._said.isdisjoint(opposite):
                new[about] = text
                self._said.add(about)
        return new

    def _held(self) -> list[_Held]:
        """Return the optimizers that hold the gates, each with the gates' parameter group."""
        known = (optimizer for each in self._steppers if (optimizer := each()) is not None)
        return [
            (optimizer, group)
            for optimizer in known
            for group in optimizer.param_groups
            if any(p is self._gates.log_alpha for p in group["params"])
        ]

    def _overwritten(self) -> str:
        """Return the complaint if something has lowered the gates' rate; else an empty string."""
        rates = [float(group["lr"]) for _, group in self._held()]
        if not rates or max(rates) >= self._rate:
            return ""
        return (
            f"a learning rate scheduler, or the optimizer itself, has set the gates' rate to "
            f"{max(rates):.2g} in place of gate_lr={self._rate:g}. Call pruner.take_gates(): then "
            "they learn by an optimizer of their own, which no scheduler reaches"
        )

    def _not_learning(
        self, optimizers: Sequence[Optimizer], held: Sequence[_Held], is_taken: bool
    ) -> Iterator[Complaint]:
        """Complain if nothing moves the gates."""
        if not self._phases.learning:
            return
        if not self._gates.log_alpha.requires_grad:
            yield (
                "frozen",
                "the gates are frozen, so that none can close: something has set requires_grad of "
                "l0prune_gates.log_alpha to False. Freeze the weights alone, or set it back",
            )
        elif optimizers and not held and not is_taken:
            yield (
                "not in the optimizer",
                "no optimizer holds the gates (l0prune_gates.log_alpha), so that none can close. "
                "Make it over pruner.param_groups(...), or call pruner.take_gates()",
            )

    def _decayed(self, held: Sequence[_Held]) -> Iterator[Complaint]:
        """Complain if weight decay pulls the gates."""
        decay = max((float(group.get("weight_decay", 0.0)) for _, group in held), default=0.0)
        if decay:
            yield (
                "decayed",
                f"the optimizer decays the gates (weight_decay={decay:g}), which pulls log α to 0, "
                "neither open nor closed. Make it over pruner.param_groups(...), or call "
                "pruner.take_gates()",
            )

    def _out_of_reach(self, held: Sequence[_Held]) -> Iterator[Complaint]:
        """Complain if the gates cannot reach the point at which they close."""
        plain = any(isinstance(optimizer, SGD) for optimizer, _ in held)
        rate = max((float(group["lr"]) for _, group in held), default=self._rate)
        path = torch.linspace(self._threshold, float(self._start.max()), 100)
        pull = self._terms.pull(path) if plain else 1.0  # plain descent goes by the gradient
        if pull is None or not self._way or not self._phases.learning:
            return
        steps = self._phases.learning
        groups = [group for _, group in held] or [{}]
        longest = pull if plain else max(_longest_step(group, steps) for group in groups)
        reach = rate * longest * steps
        if reach < self._shortest and (overwritten := self._overwritten()):
            yield "out of reach", f"the gates hardly learn: {overwritten}"
        elif reach < self._shortest:
            enough = 2 * self._way / max(pull * steps, 1e-30)
            gradient = f" with gradients of {pull:.1g} at most" if plain else ""
            yield (
                "out of reach",
                "no gate can close in this run: the nearest starts "
                f"{self._shortest:.1f} above where it closes (in log α), and {steps} steps at "
                f"gate_lr={rate:g}{gradient} move it by {reach:.2g} at most. Give "
                f"gate_lr={enough:.1g} or more"
                + (", or Adam for the gates" if plain else ", or more epochs"),
            )

    def _stuck(self) -> Iterator[Complaint]:
        """Complain if the gates have hardly moved."""
        now = _values(self._gates.log_alpha)
        moved = float((now - self._start).abs().mean())
        if self._way and moved < _STUCK * self._way:
            cause = self._overwritten()
            if cause and "out of reach" in self._said:
                return  # the same cause was reported before
            advice = f"Give a larger gate_lr (now {self._rate:g}), or more epochs"
            yield (
                "stuck",
                f"the gates have hardly moved: by {moved:.2g} in log α, and they close after "
                f"{self._way:.1f}{f': {cause}' if cause else f'. {advice}'}",
            )

    def _nothing_closes(self, is_last: bool) -> Iterator[Complaint]:
        """Complain that λ is too small, unless gates may still close."""
        if self._terms.budget is not None or self._said & {"undecided", "stuck", "out of reach"}:
            return
        all_open = bool((_values(self._gates.log_alpha) > self._threshold).all())
        p = self._gates.open_probability().detach()
        if all_open and (is_last or bool((p > _UNDECIDED[1]).all())):
            yield (
                "nothing closes",
                "no gate has closed: closing any of them would cost more loss than λ saves. "
                "Give a larger λ, or a budget such as params=0.5",
            )

    def _dying(self, record: Record) -> Iterator[Complaint]:
        """Complain if an axis is about to lose its last slot."""
        p = self._gates.open_probability().detach()
        plan = self._gates.plan
        unneeded = idle(plan, plan.kept(self._gates.open()))
        for number, axis in enumerate(plan.axes):
            expected = float(p[axis.slice].sum())
            if unneeded[axis.slice].all() or number in plan.closing or axis.kind == BITS:
                continue  # its branch closes with it, or it may close; other bits are left
            if axis.size > _DYING and (axis.name in record["dead"] or expected < _DYING):
                yield (
                    f"dying: {axis.name}",
                    f"{axis.name} is about to lose all its slots: {expected:.1f} of {axis.size} "
                    "are expected to stay open. Unless there is a path around it, the network then "
                    f"passes nothing on. Protect it: lam={{'{axis.name}': 0, '*': …}}, or exclude "
                    "it from the gates",
                )

    def _undecided(self, record: Record) -> Iterator[Complaint]:
        """Complain if actual counts differ from expected ones."""
        p = self._gates.open_probability().detach()
        faster = self._said.isdisjoint(_SLOWER)
        count = int(((p > _UNDECIDED[0]) & (p < _UNDECIDED[1])).sum())
        found = amounts(record)
        if "nothing closes" in self._said:
            return  # a larger λ was advised: slow steps are another cause
        # Not measures of budgets: times are step functions, and differ from their expectation.
        for kind in ALWAYS:
            of = found[kind.name]
            if abs(of.expected - of.actual) > _APART * of.dense:
                yield (
                    "undecided",
                    f"{count} of {len(p)} gates are neither open nor closed when learning ends "
                    f"(they have not decided): training used {of.share(of.expected):.0%} of the "
                    f"{kind.label} on average, the fixed network has {of.share(of.actual):.0%}, so "
                    "that the two differ. Give more epochs"
                    + (f", or a larger gate_lr (now {self._rate:g})" * faster),
                )
                return

    def _runs_away(self, record: Record) -> Iterator[Complaint]:
        """Complain of multipliers that grow while the gates do not follow."""
        for text, of in record.get("budget", {}).items():
            if of["multiplier"] * self._terms.weight > _RUNAWAY and of["share"] > of["target"]:
                yield (
                    "runs away",
                    f"the multiplier of {text} has grown to {of['multiplier']:.1g}, since the "
                    f"gates do not follow: {of['share']:.0%} is left where {of['target']:.0%} is "
                    f"wanted by now. Give more epochs, or a larger gate_lr (now {self._rate:g})",
                )

    def _overwhelmed(self) -> Iterator[Complaint]:
        """Complain if the task's loss has grown and still grows."""
        if not self._losses:
            return
        first, last = self._losses[0], self._losses[-1]
        rising = len(self._losses) > 1 and last > self._losses[-2]
        if rising and last - first > max(first, _GROWTH):
            yield (
                "overwhelmed",
                f"the task's loss has grown from {first:.3g} to {last:.3g}, and still grows: the "
                "gates close faster than the weights can make up for it. Give a smaller λ, a "
                "larger budget, or more epochs",
            )


def closes_below(gate: Gate) -> float:
    """Return the largest log α at which a gate is closed in eval mode, by bisection."""
    low, high = -1e4, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        closed = not bool(gate.estimate(torch.tensor([middle], dtype=torch.float64)).any())
        low, high = (middle, high) if closed else (low, middle)
    return low


def _longest_step(group: dict[str, Any], steps: int) -> float:
    """Return a bound on the first ``steps`` updates of Adam with these betas, in learning rates.

    Steps are longer than the rate where gradients grow, as those of a penalty in its warm-up. By
    Cauchy and Schwarz (Σ β₁ᵏg)² ≤ Σ (β₁²/β₂)ᵏ · Σ β₂ᵏg².
    """
    first, second = group.get("betas", (0.9, 0.999))
    ratio = first**2 / second
    if ratio >= 1:
        return math.inf
    squares = (1 - ratio**steps) / (1 - ratio) * (1 - second**steps) / (1 - second)
    return float((1 - first) / (1 - first**steps) * squares**0.5)


def _values(log_alpha: Tensor) -> Tensor:
    return log_alpha.detach().cpu().double().clone()


def costly_compiling(seconds: Sequence[float], training: float) -> dict[str, str]:
    """Complain if compiling took a large part of the training time.

    ``seconds`` are those of each compilation, ``training`` those of all steps.
    """
    took = sum(seconds)
    if not seconds or took < _COMPILING * training:
        return {}
    times = "once" if len(seconds) == 1 else f"{len(seconds)} times, once for each size"
    return {
        "compiling": f"compiling took {took:.3g} of {training:.3g} s of training ({times}), which "
        "so few steps do not save: leave compile out, or give more epochs"
    }


def parted(records: Sequence[Record], *, augment: bool) -> dict[str, str]:
    """Complain, once in a run, if the test loss rises while the training loss falls.

    Both are compared with those of the epoch of the lowest test loss; the last record is the
    present one.
    """
    known = [each for each in records if "test_loss" in each]
    if len(known) < 2 or any(_PARTED in each.get("doctor", {}) for each in records):
        return {}
    best, now = min(known, key=lambda each: float(each["test_loss"])), known[-1]
    (train, low), (learned, test) = (
        (float(each["train_loss"]), float(each["test_loss"])) for each in (best, now)
    )
    if not (learned < (1 - _PART) * train and test > (1 + _PART) * low):
        return {}
    vary = "" if augment else "augment=True (where the data source can vary its examples), "
    return {
        _PARTED: f"since epoch {best['epoch']} the training loss has fallen from {train:.3g} to "
        f"{learned:.3g}, and the test loss has risen from {low:.3g} to {test:.3g}: the network "
        f"overfits. Give {vary}fewer epochs, more data, weight_decay or distill"
    }


def no_better_than_mean(records: Sequence[Record], of_mean: float | None) -> dict[str, str]:
    """Complain if a run ends at a test loss that the mean of the targets has, too."""
    last = records[-1].get("test_loss") if records else None
    if last is None or not of_mean or float(last) < of_mean:
        return {}
    return {
        "useless": f"the test loss of {float(last):.3g} is no less than that of a network that "
        f"always answers the mean of the targets ({of_mean:.3g}): what was learned is of no use. "
        "Give more epochs or data, a larger budget, or another learning rate"
    }


def diverged(
    what: str, where: str, settings: Settings, epochs_done: int, *, gated: bool
) -> TrainingError:
    """Return the error for a loss or weight that is nan or inf, with usual causes and remedies."""
    rate = "by the steps" if settings.gate_lr is None else f"{settings.gate_lr:g}"
    if settings.learn == GATES:
        causes, ways = (
            [f"a learning rate of the gates too high (gate_lr={rate})"],
            ["a smaller one"],
        )
    else:
        causes, ways = (
            [f"a learning rate too high (lr={settings.lr:g})"],
            ["a smaller lr", "clip=1.0"],
        )
        causes += [f"or one of the gates (gate_lr={rate})"] * gated
    causes.append("a nan in the data, or an infinite derivative (of a root or a logarithm at 0)")
    if settings.autocast == "fp16":
        causes.append("the range of fp16")
        ways.append("autocast='bf16'")
    return TrainingError(
        f"training stopped in {where}: {what}. Usual causes: {', '.join(causes)}. "
        f"Try {' or '.join(ways)}. {_kept(settings, epochs_done)}"
    )


def _kept(settings: Settings, epochs_done: int) -> str:
    if settings.out is None:
        return "There is no checkpoint, since out was not given."
    if not epochs_done:
        return "No epoch was done, so there is no checkpoint."
    return (
        f"The checkpoint of epoch {epochs_done} is in {settings.out}; "
        "with resume=True these changes apply from there."
    )
