"""The page: what was recorded is on it, as it was recorded, and nothing can break out."""

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from browser import BROWSER, browser
from reported import content, epoch, layer, look
from torch import nn

import l0prune
from benchmarks import pictures
from l0prune.features.page import elements, html
from l0prune.features.page.certificate import rows_of
from l0prune.features.page.time import by_block, groups_of, steps_of
from l0prune.features.page.verdict import verdict
from l0prune.report.content import (
    Axis,
    Comparison,
    Content,
    Fit,
    OwnerTime,
    SideChange,
    Training,
)

HOSTILE = {
    "tag": "<script>alert(1)</script><svg onload=alert(1)>",
    "attribute": '" onmouseover="alert(1)" x=\'',
    "template": "{{ 7 * 7 }}{% raw %}",
    "long": "encoder." * 400,
    "right to left": "שלום\u202eevil\u202c",
    "control": "a\x00b\x1b[31m\nc",
}


class Reader(HTMLParser):
    """The elements, their attributes, and the text of a page."""

    def __init__(self):
        super().__init__()
        self.elements, self.words, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    assert reader.open == []  # every element is closed
    return reader


def page(*given, **changes):
    return l0prune.Report(content(*given, **changes)).html()


def test_every_section_is_there_with_its_numbers():
    text = re.sub(r"\s+", " ", " ".join(read(page()).words))
    for said in (
        "keeps 28 % of its parameters and 40 % of its MACs",
        "3.2 times as fast",
        "changes from 12.50 % to 16.67 % error",
        "345,678", "1,234,567", "1.25 MB", "5 MB", "2.5 ms", "8 ms", "4.5 s",
        "✓ met", "budget macs=0.5 : 40 % remain, at most 50 % were allowed",
        "3.0e-07, allowed 1.0e-05", "8 → 3", "it feeds conv1", "−4 ms", "4 ms",
        "At step 20: conv1", "warm-up", "settle", "1 of 10 undecided (0.1 to 0.9) at the end",
        "the fine-tuned network with its gates (closed ones multiply by 0), not",
        "In settle (to step 30) all gates are fixed, undecided ones too: the most probable ones",
        "seed 7", "l0prune run conv1", "ab" * 32,
    ):  # fmt: skip
        assert said in text, said


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_are_text(name):
    reader = read(page(name))
    assert [tag for tag, _ in reader.elements].count("script") == 1
    assert not any(key.startswith("on") for _, found in reader.elements for key in found)
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", page(name))
    words = [t for t in reader.words if t.strip()]
    assert any(t == name or t.replace("\x00", "") == name.replace("\x00", "") for t in words)


def comparison(outputs, what="class", batch=2):
    error = max(outputs.values())
    return Comparison(
        what=what, dtype="float32", batch=batch, error=error, tolerance=1e-5, outputs=outputs
    )


def test_the_certificate_has_a_row_for_each_of_several_outputs():
    checks = [comparison({"boxes": 2e-7, "scores": 3e-6}, batch=n) for n in (1, 2)]
    alone = Comparison(what="onnx", dtype="float32", batch=1, error=1e-6, tolerance=1e-5)
    rows = rows_of([*checks, alone])
    assert [(row.name, row.errors) for row in rows] == [
        ("own class, float32, 2 outputs", ()),
        ("boxes", (2e-7, 2e-7)),
        ("scores", (3e-6, 3e-6)),
        ("ONNX file, float32", (1e-6,)),
    ]
    reader = read(page(certificate=checks))
    text = " ".join(reader.words)
    assert "3.0e-06, allowed 1.0e-05" in text
    assert reader.words.count("boxes") == 2 + 2 * 1  # two sizes of the picture, two comparisons


def test_of_many_outputs_those_that_differ_most_have_rows():
    outputs = {f"hidden_states_{n}": 1e-9 * (n + 1) for n in range(25)}
    heading, *rows = rows_of([comparison(outputs)])
    assert heading.name == "own class, float32, 25 outputs"
    assert [row.name for row in rows[:-1]] == [f"hidden_states_{n}" for n in range(18, 25)]
    assert rows[-1].name == "18 others, which differ less"
    assert len(rows[-1].errors) == 18


def test_nothing_comes_from_elsewhere():
    for tag, attributes in read(page()).elements:
        for key in ("src", "href", "srcset", "action", "data"):
            assert attributes.get(key, "data:,") == "data:,", (tag, attributes)
    assert "@import" not in page()
    assert "url(" not in page()


def test_every_picture_says_what_it_shows():
    pictures = re.findall(r"<svg.*?</svg>", page(), re.DOTALL)
    assert len(pictures) >= 12
    for each in pictures:
        assert re.match(r'<svg xmlns="[^"]+" viewBox="[^"]+" role="img"><title>[^<]{9,}', each)


def test_what_was_not_recorded_leaves_no_hole():
    bare = Content(title="x", made="", trainings=[Training(name="t", epochs=[])])
    text = l0prune.Report(bare).html()
    assert "<svg" not in text
    assert "Training: " not in text
    short = Training(name="t", planned=4, metric="error", epochs=[epoch(1)])
    assert "has done 1 of 4 epochs" in verdict(content(trainings=[short]))
    read(page(trainings=[short]))


def test_what_a_run_that_has_not_ended_has_is_so_far():
    short = Training(name="t", planned=4, metric="error", epochs=[epoch(1)])
    assert verdict(content(trainings=[short])).startswith("So far the network keeps")
    text = " ".join(read(page(trainings=[short], stopped="the <disk> is full")).words)
    assert "✓ met so far" in text
    assert "It stopped. The <disk> is full" in re.sub(r"\s+", " ", text)
    assert "so far" not in " ".join(read(page()).words).lower()


def test_each_choice_of_widths_is_a_row_of_its_budget():
    fit = Fit(looks=[look(4.0, 4.4), look(3.7, 3.9, chosen=True)])
    stages = [Training(name=f"round-{n}/finetune", epochs=[epoch(1)], fit=fit) for n in (1, 2)]
    found = groups_of(content(trainings=stages, fit=fit, time=None))
    assert [group.title for group in found] == [
        "Widths for latency=0.5",
        "Widths for latency=0.5, round-1/finetune",
        "Widths for latency=0.5, round-2/finetune",
    ]
    assert [(row.name, row.predicted, row.observed) for row in found[0].rows] == [
        ("choice 1", 4.0 / 8, 4.4 / 8),
        ("choice 2, taken", 3.7 / 8, 3.9 / 8),
    ]
    assert found[0].allowed == 0.5
    text = " ".join(read(page(trainings=stages, time=None)).words)
    assert "Predicted and timed" in text
    assert "Time by layer" not in text


def test_single_positions_of_flattened_maps_are_said_where_they_have_gates():
    maps = Axis(name="conv", kind="channel", before=32, after=7)
    fine = Axis(name="fc.in", kind="input", before=128, after=24)
    reads = SideChange(before=128, after=21, axes=[0, 1])
    layers = [layer("conv"), layer("fc", axes=()).model_copy(update={"input": reads})]
    text = re.sub(r"\s+", " ", " ".join(read(page(axes=[maps, fine], layers=layers)).words))
    assert "The inputs of fc are flattened maps" in text
    assert "flattened maps" in page(axes=[maps, fine], layers=layers, about="survey")
    alone = reads.model_copy(update={"axes": [1]})  # features of the data, of no map
    layers[1] = layers[1].model_copy(update={"input": alone})
    assert "flattened" not in page(axes=[maps, fine], layers=layers)


# What is written on what: words on grounds, reasons on grey bars, numbers of remarks and runs.
WRITTEN = [
    *(
        (words, ground)
        for words in ("ink", "soft", "accent", "bad")
        for ground in ("ground", "paper")
    ),
    ("ink", "whole"),
    ("ground", "ink"),
    ("ground", "soft"),
    ("soft", "phase"),
]


def luminance(color):
    """The relative luminance of WCAG 2."""
    parts = (
        [int(color[n : n + 2], 16) / 255 for n in (0, 2, 4)]
        if len(color) == 6
        else [int(digit * 2, 16) / 255 for digit in color]
    )
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(c * share for c, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_what_is_written_can_be_read_in_every_theme():
    style = (Path(html.__file__).parent / "page.css").read_text()
    themes = [
        dict(re.findall(r"--([\w-]+): #([0-9a-f]{3,6});", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(themes) == 3  # light, dark, printed
    for theme in themes:
        for words, ground in WRITTEN:
            dark, light = sorted(luminance(theme[name]) for name in (words, ground))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (words, ground, theme[words])


def test_only_a_page_of_a_run_that_goes_on_looks_again():
    report = l0prune.Report(content())
    assert 'http-equiv="refresh"' in report.html(live=True)
    assert 'http-equiv="refresh"' not in report.html()


def test_a_large_network_is_a_small_file_made_at_once():
    layers = [layer(f"layer{n // 50}.{n}.conv", 512, 100 + n, (n % 7,)) for n in range(160)]
    epochs = [epoch(n) for n in range(1, 301)]
    start = time.perf_counter()
    training = content().trainings[0].model_copy(update={"epochs": epochs, "steps": 3000})
    assert len(page(layers=layers, trainings=[training]).encode()) < 1_000_000
    assert time.perf_counter() - start < 5


def test_the_pictures_of_the_documentation_are_those_of_the_committed_run(tmp_path):
    docs = Path(__file__).parents[3] / "docs"
    pictures.write(docs / "digits-wide.report.json", tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (docs / path.name).read_text(), (
            "python -m benchmarks.pictures docs/digits-wide.report.json docs"
        )


def test_saved_beside_its_data(tmp_path):
    report = l0prune.Report(content())
    found = report.save(tmp_path)
    assert found == (tmp_path / "report.html", tmp_path / "report.json")
    assert l0prune.Report.load(found[1]).content == report.content
    assert report.save(tmp_path / "a.report.html")[1] == tmp_path / "a.report.json"
    with pytest.raises(l0prune.errors.FileError, match="page's path"):
        report.save(tmp_path / "report.json")
    assert 'srcdoc="&lt;!DOCTYPE html&gt;' in report._repr_html_()


def test_numbers_are_written_for_people():
    assert elements.ticks(0, 100) == [0, 50, 100]
    assert elements.ticks(0, 0.27) == pytest.approx([0, 0.1, 0.2])
    assert elements.ticks(-3, 5) == [-2, 0, 2, 4]
    assert [elements.size(n) for n in (12, 57_400, 2e9)] == ["12 bytes", "57.4 kB", "2 GB"]
    assert [elements.brief(n) for n in (7, 999.6, 91776)] == ["7", "1 k", "91.8 k"]
    assert [elements.duration(s) for s in (4.5, 600, 12000)] == ["4.5 s", "10 min", "3 h 20 min"]
    assert [elements.percent(p) for p in (0.10839, 1.0, 1.034)] == ["10.8 %", "100 %", "103.4 %"]


def test_the_waterfall_shows_blocks_where_there_are_many_modules():
    owners = [
        OwnerTime(name=f"layer{n // 10}.{n % 10}.conv{k}", before=2, after=1)
        for n in range(20)
        for k in (1, 2)
    ]
    blocks = by_block(owners)
    assert [each.name for each in blocks[:2]] == ["layer0.0", "layer0.1"]
    assert {(each.before, each.after) for each in blocks} == {(4, 2)}
    flat = by_block([OwnerTime(name=str(n), before=2, after=n / 40) for n in range(40)])
    assert len(flat) == 24
    steps = steps_of(flat)
    assert steps[0].after == 80
    assert steps[-1].after == pytest.approx(sum(n / 40 for n in range(40)))
    same = [
        *owners,
        OwnerTime(name="norm", before=3, after=3),
        OwnerTime(name="x", before=1, after=1),
    ]
    assert steps_of(same)[-2].name == "2 that hardly changed"
    (own, _) = by_block(
        [OwnerTime(name="", before=2, after=1), OwnerTime(name="a", before=1, after=1)]
    )
    assert own.name == "the model’s own forward"
    assert steps_of(same)[-1].after == 44


def test_a_survey_says_what_could_be_cut():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5))
    survey = l0prune.survey(network, torch.zeros(2, 3, 5, 5))
    report = l0prune.Report.of_survey(survey)
    found = report.content
    assert found.gain.params.after == pytest.approx(
        survey.params * survey.reachable("params"), abs=1
    )
    assert [layer.output.after for layer in found.layers] == [8, 0]
    text = " ".join(read(report.html()).words)
    assert "What could be cut" in text
    assert f"{survey.plan.size} gates" in text
    assert "removable" in text
    assert "→" not in text


NAMES = [
    pytest.param("conv1", (400, 1440), id="plain"),
    *(pytest.param(name, (400, 1440, 3840), id=kind) for kind, name in HOSTILE.items()),
]


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium")
@pytest.mark.parametrize(("name", "widths"), NAMES)
@pytest.mark.slow
def test_in_a_browser(name, widths, tmp_path):
    path, _ = l0prune.Report(content(name)).save(tmp_path)
    with browser() as opened:
        for width in widths:
            for dark in (False, True):
                opened.open(path, width, dark=dark)
                assert opened.complaints() == []
                assert opened.requested() == []
                assert opened.evaluate("document.documentElement.scrollWidth") <= width
                assert opened.evaluate(_LOWEST_CONTRAST) >= 4.5
        opened.evaluate("document.querySelector('th:nth-child(5) button').click()")
        found = opened.evaluate(
            "[...document.querySelectorAll('tbody td:nth-child(5)')]"
            ".filter(c => c.closest('.sortable')).map(c => c.dataset.value)"
        )
        assert found == ["3", "3", "10"]


# Of all text that is shown, by the formula of WCAG 2: (L1 + 0.05) / (L2 + 0.05).
_LOWEST_CONTRAST = """
(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = numbers(color).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if ((numbers(color)[3] ?? 1) > 0) return color;
    }
  };
  let lowest = 99;
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !node.getClientRects().length || node.matches("svg .number, title")) continue;
    const style = getComputedStyle(node);
    const pair = [light(node.closest("svg") ? style.fill : style.color), light(ground(node))];
    lowest = Math.min(lowest, (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05));
  }
  return lowest;
})()
"""
