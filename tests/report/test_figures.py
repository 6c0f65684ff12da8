"""Every number of every figure is the one that report.json has: read back from the page."""

import json
import re
from itertools import pairwise
from math import ceil, log10, sqrt
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reported import content, epoch, owner

import l0prune
from l0prune.report.content import Gain, Metric, Pair
from l0prune.report.page import numbers
from l0prune.report.run_folder import report_of

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = 0.11  # positions are written to a tenth of a point
COMMITTED = Path(__file__).parents[2] / "docs" / "digits-lenet.report.json"

# MACs of all steps up to the end of each epoch of ten: after the first, 60 and 45 % of a step.
WORK = {1: 10.0, 2: 16.0, 3: 20.5}


def varied():
    """A run in which no two numbers are alike, with several outputs and a layer that got slower."""
    made = content("conv1")
    epochs = [
        epoch(n).model_copy(
            update={
                "train_loss": 1 / (n + 0.3),
                "test_loss": 1.7 / (n + 0.1),
                "metric": 0.4 / n**1.1,
                "gates": [7 * n, n, 3, *[0] * 14, 2 * n, 5, 40 - n],
                "training_macs": WORK[n] / (10 * n),
            }
        )
        for n in (1, 2, 3)
    ]
    training = made.trainings[0].model_copy(update={"epochs": epochs})
    checks = [
        check.model_copy(update={"error": max(of.values()), "outputs": of})
        for check, of in zip(
            made.certificate,
            ({"a": 2e-8, "b": 3e-7}, {"a": 5e-8, "b": 0.0}, {}, {}),
            strict=True,
        )
        if of
    ] + made.certificate[2:]
    owners = [owner("conv1", 5, 1.5, 0.75), owner("b", 3, 3.4, 0.5), owner("c", 1, 1.001, 0.1)]
    time = made.time.model_copy(update={"owners": owners})
    return made.model_copy(update={"trainings": [training], "certificate": checks, "time": time})


class Page:
    """A page as it was saved, and the data that was written beside it.

    Attributes:
        text: the HTML.
        data: ``report.json``, as JSON reads it.
    """

    def __init__(self, report, folder):
        page, data = report.save(folder)
        self.text, self.data = page.read_text(), json.loads(data.read_text())
        self._pictures = {}
        for section in self.text.split("<section")[1:]:
            name = re.search(r'aria-label(?:ledby)?="([^"]+)"', section)[1]
            for kind in ("wide", "narrow"):
                drawn = re.findall(rf'<div class="{kind}">(<svg.*?</svg>)</div>', section)
                self._pictures[name, kind] = list(map(ElementTree.fromstring, drawn))

    def pictures(self, section, wide):
        """Those of a section, for wide or for narrow screens."""
        return self._pictures.get((section, "wide" if wide else "narrow"), [])

    def picture(self, section, start, wide):
        """The one whose title starts so."""
        (found,) = [p for p in self.pictures(section, wide) if titled(p).startswith(start)]
        return found

    def sections(self):
        """Each training with the name of its section."""
        done = [training for training in self.data["trainings"] if training["epochs"]]
        return [(f"training{n}", training) for n, training in enumerate(done, start=1)]


@pytest.fixture(scope="module", params=["varied", "committed"])
def page(request, tmp_path_factory):
    is_committed = request.param == "committed"
    report = l0prune.Report.load(COMMITTED) if is_committed else l0prune.Report(varied())
    return Page(report, tmp_path_factory.mktemp("saved"))


def titled(picture):
    return picture.find(f"{SVG}title").text


def groups(picture):
    """What is under a title of its own, by that title, in order."""
    return [
        (title.text, group)
        for group in picture.iter(f"{SVG}g")
        if (title := group.find(f"{SVG}title")) is not None
    ]


def of_class(node, tag, name):
    return [e for e in node.iter(SVG + tag) if name in (e.get("class") or "").split()]


def at(element, name):
    return float(element.get(name))


def scale(places):
    """From a position to a value, by the two outermost of (position, value)."""
    (x0, v0), (x1, v1) = min(places), max(places)
    return lambda x: v0 + (x - x0) * (v1 - v0) / (x1 - x0), abs(v1 - v0) / (x1 - x0) * DRAWN


def number(text):
    factor = {"k": 1e3, "M": 1e6}.get(text[-1], 1)
    return float(text.rstrip(" kM%").replace(",", "")) * factor


both = pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])


def test_cards(page):
    data = page.data
    cards = re.findall(r'<div class="card">(.*?)</div>', page.text, re.DOTALL)
    shown = [[s.strip() for s in re.findall(r">([^<>]+)<", card) if s.strip()] for card in cards]
    by_label = {label: rest for label, *rest in shown}
    gain = data["gain"]
    for label, name, show in (
        ("Parameters", "params", numbers.count),
        ("MACs of one example", "macs", numbers.brief),
        ("ONNX file", "bytes", numbers.size),
        ("Time of a call", "time", numbers.milliseconds),
    ):
        pair = gain[name]
        if pair is None:
            assert label not in by_label
            continue
        after, *rest = by_label[label]
        assert after == show(pair["after"])
        if pair["before"] is not None:
            assert rest[0] == f"from {show(pair['before'])}"
    metric = gain["metric"]
    of = by_label[f"{metric['name'].capitalize()} on the test data"]
    assert of[0] == numbers.metric(metric["name"], metric["after"])
    assert of[1] == f"from {numbers.metric(metric['name'], metric['before'])}"
    meters = [float(w) for w in re.findall(r'<i style="width:([\d.]+)%"', page.text)]
    pairs = [gain[name] for name in ("params", "macs", "bytes", "time")]
    shares = [p["after"] / p["before"] for p in pairs if p and p["before"]]
    assert meters == [min(round(100 * share, 1), 100) for share in shares]


@both
def test_certificate(page, wide):
    data = page.data
    picture = page.picture("certificate", f"{len(data['certificate'])} comparisons", wide)
    ticks = [(at(t, "x"), log10(float(t.text))) for t in of_class(picture, "text", "tick")[1:]]
    exponent, close = scale(ticks)
    drawn = {round(exponent(at(dot, "cx")), 1) for dot in of_class(picture, "circle", "dot")}
    errors = [
        error
        for check in data["certificate"]
        for error in (check["outputs"].values() or [check["error"]])
    ]
    assert close < 0.05
    assert drawn == {round(log10(max(error, 1e-17)), 1) for error in errors}
    assert len(of_class(picture, "circle", "dot")) == len(errors)
    limits = {round(exponent(at(line, "x1")), 1) for line in of_class(picture, "line", "limit")}
    assert limits == {round(log10(check["tolerance"]), 1) for check in data["certificate"]}
    said = {text.text for text in of_class(picture, "text", "value")}
    worst = {}
    for check in data["certificate"]:
        for output, error in (check["outputs"] or {"": check["error"]}).items():
            key = (check["what"], check["part"], check["dtype"], output)
            worst[key] = max(worst.get(key, (0, 0)), (error, check["tolerance"]))
    assert said == {f"{numbers.error(e)} of {numbers.error(t)}" for e, t in worst.values()}


@both
def test_network(page, wide):
    data = page.data
    picture = page.picture("network", f"{len(data['layers'])} layers", wide)
    by_name = {layer["name"]: layer for layer in data["layers"]}
    longest = {}
    for title, group in groups(picture):
        bars = group.findall(f"{SVG}rect")
        if not bars:
            continue  # a tie
        name, _, _ = title.rpartition(", " + title.split(", ")[1].split(":")[0] + ":")
        layer = by_name[name.removesuffix(" (inputs)")]
        side = layer["input" if name.endswith(" (inputs)") else "output"]
        was, left = (at(bar, "width") for bar in bars)
        is_whole = side["before"] == side["after"]
        assert f"{side['before']:,}" + ("" if is_whole else f" → {side['after']:,}") in title
        assert (group.findall(f"{SVG}text")[-1].text).startswith(f"{side['before']:,}")
        assert left / was == pytest.approx(side["after"] / side["before"], abs=DRAWN / was * 2)
        longest[was] = side["before"]
    lengths = sorted(longest.items())
    for (short, few), (long, many) in pairwise(lengths):
        if short > 10.5:  # below, bars have the least length
            assert long / short == pytest.approx(sqrt(many / few), rel=0.01)
    ties = [t for t, _ in groups(picture) if "share the axis" in t]
    shared = {n for n, axis in enumerate(data["axes"]) if any(axis["name"] in t for t in ties)}
    assert shared


@both
def test_heads(page, wide):
    data = page.data
    axes = [axis for axis in data["axes"] if axis["kept"] is not None]
    if not axes:
        assert "Attention heads" not in page.text
        return
    picture = page.picture("network", "Attention heads", wide)
    for axis, (title, group) in zip(axes, groups(picture), strict=True):
        assert title == f"{axis['name']}: {axis['after']} of {axis['before']} heads"
        squares = group.findall(f"{SVG}rect")
        kept = [n for n, square in enumerate(squares) if square.get("class") == "kept"]
        assert (kept, len(squares)) == (axis["kept"], axis["before"])


@both
def test_time(page, wide):
    data = page.data
    if data["time"] is None:
        assert "Which layers paid in time" not in page.text
        return
    owners = data["time"]["owners"]
    before = sum(of["before"] for of in owners)
    picture = page.picture("time", "From", wide)
    first, *steps, last = groups(picture)
    bar = first[1].find(f"{SVG}rect")
    left, unit = at(bar, "x"), at(bar, "width") / before
    assert numbers.milliseconds(before) in first[0]
    place, close = before, DRAWN / unit
    for of, (title, group) in zip(owners, steps, strict=True):
        bars = group.findall(f"{SVG}rect")
        change = of["after"] - of["before"]
        if abs(change) < 0.002 * before:
            assert title.startswith("1 that hardly changed")
        else:
            sign = "−" if change < 0 else "+"
            assert f"{of['name']}: {sign}{numbers.milliseconds(abs(change))}" in title
            ends = sorted((place, place + change))
            assert (at(bars[0], "x") - left) / unit == pytest.approx(ends[0], abs=2 * close)
            assert at(bars[0], "width") / unit == pytest.approx(abs(change), abs=2 * close)
        place += change
        assert f"{numbers.milliseconds(of['filling'])} of what is left" in title
        end = (at(bars[1], "x") + at(bars[1], "width") - left) / unit
        assert end == pytest.approx(place, abs=3 * close)
        assert at(bars[1], "width") / unit == pytest.approx(of["filling"], abs=2 * close)
    assert numbers.milliseconds(sum(of["after"] for of in owners)) in last[0]
    filling = sum(of["filling"] for of in owners)
    bars = last[1].findall(f"{SVG}rect")
    assert at(bars[0], "width") / unit == pytest.approx(place, abs=2 * close)
    assert at(bars[1], "width") / unit == pytest.approx(filling, abs=2 * close)
    assert f"Hollow: {numbers.milliseconds(filling)}" in page.text


@both
def test_predicted_and_timed(page, wide):
    data = page.data
    looks = [look for t in data["trainings"] if t["fit"] for look in t["fit"]["looks"]]
    expected = [(e["predicted"] / e["dense"], e["observed"] / e["dense"]) for e in looks]
    time = data["time"]
    if time is not None:
        predicted = [sum(of[at] for of in time["owners"]) for at in ("before", "after")]
        shares = [of / time["measured"] for of in predicted]
        expected += zip(shares, (1.0, time["timed"]), strict=True)
    drawn = []
    for picture in page.pictures("time", wide):
        if "predicted → timed" not in titled(picture):
            continue
        share, close = scale(
            [(at(t, "x"), number(t.text)) for t in of_class(picture, "text", "tick")]
        )
        assert close < 0.05
        for _, group in groups(picture):
            if rings := of_class(group, "circle", "hollow"):
                (dot,) = of_class(group, "circle", "dot")
                drawn.append((share(at(rings[0], "cx")), share(at(dot, "cx"))))
                (value,) = of_class(group, "text", "value")
                assert value.text == " → ".join(
                    numbers.percent(x) for x in expected[len(drawn) - 1]
                )
        for line in of_class(picture, "line", "limit"):
            allowed = 100 * looks[0]["allowed"] / looks[0]["dense"]
            assert share(at(line, "x1")) == pytest.approx(allowed, abs=2 * close)
    assert len(drawn) == len(expected)
    for found, wanted in zip(drawn, expected, strict=True):
        assert found == pytest.approx([100 * x for x in wanted], abs=0.1)


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
        columns = [found for picture in pictures for found in groups(picture)]
        assert_columns(epochs, columns)


def assert_columns(epochs, columns):
    for e, (title, column) in zip(epochs, columns, strict=True):
        counts, total = e["gates"], sum(e["gates"])
        low, high = (round(edge * len(counts)) for edge in (0.1, 0.9))
        assert title == (
            f"Epoch {e['epoch']}: of {total:,} gates {sum(counts[high:]):,} are open, "
            f"{sum(counts[low:high]):,} undecided"
        )
        shades = [ceil(9 * sqrt(count / total)) for count in counts]
        cells = column.findall(f"{SVG}rect")
        places = {
            round((28 + 7 * (len(counts) - 1) - at(c, "y")) / 7): c.get("class") for c in cells
        }
        assert places == {bin: f"s{shade}" for bin, shade in enumerate(shades) if shade}


def test_table_of_layers(page):
    data = page.data
    section = page.text[page.text.index('<h2 id="layers">') :]
    rows = re.findall(r"<tr>\s*(<td.*?)</tr>", section[: section.index("</table>")], re.DOTALL)
    for layer, row in zip(data["layers"], rows, strict=True):
        cells = [re.sub(r"<[^>]+>", "", c) for c in re.findall(r"<td.*?</td>", row, re.DOTALL)]
        params, macs = layer["params"], layer["macs"]
        assert cells[1] == layer["name"]
        for cell, side in zip(cells[3:5], (layer["input"], layer["output"]), strict=True):
            same = side["before"] == side["after"]
            assert cell == f"{side['before']:,}" + ("" if same else f" → {side['after']:,}")
        amounts = (params["before"], params["after"], macs["before"], macs["after"])
        assert cells[5:9] == [f"{round(amount):,}" for amount in amounts]
        share = macs["after"] / macs["before"] if macs["before"] else None
        assert cells[9] == ("–" if share is None else numbers.percent(share))


def test_budgets_and_files(page):
    data = page.data
    for asked in data["budgets"]:
        share, limit = (numbers.percent(asked[name]) for name in ("share", "limit"))
        assert f"{share} is left, at most {limit} was asked for" in page.text
    for file in data["repeat"]["files"]:
        assert file["sha256"] in page.text
        assert numbers.size(file["bytes"]) in page.text


@both
def test_sweep(tmp_path, wide):
    for name, macs, error in (("a", 517, 0.021), ("b", 305, 0.043), ("c", 411, 0.0507)):
        (tmp_path / name).mkdir()
        metric = Metric(name="error", before=0.0113, after=error)
        gain = Gain(macs=Pair(before=1000, after=macs), metric=metric)
        l0prune.Report(content(gain=gain)).save(tmp_path / name)
    page = Page(report_of(tmp_path), tmp_path)
    data = page.data
    picture = page.picture("runs", "Error in % over MACs", wide)
    ticks = of_class(picture, "text", "tick")
    value, close = scale(
        [
            (at(t, "y") - 4, number(t.text))
            for t in ticks
            if t.get("text-anchor") == "end" and at(t, "x") == 50
        ]
    )
    share, narrow = scale(
        [(at(t, "x"), number(t.text)) for t in ticks if t.get("text-anchor") == "middle"]
    )
    drawn = {
        group.findall(f"{SVG}text")[-1].text: group.find(f"{SVG}circle")
        for _, group in groups(picture)
    }
    for n, run in enumerate(data["runs"], start=1):
        dot, macs = drawn[str(n)], run["costs"]["macs"]
        assert share(at(dot, "cx")) == pytest.approx(
            100 * macs["after"] / macs["before"], abs=2 * narrow
        )
        assert value(at(dot, "cy")) == pytest.approx(100 * run["metric"]["after"], abs=2 * close)
    dense = data["runs"][0]["metric"]["before"]
    assert value(at(drawn["dense"], "cy")) == pytest.approx(100 * dense, abs=2 * close)
