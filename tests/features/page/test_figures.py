"""Every number of every figure is the one that report.json has: read back from the page."""

import re
from itertools import pairwise
from math import log10, sqrt

import pytest
from read_page import DRAWN, SVG, Page, at, both, groups, number, of_class, scale, titled
from reported import content

import l0prune
from l0prune.features.page import elements
from l0prune.report.content import Gain, Metric, Pair
from l0prune.report.report import report_of


def test_cards(page):
    data = page.data
    cards = re.findall(r'<div class="card">(.*?)</div>', page.text, re.DOTALL)
    shown = [[s.strip() for s in re.findall(r">([^<>]+)<", card) if s.strip()] for card in cards]
    by_label = {label: rest for label, *rest in shown}
    gain = data["gain"]
    for label, name, show in (
        ("Parameters", "params", elements.count),
        ("MACs of one example", "macs", elements.brief),
        ("ONNX file", "bytes", elements.size),
        ("Time of a call", "time", elements.milliseconds),
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
    assert of[0] == elements.metric(metric["name"], metric["after"])
    assert of[1] == f"from {elements.metric(metric['name'], metric['before'])}"
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
    assert said == {f"{elements.error(e)}, allowed {elements.error(t)}" for e, t in worst.values()}


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
        assert "Time by layer" not in page.text
        return
    owners = data["time"]["owners"]
    before = sum(of["before"] for of in owners)
    picture = page.picture("time", "From", wide)
    first, *steps, last = groups(picture)
    bar = first[1].find(f"{SVG}rect")
    left, unit = at(bar, "x"), at(bar, "width") / before
    assert elements.milliseconds(before) in first[0]
    place, close = before, DRAWN / unit
    for of, (title, group) in zip(owners, steps, strict=True):
        bars = group.findall(f"{SVG}rect")
        change = of["after"] - of["before"]
        if abs(change) < 0.002 * before:
            assert title.startswith("1 that hardly changed")
        else:
            sign = "−" if change < 0 else "+"
            assert f"{of['name']}: {sign}{elements.milliseconds(abs(change))}" in title
            ends = sorted((place, place + change))
            assert (at(bars[0], "x") - left) / unit == pytest.approx(ends[0], abs=2 * close)
            assert at(bars[0], "width") / unit == pytest.approx(abs(change), abs=2 * close)
        place += change
        assert f"{elements.milliseconds(of['filling'])} of what is left" in title
        end = (at(bars[1], "x") + at(bars[1], "width") - left) / unit
        assert end == pytest.approx(place, abs=3 * close)
        assert at(bars[1], "width") / unit == pytest.approx(of["filling"], abs=2 * close)
    assert elements.milliseconds(sum(of["after"] for of in owners)) in last[0]
    filling = sum(of["filling"] for of in owners)
    bars = last[1].findall(f"{SVG}rect")
    assert at(bars[0], "width") / unit == pytest.approx(place, abs=2 * close)
    assert at(bars[1], "width") / unit == pytest.approx(filling, abs=2 * close)
    assert f"Hollow: {elements.milliseconds(filling)}" in page.text


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
                    elements.percent(x) for x in expected[len(drawn) - 1]
                )
        for line in of_class(picture, "line", "limit"):
            allowed = 100 * looks[0]["allowed"] / looks[0]["dense"]
            assert share(at(line, "x1")) == pytest.approx(allowed, abs=2 * close)
    assert len(drawn) == len(expected)
    for found, wanted in zip(drawn, expected, strict=True):
        assert found == pytest.approx([100 * x for x in wanted], abs=0.1)


def test_budgets_and_files(page):
    data = page.data
    for asked in data["budgets"]:
        share, limit = (elements.percent(asked[name]) for name in ("share", "limit"))
        assert f"{share} remain, at most {limit} were allowed" in page.text
    for file in data["repeat"]["files"]:
        assert file["sha256"] in page.text
        assert elements.size(file["bytes"]) in page.text


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
