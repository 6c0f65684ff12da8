"""The figures of a training show the numbers of report.json: read back from the page."""

from itertools import pairwise
from math import ceil, sqrt

import pytest
from read_page import (
    DRAWN,
    SVG,
    Page,
    at,
    both,
    groups,
    number,
    of_class,
    scale,
    titled,
    varied,
)
from reported import content, epoch

import l0prune


def series(training):
    """What each panel has to show, by its title: by name the values at each step."""
    epochs = training["epochs"]
    found = {
        "Loss of the task": {
            name: [(e["step"], e[f"{name}_loss"]) for e in epochs if e[f"{name}_loss"] is not None]
            for name in ("train", "test")
        }
    }
    metric = training["metric"]
    if any(e["metric"] is not None for e in epochs):
        unit = 100 if metric == "error" else 1
        found[f"{metric.capitalize()} on the test data"] = {
            metric: [(e["step"], unit * e["metric"]) for e in epochs]
        }
    for measure in epochs[-1]["amounts"]:
        shares = {
            name: [
                (e["step"], 100 * a[name] / a["dense"])
                for e in epochs
                for a in [e["amounts"][measure]]
            ]
            for name in ("actual", "expected")
        }
        for budget in epochs[-1]["budgets"]:
            if budget.startswith(f"{measure}="):
                of = [(e["step"], 100 * e["budgets"][budget]["target"]) for e in epochs]
                shares["target"] = of
        label = {"macs": "MACs"}.get(measure, measure)
        found[f"{label}, % of"] = shares
    for budget in epochs[-1]["budgets"]:
        of = [(e["step"], e["budgets"][budget]["multiplier"]) for e in epochs]
        found[f"Multiplier of {budget}"] = {"λ": of}
    if any((e["training_macs"] or 1) < 1 for e in epochs):
        ends = [(0, 0.0), *((e["step"], e["step"] * e["training_macs"]) for e in epochs)]
        found["MACs of a training step"] = {
            "step": [
                (stop, 100 * (after - before) / (stop - start))
                for (start, before), (stop, after) in pairwise(ends)
            ]
        }
    return {title: {n: v for n, v in of.items() if v} for title, of in found.items()}


@both
def test_curves(page, wide):
    for section, training in page.sections():
        steps = training["steps"]
        for title, curves in series(training).items():
            picture = page.picture(section, title, wide)
            ticks = of_class(picture, "text", "tick")
            assert "step 0" in [t.text for t in ticks]
            heights = [
                (at(t, "y") - 4, number(t.text))
                for t in ticks
                if t.get("text-anchor") == "end" and at(t, "x") == 46
            ]
            if len(heights) < 2:
                continue  # a curve that never moves
            value, close = scale(heights)
            lines = picture.iter(f"{SVG}polyline")
            for (name, points), line in zip(curves.items(), lines, strict=True):
                drawn = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
                width = float(picture.get("viewBox").split()[2])
                xs = [(x - 52) / (width - 60) * steps for x, _ in drawn]
                assert xs == pytest.approx([step for step, _ in points], abs=DRAWN * steps / 300)
                assert [value(y) for _, y in drawn] == pytest.approx(
                    [v for _, v in points], abs=2 * close
                ), (title, name)


@both
def test_phases(page, wide):
    for section, training in page.sections():
        picture = page.picture(section, "Loss of the task", wide)
        spans = [title for title, _ in groups(picture) if ": steps " in title]
        if training["warmup"] is None:
            assert spans == []
            continue
        ends = (0, training["warmup"], training["steps"] - training["settle"], training["steps"])
        names = ("warm-up", "prune", "settle")
        assert spans == [
            f"{name}: steps {start} to {stop}"
            for name, (start, stop) in zip(names, pairwise(ends), strict=True)
        ]
        words = page.text[page.text.index(f'<h2 id="{section}">') :]
        for name, end in zip(names, ends[1:], strict=True):
            assert f"{name} (to step {end:,})" in words[: words.index("</p>")]
        in_epochs = [*dict.fromkeys(epoch["phase"] for epoch in training["epochs"])]
        for each in page.pictures(section, wide):  # above the curves and above the gates
            labels = of_class(each, "text", "phase")  # the latter of those that an epoch ends in
            assert_names(labels, names if len(labels) > len(in_epochs) else in_epochs, each)


def assert_names(labels, names, picture):
    """All of them are there, beside one another, within the picture."""
    assert [label.text for label in labels] == list(names)
    ends = [(at(label, "x"), at(label, "x") + 7 * len(label.text)) for label in labels]
    assert ends[0][0] >= 0
    assert ends[-1][1] <= float(picture.get("viewBox").split()[2])
    assert all(stop < start for (_, stop), (start, _) in pairwise(ends))


@both
@pytest.mark.parametrize(("warmup", "settle"), [(1, 1), (1, 98), (50, 49), (98, 1), (0, 100)])
def test_narrow_phases_have_names(wide, warmup, settle, tmp_path):
    phases = ["warm-up"] * warmup + ["prune"] * (100 - warmup - settle) + ["settle"] * settle
    training = (
        varied()
        .trainings[0]
        .model_copy(
            update={
                "steps": 1000,
                "warmup": 10 * warmup,
                "settle": 10 * settle,
                "epochs": [epoch(n, phase) for n, phase in enumerate(phases, start=1)],
            }
        )
    )
    page = Page(l0prune.Report(content(trainings=[training])), tmp_path)
    for picture in page.pictures("training1", wide):
        shown = names = list(dict.fromkeys(phases))
        if titled(picture).startswith("Epoch "):  # where not every epoch is a column
            shown = [name for name in names if name in shown_phases(phases)]
        assert_names(of_class(picture, "text", "phase"), shown, picture)


def shown_phases(phases):
    return phases[:: -ceil(len(phases) / 60)]


@both
def test_where_the_network_was_made_smaller(wide, tmp_path):
    picture = Page(l0prune.Report(varied()), tmp_path).picture("training1", "Loss", wide)
    marks = [title for title, _ in groups(picture) if "made smaller" in title]
    assert marks == [
        "The network was made smaller after step 10: 60 % of the MACs of a step, up to step 20",
        "The network was made smaller after step 20: 45 % of the MACs of a step, up to step 30",
    ]
    width = float(picture.get("viewBox").split()[2])
    lines = of_class(picture, "line", "cut")
    steps = [(at(line, "x1") - 52) / (width - 60) * 30 for line in lines]
    assert steps == pytest.approx([10, 20], abs=DRAWN * 30 / 300)


def test_what_training_at_a_smaller_size_cost(tmp_path):
    page = Page(l0prune.Report(varied()), tmp_path)
    assert "steps with gates at 68.3 % of their MACs" in page.text


@both
def test_gates(page, wide):
    for section, training in page.sections():
        epochs = [e for e in training["epochs"] if e["gates"]]
        epochs = epochs[:: -ceil(len(epochs) / 60) or -1][::-1]  # the last and each n-th before it
        pictures = [p for p in page.pictures(section, wide) if titled(p).startswith("Epoch ")]
        if not pictures:
            assert epochs == []
            continue
        (picture,) = pictures
        levels = of_class(picture, "line", "grid")
        floor = max(at(line, "y1") for line in levels)
        assert_columns(epochs, groups(picture), floor)
        undecided, top = of_class(picture, "line", "edge"), min(at(line, "y1") for line in levels)
        shares = [(floor - at(line, "y1")) / (floor - top) for line in undecided]
        assert shares == pytest.approx([0.1, 0.9], abs=0.001)
        assert_key(picture, epochs[-1])
        begins = [e for before, e in pairwise(epochs) if e["phase"] != before["phase"]]
        lines = of_class(picture, "line", "begins")
        (width,) = {
            at(c, "width") for _, column in groups(picture) for c in column.iter(f"{SVG}rect")
        }
        places = [(at(line, "x1") - 52) / width for line in lines]
        assert places == pytest.approx([epochs.index(e) for e in begins], abs=0.3)


def assert_key(picture, last):
    """Every shade, from one gate to all of them; and how many have not decided."""
    of_columns = {id(c) for _, group in groups(picture) for c in group.iter()}
    key = [r for r in picture.iter(f"{SVG}rect") if id(r) not in of_columns]
    assert [r.get("class") for r in key] == [f"s{n}" for n in range(1, 10)]
    words = [t.text for t in of_class(picture, "text", "tick")]
    assert "1 gate" in words
    assert f"all {sum(last['gates']):,}, by the square root" in words
    counts = last["gates"]
    low, high = (round(edge * len(counts)) for edge in (0.1, 0.9))
    said = f"{sum(counts[low:high]):,} of {sum(counts):,} undecided (0.1 to 0.9) at the end"
    assert said in words


def assert_columns(epochs, columns, floor):
    for e, (title, column) in zip(epochs, columns, strict=True):
        counts, total = e["gates"], sum(e["gates"])
        low, high = (round(edge * len(counts)) for edge in (0.1, 0.9))
        assert title == (
            f"Epoch {e['epoch']}: of {total:,} gates {sum(counts[high:]):,} are open, "
            f"{sum(counts[low:high]):,} undecided"
        )
        shades = [ceil(9 * sqrt(count / total)) for count in counts]
        cells = column.findall(f"{SVG}rect")
        places = {round((floor - at(c, "y")) / 7) - 1: c.get("class") for c in cells}
        assert places == {bin: f"s{shade}" for bin, shade in enumerate(shades) if shade}
