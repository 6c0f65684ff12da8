"""Training curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from l0prune.plan.measures import kind_of, names
from l0prune.report.content import Training
from l0prune.report.page.panel import Curve, Point, cuts, panel, step_shares
from l0prune.training.history import IN_PERCENT


def remarks(training: Training) -> list[tuple[float, str]]:
    """Return the doctor's remarks, each with its step."""
    return [(float(e.step), text) for e in training.epochs for text in e.doctor.values()]


def curves(training: Training, width: int) -> list[Markup]:
    """A panel for each thing that was measured.

    Args:
        training: with one epoch at least.
        width: of the pictures.
    """
    epochs = training.epochs
    said = [step for step, _ in remarks(training)]
    losses = _curves(
        training, train=[e.train_loss for e in epochs], test=[e.test_loss for e in epochs]
    )
    found = []
    if losses:
        title = "Loss of the task"
        found.append(panel(title, losses, training, width, marks=said, from_zero=True))
    metric = _curves(training, **{training.metric: [_scaled(e.metric, training) for e in epochs]})
    if metric and training.metric != "test_loss":
        unit = ", %" if training.metric in IN_PERCENT else ""
        title = f"{training.metric.capitalize()} on the test data{unit}"
        is_error = training.metric in IN_PERCENT and not training.larger_is_better
        found.append(panel(title, metric, training, width, from_zero=is_error))
    for measure in dict.fromkeys(name for epoch in epochs for name in epoch.amounts):
        of = _cost(training, measure)
        found.append(
            panel(
                f"{_label(measure)}, % of the dense network’s", of, training, width, from_zero=True
            )
        )
    if cuts(training):
        title = "MACs of a training step, % of the whole network’s"
        of = _curves(training, step=[_percent(share) for share in step_shares(training)])
        found.append(panel(title, of, training, width, from_zero=True))
    for budget in dict.fromkeys(asked for epoch in epochs for asked in epoch.budgets):
        of = _curves(
            training,
            λ=[e.budgets[budget].multiplier if budget in e.budgets else None for e in epochs],
        )
        found.append(panel(f"Multiplier of {budget}", of, training, width, from_zero=True))
    return found


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _label(measure: str) -> str:
    """Return a measure's label; the name of one that is not registered here."""
    return kind_of(measure).label if measure in names() else measure


def _scaled(value: float | None, training: Training) -> float | None:
    return value if value is None or training.metric not in IN_PERCENT else 100 * value


def _cost(training: Training, measure: str) -> list[Curve]:
    """Return the curves of a measure: expected, of an export, and the budget's target."""
    expected, actual, target = [], [], []
    for epoch in training.epochs:
        of = epoch.amounts.get(measure)
        dense = 0.0 if of is None else of.dense
        expected.append(None if of is None or not dense else 100 * of.expected / dense)
        actual.append(None if of is None or not dense else 100 * of.actual / dense)
        aims = [b.target for text, b in epoch.budgets.items() if text.startswith(f"{measure}=")]
        target.append(100 * aims[0] if aims else None)
    return _curves(training, actual=actual, expected=expected, target=target)


def _curves(training: Training, **series: Sequence[float | None]) -> list[Curve]:
    """The series of which anything was recorded."""
    steps = [float(epoch.step) for epoch in training.epochs]
    return [
        Curve(name, points)
        for name, values in series.items()
        if (points := tuple(_known(zip(steps, values, strict=True))))
    ]


def _known(pairs: Iterable[tuple[float, float | None]]) -> Iterable[Point]:
    return ((step, value) for step, value in pairs if value is not None)
