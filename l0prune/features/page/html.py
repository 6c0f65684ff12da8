"""Page of a report as HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from l0prune.doors import behind
from l0prune.errors import in_a_line, warn
from l0prune.features.page import elements
from l0prune.features.page.bits import bits_by_layer
from l0prune.features.page.certificate import certificate, grouped
from l0prune.features.page.elements import breakable, element
from l0prune.features.page.network import flattened, heads, network, sums
from l0prune.features.page.sweep import shown_costs, sweep
from l0prune.features.page.time import groups_of, predicted_and_measured, time_by_layer
from l0prune.features.page.training import curves, multipliers, phases_in_words, remarks
from l0prune.features.page.training import gate_histogram as gates
from l0prune.features.page.verdict import cards, is_unfinished, verdict
from l0prune.report.content import Content, Training

_FOLDER = Path(__file__).parent
_WIDE, _NARROW = 1000, 360  # pictures are drawn for both: scaled-down text would be illegible
_REFRESH = 20  # seconds


def html(content: Content, *, live: bool = False) -> str:
    """Render the page; a ``live`` one, of a run that goes on, reloads itself."""
    page = _environment().get_template("page.html")
    return page.render(
        content=content,
        verdict=verdict(content),
        cards=cards(content),
        pictures=_pictures(content),
        trainings=[_shown(training) for training in content.trainings if training.epochs],
        comparisons=grouped(content.certificate),
        flattened=flattened(content.layers, content.axes),
        change=partial(elements.change, is_survey=content.about == "survey"),
        sums=sums(content),
        others=[*_others(content)],
        commands=_commands(content),
        unfinished=is_unfinished(content),
        refresh=_REFRESH if live else None,
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup((_FOLDER / "page.js").read_text(encoding="utf-8")),
    )


def _others(content: Content) -> Iterator[tuple[str, Any]]:
    """Yield heading and text of the sections that features add; text is escaped, Markup is not."""
    for name, feature in behind("report_sections"):
        try:
            found = feature.load("report_sections", name)(content)
        except Exception as error:  # of a package of someone else
            warn(f"the report's section {name!r} of {feature.name} is left out: {in_a_line(error)}")
            continue
        if found is not None:
            yield found


def _commands(content: Content) -> list[str]:
    """Return the commands from the first to the last, each once."""
    of_trainings = [str(training.facts.get("command", "")) for training in content.trainings]
    before = content.repeat.commands or of_trainings
    return [each for each in dict.fromkeys([*before, content.repeat.command]) if each]


def _pictures(content: Content) -> dict[str, Markup]:
    """Return the pictures of all recorded data, by name."""
    found: dict[str, Markup] = {}
    of_heads = [axis for axis in content.axes if axis.kept is not None]
    for cost in shown_costs(content.runs):
        found[f"sweep {cost}"] = _both(partial(sweep, content.runs, cost))
    if content.certificate:
        found["certificate"] = _both(lambda width: certificate(content.certificate, width))
    if content.layers:
        layers, axes, is_survey = content.layers, content.axes, content.about == "survey"
        found["network"] = _both(lambda width: network(layers, axes, width, is_survey=is_survey))
    if of_heads:
        found["heads"] = _both(lambda width: heads(of_heads, width))
    if content.bits:
        found["bits"] = _both(partial(bits_by_layer, content.bits))
    if content.time is not None and content.time.owners:
        time = content.time
        found["time"] = _both(lambda width: time_by_layer(time, width))
    for number, group in enumerate(groups_of(content)):
        found[f"predicted {number}"] = _both(partial(predicted_and_measured, group))
    return found


def _shown(training: Training) -> dict[str, Any]:
    """Return a training with its pictures and the doctor's remarks, for the template."""
    pictures, details = (
        [_pair(*each) for each in zip(draw(training, _WIDE), draw(training, _NARROW), strict=True)]
        for draw in (curves, multipliers)
    )
    if any(epoch.gates for epoch in training.epochs):
        details.append(_both(lambda width: gates(training, width)))
    return {
        "of": training,
        "phases": phases_in_words(training),
        "pictures": pictures,
        "details": details,
        "remarks": remarks(training),
    }


def _both(draw: Callable[[int], Markup]) -> Markup:
    """Draw a picture for wide and for narrow screens, of which CSS shows one."""
    return _pair(draw(_WIDE), draw(_NARROW))


def _pair(wide: Markup, narrow: Markup) -> Markup:
    return element("div", wide, class_="wide") + element("div", narrow, class_="narrow")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "count": elements.count,
        "percent": elements.percent,
        "size": elements.size,
        "error": elements.error,
        "metric": lambda metric, value: elements.metric(metric.name, value),
        "ms": elements.milliseconds,
        "breakable": breakable,
        "json": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    }
    return made
