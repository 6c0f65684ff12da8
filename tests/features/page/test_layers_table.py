"""The table of layers has the numbers of report.json, and adds up."""

import re
from html import unescape

import pytest
from browser import BROWSER, browser
from reported import content, layer

import l0prune
from l0prune.features.page import elements
from l0prune.features.page.network import sums
from l0prune.report.content import Gain, Pair


def rows_of(text):
    """The cells of each row, as text."""
    rows = re.findall(r"<tr>\s*(<td.*?)</tr>", text, re.DOTALL)
    return [
        [unescape(re.sub(r"<[^>]+>", "", c)) for c in re.findall(r"<td.*?</td>", row, re.DOTALL)]
        for row in rows
    ]


def before_and_after(pair):
    before, after = (round(pair[name]) for name in ("before", "after"))
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"


def amounts(params, macs):
    """The four cells at the end of a row."""
    return [
        cell
        for pair in (params, macs)
        for cell in (
            before_and_after(pair),
            elements.percent(pair["after"] / pair["before"]) if pair["before"] else "–",
        )
    ]


def test_table_of_layers(page):
    data = page.data
    section = page.text[page.text.index('<h2 id="layers">') :]
    body, _, foot = section[: section.index("</table>")].partition("<tfoot>")
    for of, cells in zip(data["layers"], rows_of(body), strict=True):
        name, *reasons = [line.strip() for line in cells[1].splitlines()]
        assert name == of["name"]
        said = [
            f"{side}s: {of[side]['reason']}" for side in ("input", "output") if of[side]["reason"]
        ]
        assert "".join(reasons) == "".join(said)
        assert cells[3:5] == [before_and_after(of[side]) for side in ("input", "output")]
        assert cells[5:] == amounts(of["params"], of["macs"])
    whole, layers = data["gain"], data["layers"]
    rest = {
        unit: {
            end: whole[unit][end] - sum(layer[unit][end] for layer in layers)
            for end in ("before", "after")
        }
        for unit in ("params", "macs")
    }
    outside, total = rows_of(foot)
    assert outside == ["", "outside these layers", *amounts(rest["params"], rest["macs"])]
    assert total == ["", "total", *amounts(whole["params"], whole["macs"])]


def test_the_table_of_a_survey_adds_up_to_what_can_go():
    gain = Gain(params=Pair(before=310, after=125), macs=Pair(before=3000, after=1200))
    text = l0prune.Report(content(about="survey", gain=gain)).html()
    foot = re.sub(r"<[^>]+>|\s+", " ", text[text.index("<tfoot>") : text.index("</tfoot>")])
    assert re.sub(" +", " ", foot).split(" total ")[1].startswith("125 of 310 40.3 %")


def test_where_nothing_is_outside_the_layers_there_is_only_the_total():
    whole = Gain(params=Pair(before=300, after=120), macs=Pair(before=3000, after=1200))
    assert [each.name for each in sums(content(gain=whole))] == ["total"]
    more = whole.model_copy(update={"params": Pair(before=301, after=120)})
    assert [each.name for each in sums(content(gain=more))] == ["outside these layers", "total"]
    assert sums(content(gain=Gain())) == []


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium")
@pytest.mark.slow
def test_sorted_by_name_the_sums_stay_at_the_foot(tmp_path):
    path, _ = l0prune.Report(content(layers=[layer(name) for name in ("10", "9", "2")])).save(
        tmp_path
    )
    with browser() as opened:
        opened.open(path, 1200)
        opened.evaluate("document.querySelector('.broad th:nth-child(2) button').click()")
        rows = "[...document.querySelectorAll('.broad td:nth-child(2)')].map(c => c.innerText)"
        names = [cell.splitlines()[0] for cell in opened.evaluate(rows)]
    assert names == ["2", "9", "10", "total"]


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium")
@pytest.mark.slow
def test_the_table_of_layers_is_as_wide_as_its_column_unless_it_needs_more(tmp_path):
    long = [layer(f"encoder.layers.{n}.attention.query.projection") for n in range(3)]
    huge = [of.model_copy(update={"macs": Pair(before=10**15, after=10**14)}) for of in long]
    with browser() as opened:
        for layers, is_wider in ((content().layers, False), (huge, True)):
            path, _ = l0prune.Report(content(layers=layers)).save(tmp_path)
            for width in (400, 1200, 1440):
                opened.open(path, width)
                left, right, column = opened.evaluate(_EDGES)
                assert left == pytest.approx(width - right, abs=1)
                assert (left < column - 1) == (is_wider and width > 400)
                assert left >= 0


_EDGES = """
(() => {
  const table = document.querySelector(".broad"), box = table.getBoundingClientRect();
  const column = document.querySelector("h1").getBoundingClientRect().left;
  return [box.left, box.right, column];
})()
"""
