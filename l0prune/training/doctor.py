"""The doctor: says when gates do not do what they are for, why, and what helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from l0prune.gating.kinds.base import Gate
from l0prune.training.controller import Controller
from l0prune.training.history import Record
from l0prune.training.phases import Phases

Complaint = tuple[str, str]
"""What it is about, of which we complain once, and the text."""

# Gates that moved less than this part of their way to being closed have not moved, …
_STUCK = 0.1
# … which can be said after this part of the steps in which they learn.
_TIME_TO_MOVE = 0.5
# P(z ≠ 0) of a gate that has not decided when learning ends.
_UNDECIDED = (0.1, 0.9)
# The share of the dense count by which expected and real ones may differ then.
_APART = 0.1
# So many open slots are expected of an axis that is about to die.
_DYING = 1.5
# The task's loss may grow by this, or by what it was at first if that is more.
_GROWTH = 0.5


class Doctor:
    """Watches the gates of one run, and complains of each thing once.

    Args:
        controller: the gates as they are before the first step.
        phases: of the run.
    """

    def __init__(self, controller: Controller, phases: Phases) -> None:
        self._controller, self._gates, self._phases = controller, controller.gates, phases
        self._rate = controller.gate_lr
        self._start = _values(self._gates.log_alpha)
        self._threshold = closes_below(self._gates.gate)
        self._way = float((self._start - self._threshold).clamp(min=0).mean())
        self._losses: list[float] = []
        self._said: set[str] = set()

    def go_on_from(self, records: Sequence[Record]) -> None:
        """Know what was measured and said before a stop."""
        self._losses = [float(record["train_loss"]) for record in records]
        self._said = {about for record in records for about in record.get("doctor", {})}

    def before(self, optimizers: Sequence[Optimizer]) -> dict[str, str]:
        """What is wrong before the first step."""
        return self._new(self._out_of_reach(optimizers))

    def after(self, record: Record) -> dict[str, str]:
        """What is wrong after an epoch with this record, while the model is as it was measured."""
        self._losses.append(float(record["train_loss"]))
        if record["phase"] == "settle":
            return {}
        return self._new(self._after(record))

    def _after(self, record: Record) -> Iterator[Complaint]:
        steps, all_steps = record["step"], self._phases.learning
        next_steps = steps + steps / record["epoch"]
        if steps >= _TIME_TO_MOVE * all_steps:
            yield from self._stuck()
        if next_steps > all_steps:  # what comes next is measured while settling, or not at all
            yield from self._undecided(record)
        yield from self._dying(record)
        yield from self._overwhelmed()

    def _new(self, complaints: Iterator[Complaint]) -> dict[str, str]:
        new = {about: text for about, text in complaints if about not in self._said}
        self._said |= new.keys()
        return new

    def _out_of_reach(self, optimizers: Sequence[Optimizer]) -> Iterator[Complaint]:
        """Can the gates get from where they start to where they close?"""
        plain = any(
            isinstance(optimizer, SGD) and any(p is self._gates.log_alpha for p in group["params"])
            for optimizer in optimizers
            for group in optimizer.param_groups
        )
        # Adam's steps are no longer than its rate; plain descent goes by the gradient.
        path = torch.linspace(self._threshold, float(self._start.max()), 100)
        pull = self._controller.pull(path) if plain else 1.0
        if pull is None or not self._way or not self._phases.learning:
            return
        reach = self._rate * pull * self._phases.learning
        if reach < self._way:
            enough = 2 * self._way / max(pull * self._phases.learning, 1e-30)
            gradient = f" with gradients of {pull:.1g} at most" if plain else ""
            yield (
                "out of reach",
                f"no gate can close in this run: they start {self._way:.1f} above where they "
                f"close (in log α), and {self._phases.learning} steps at gate_lr={self._rate:g}"
                f"{gradient} move them by {reach:.2g} at most. Give gate_lr={enough:.1g} or more"
                + (", or Adam for the gates" if plain else ", or more epochs"),
            )

    def _stuck(self) -> Iterator[Complaint]:
        """Have they moved at all?"""
        now = _values(self._gates.log_alpha)
        moved = float((now - self._start).abs().mean())
        if self._way and moved < _STUCK * self._way:
            yield (
                "stuck",
                f"the gates have hardly moved: by {moved:.2g} in log α, and they close after "
                f"{self._way:.1f}. Give a larger gate_lr (now {self._rate:g}), or more epochs",
            )
        elif bool((now > self._threshold).all()) and self._controller.budget is None:
            yield (
                "nothing closes",
                "no gate has closed: closing any of them would cost more loss than λ saves. "
                "Give a larger λ, or a budget such as params=0.5",
            )

    def _dying(self, record: Record) -> Iterator[Complaint]:
        """Is an axis about to lose its last slot?"""
        p = self._gates.open_probability().detach()
        for axis in self._gates.plan.axes:
            expected = float(p[axis.slice].sum())
            if axis.size > _DYING and (axis.name in record["dead"] or expected < _DYING):
                yield (
                    f"dying: {axis.name}",
                    f"{axis.name} is about to lose all its slots: {expected:.1f} of {axis.size} "
                    "are expected to stay open. Unless there is a path around it, the network then "
                    f"passes nothing on. Protect it: lam={{'{axis.name}': 0, '*': …}}, or exclude "
                    "it from the gates, or give a smaller λ or a larger budget",
                )

    def _undecided(self, record: Record) -> Iterator[Complaint]:
        """Is the real count what was expected?"""
        p = self._gates.open_probability().detach()
        count = int(((p > _UNDECIDED[0]) & (p < _UNDECIDED[1])).sum())
        for unit in ("params", "macs"):
            expected, real, dense = (record[f"{k}{unit}"] for k in ("expected_", "", "dense_"))
            if abs(expected - real) > _APART * dense:
                yield (
                    "undecided",
                    f"{count} of {len(p)} gates have not decided: {expected / dense:.0%} of the "
                    f"{unit} are expected to stay, {real / dense:.0%} do. So the network that "
                    "settles differs from the one that was trained. Give more epochs, or a larger "
                    f"gate_lr (now {self._rate:g})",
                )
                return

    def _overwhelmed(self) -> Iterator[Complaint]:
        """Does the task still matter beside the penalty?"""
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
    """The log α at and below which a gate is closed in eval mode, by bisection."""
    low, high = -1e4, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        closed = not bool(gate.estimate(torch.tensor([middle], dtype=torch.float64)).any())
        low, high = (middle, high) if closed else (low, middle)
    return low


def _values(log_alpha: Tensor) -> Tensor:
    return log_alpha.detach().cpu().double().clone()
