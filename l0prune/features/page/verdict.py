"""Headline and summary cards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from l0prune.features.page import elements
from l0prune.features.page.elements import plain
from l0prune.report.content import Content, Gain, Metric, Pair, Time, Training

_NOISY = 0.1  # spread of repeated timings above which they are inconclusive


@dataclass(frozen=True)
class Card:
    """Card of an amount before and after.

    Attributes:
        label: name of the amount.
        before: amount of the dense network; empty if unknown.
        after: amount of the small network.
        change: the change in words.
        share: share that is left, if less is better; else None.
        note: details of the amount.
    """

    label: str
    before: str
    after: str
    change: str = ""
    share: float | None = None
    note: str = ""


def verdict(content: Content) -> str:
    """Return the headline: gains, costs, and the certificate's result."""
    gain = content.gain
    if content.about == "survey":
        return _reach(content)
    if content.about == "sweep":
        return f"{len(content.runs)} runs, compared by cost and metric."
    shares = _shares(gain, "its")
    parts = [f"keeps {shares}"] if shares else []
    so_far, lines = is_unfinished(content), []
    time = gain.time if gain.time is not None and gain.time.share else None
    if time is not None and not time.is_undecided and not so_far:
        lines.append(_worth(time, [budget.text for budget in content.budgets]))
    elif time is not None:
        parts.insert(len(parts) if so_far else 0, _speed(time))
    if gain.metric is not None:
        parts.append(_metric(gain.metric))
    lines += [_sentence(parts, "So far the network" if so_far else "The network")] if parts else []
    if content.certificate:
        worst = max(check.error for check in content.certificate)
        passed = all(check.passed for check in content.certificate)
        found = f"largest difference {elements.error(worst)} of the output's scale"
        lines.append(
            f"Verified in {len(content.certificate)} comparisons: identical to the fine-tuned "
            f"network ({found if worst else 'no difference'})."
            if passed
            else "It does not compute the same function as the fine-tuned network."
        )
    lines += [
        f"The training “{t.name}” has done {len(t.epochs)} of {t.planned} epochs."
        for t in content.trainings
        if not t.finished
    ]
    return " ".join(lines) or "Nothing was recorded yet."


def _reach(content: Content) -> str:
    """Return the share of a network that gates could remove, in words."""
    gates = sum(axis.before for axis in content.axes)
    where = f"{gates:,} gates on {len(content.axes)} axes"
    return f"{where} can remove {_shares(content.gain, 'the') or 'nothing'}. Nothing is cut yet."


def is_unfinished(content: Content) -> bool:
    """Return whether a training has not ended, so that gates may still open and close."""
    return any(not training.finished for training in content.trainings)


def _sentence(parts: list[str], subject: str) -> str:
    *first, last = parts
    joined = f"{', '.join(first)}, and {last}" if first else last
    return f"{subject} {joined}."


def _shares(gain: Gain, whose: str) -> str:
    """Return the shares of parameters and MACs left (survey: removable); empty if unknown."""
    return " and ".join(
        f"{elements.percent(pair.share)} of {whose} {label}"
        for label, pair in (("parameters", gain.params), ("MACs", gain.macs))
        if pair is not None and pair.share is not None
    )


def _worth(time: Time, budgets: Sequence[str]) -> str:
    """Return a sentence of the speedup, beside what was asked and the ideal by MACs."""
    before, after = map(elements.milliseconds, (time.before, time.after))
    threads = f"{time.threads} thread{'s' if time.threads > 1 else ''}"
    said = f"{_pace(time)} ({before} → {after} on {time.runtime}, {threads})"
    asked = ", ".join(time.asked or budgets)
    said += f", asked {asked}" if asked else ""
    return said + (f", ideal by MACs {time.ideal:.3g} times." if time.ideal else ".")


def _speed(time: Time) -> str:
    if time.is_undecided:
        differ = f"repeated timings differ by {elements.percent(time.spread)}"
        if time.spread > _NOISY:
            return f"cannot be told from the dense one by its time ({differ})"
        return f"takes about as long ({differ})"
    return f"{'is' if time.after <= time.before else 'takes'} {_pace(time)}"


def _pace(time: Time) -> str:
    if time.is_undecided:
        return "too noisy to tell" if time.spread > _NOISY else "about as long"
    if time.after <= time.before:
        return f"{time.before / time.after:.3g} times as fast" if time.after else "at once"
    return f"{time.after / time.before:.3g} times as long"


def _metric(metric: Metric) -> str:
    name, after = _name(metric), elements.metric(metric.name, metric.after)
    if metric.before is None:
        return f"has {after} {name} on the test data"
    before = elements.metric(metric.name, metric.before)
    if before == after:
        return f"stays at {after} {name} on the test data"
    return f"changes from {before} to {after} {name} on the test data"


def _name(metric: Metric) -> str:
    return metric.name.removeprefix("test_").replace("_", " ")


def cards(content: Content) -> list[Card]:
    """Return the cards of all recorded amounts, the most important first."""
    gain = content.gain
    if content.about == "survey":
        return _survey_cards(gain)
    found = [
        _card("Parameters", gain.params, elements.count),
        _card("MACs of one example", gain.macs, elements.brief),
        _card("ONNX file", gain.bytes, elements.size),
        None if gain.time is None else _time_card(gain.time, gain.macs),
        None if gain.metric is None else _metric_card(gain.metric),
    ]
    if gain.seconds is not None:
        epochs = sum(len(training.epochs) for training in content.trainings)
        spent = elements.duration(gain.seconds)
        note = f"{epochs} epoch{'s' if epochs != 1 else ''} in all"
        note += _by_stage(content.trainings) + _saved(content.trainings)
        found.append(Card("Training", "", spent, note=note))
    return [card for card in found if card is not None]


def _by_stage(trainings: Sequence[Training]) -> str:
    """Return the duration of each stage in words; empty if there are fewer than two."""
    seconds = {t.name: [e.seconds for e in t.epochs if e.seconds is not None] for t in trainings}
    taken = [f"{plain(name)} {elements.duration(sum(of))}" for name, of in seconds.items() if of]
    return f": {', '.join(taken)}" if len(taken) > 1 else ""


def _saved(trainings: Sequence[Training]) -> str:
    """Return the share of MACs of the last training steps with gates, in words."""
    shares = [t.epochs[-1].training_macs for t in trainings if t.epochs]
    known = [share for share in shares if share is not None and share < 1]
    return f"; steps with gates at {elements.percent(known[-1])} of their MACs" if known else ""


def _card(label: str, pair: Pair | None, show: Callable[[float], str]) -> Card | None:
    if pair is None:
        return None
    before = "" if pair.before is None else show(pair.before)
    change = "" if pair.share is None else f"{elements.percent(pair.share)} kept"
    return Card(label, before, show(pair.after), change, pair.share)


def _survey_cards(gain: Gain) -> list[Card]:
    """Return the cards of a survey: total amounts, and the shares that can be removed."""
    pairs = (
        ("Parameters", gain.params, elements.count),
        ("MACs of one example", gain.macs, elements.brief),
    )
    return [
        Card(label, "", show(pair.before), f"{elements.percent(pair.share)} removable", pair.share)
        for label, pair, show in pairs
        if pair is not None and pair.before and pair.share is not None
    ]


def _time_card(time: Time, macs: Pair | None) -> Card:
    threads = f"{time.threads} thread{'s' if time.threads > 1 else ''}"
    lost = f". Most is lost in {'; '.join(time.losses)}" if time.losses else ""
    lost += f". What can help: {'; '.join(time.advice)}" if time.advice else ""
    is_told = time.is_undecided and time.spread <= _NOISY
    is_elsewhere = is_told and macs is not None and (macs.share or 1) < 1
    return Card(
        "Time of a call",
        elements.milliseconds(time.before),
        elements.milliseconds(time.after),
        _pace(time) + (": fewer MACs save no time here" if is_elsewhere else ""),
        time.share,
        f"{time.runtime}, {threads}, batch {time.batch}, {time.processor}; the middle half of "
        f"repeated timings differ by {elements.percent(time.spread)}{lost}",
    )


def _metric_card(metric: Metric) -> Card:
    def show(value: float) -> str:
        return elements.metric(metric.name, value)

    of_file = "" if metric.of_file is None else f"of the ONNX file: {show(metric.of_file)}"
    before = "" if metric.before is None else show(metric.before)
    better = "more is better" if metric.larger_is_better else "less is better"
    label = f"{_name(metric).capitalize()} on the test data"
    return Card(label, before, show(metric.after), better, note=of_file)
