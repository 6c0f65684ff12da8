import json

import pytest
from reported import content

import l0prune
from l0prune.errors import FileError
from l0prune.report.content import BudgetResult, Content, parsed


def test_most_of_it_may_be_absent():
    found = parsed('{"version": 1, "kind": "l0prune report", "title": "x", "made": ""}', "x")
    assert found == Content(title="x", made="")
    assert "Nothing was recorded" in l0prune.Report(found).html()


FOREIGN = {
    "no json": "{",
    "nothing": "",
    "no table": "[1]",
    "another file": '{"version": 1, "origin": {}}',
    "other kind": '{"version": 1, "kind": "shopping list", "title": "x", "made": "x"}',
    "deep": "[" * 100_000,
    "newer": '{"version": 99}',
    "a text for a number": json.dumps(content().model_dump() | {"budgets": [{"text": "x"}]}),
    "nan": content().model_dump_json().replace('"seconds":4.5', '"seconds":NaN'),
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_broken_or_foreign_file_is_said_in_a_sentence(text, tmp_path):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(FileError, match=r"json (is damaged|was written by a newer)") as said:
        l0prune.Report.load(tmp_path / "report.json")
    assert len(str(said.value)) < 300


def test_a_budget_is_met_where_the_share_is_within_it():
    assert BudgetResult(text="macs=0.5", limit=0.5, share=0.5).met
    assert not BudgetResult(text="macs=0.5", limit=0.5, share=0.51).met
