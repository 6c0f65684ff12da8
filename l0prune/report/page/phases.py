"""Phases of a training, and the steps at which the network was cut."""

from __future__ import annotations

from dataclasses import dataclass

from l0prune.report.content import Training

_LEAST = 1e-6  # what is no rounding of a share


@dataclass(frozen=True)
class Span:
    """A phase, from step to step."""

    name: str
    start: float
    stop: float


def spans(training: Training) -> list[Span]:
    """The phases of a training with gates, as far as they are known."""
    if training.steps is None or training.warmup is None or training.settle is None:
        return []
    ends = (0, training.warmup, training.steps - training.settle, training.steps)
    names = ("warm-up", "prune", "settle")
    pairs = zip(names, ends, ends[1:], strict=False)
    return [Span(name, start, stop) for name, start, stop in pairs if stop > start]


def in_words(training: Training) -> str:
    """Up to which step each phase goes, and what the gates do in it."""
    steps = {span.name: f"{span.name} (to step {span.stop:,.0f})" for span in spans(training)}
    settle, learning, said = steps.pop("settle", ""), " and ".join(steps.values()), []
    if learning:
        said.append(f"Gates learn in {learning}.")
    if settle:
        has_budget = any(epoch.budgets for epoch in training.epochs)
        by_budget = "open as far as the budgets go, the likeliest first"
        rule = by_budget if has_budget else "open where their value without noise is above 0"
        said.append(
            f"In {settle} all gates stand, undecided ones too: {rule}, else closed. "
            "The weights learn on."
        )
    return " ".join(said)


def last_step(training: Training) -> float:
    """Return the last step."""
    return float(training.steps or training.epochs[-1].step)


@dataclass(frozen=True)
class Cut:
    """The epoch in which the network was made smaller while it trained.

    Attributes:
        start, stop: its steps.
        share: of their MACs, over those that they have at the network's whole size.
    """

    start: float
    stop: float
    share: float


def cuts(training: Training) -> list[Cut]:
    """Return the steps at which the network was cut, as far as recorded."""
    found, size, start = [], 1.0, 0.0
    for epoch, share in zip(training.epochs, step_shares(training), strict=True):
        if share is not None and share < size - _LEAST:
            found.append(Cut(start, float(epoch.step), share))
            size = share
        start = float(epoch.step)
    return found


def step_shares(training: Training) -> list[float | None]:
    """The share of its MACs that the network had in the steps of each epoch, where recorded."""
    found: list[float | None] = []
    done, work = 0, 0.0
    for epoch in training.epochs:
        if epoch.training_macs is None or epoch.step <= done:
            found.append(None)
            continue
        total = epoch.training_macs * epoch.step
        found.append((total - work) / (epoch.step - done))
        done, work = epoch.step, total
    return found
