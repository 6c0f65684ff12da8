"""Wrong recipes: every message is in the package's own words, with what was probably meant."""

import re

import pytest

from l0prune import doors
from l0prune.errors import UsageError
from l0prune.features.recipes.files import WHOLE as RECIPE
from l0prune.features.recipes.files import load
from l0prune.training.fields import model_in

WHOLE = """
description = "A recipe to make mistakes in."
[model]
source = "net.py:build"
[data]
source = "digits"
"""
# Beginnings of pydantic's own sentences.
THEIRS = re.compile(r"Input should|Field required|Extra inputs|valid |Value error|ValidationError")
SECTIONS = {name: model_in(field) for name, field in RECIPE.model_fields.items()}
KEYS = [
    f"{section}.{key}"
    for section, model in SECTIONS.items()
    for key in (model.model_fields if model and section != "rounds" else ())
]


def test_a_section_of_a_feature_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(doors.BUILT_IN, "left_out", ("colours",))
    found = refused(WHOLE + "[colours]\nred = 1")
    assert found == "wrong.toml is no recipe here: this installation of l0prune has no feature " + (
        "'left_out'"
    )


def refused(text, overrides=()):
    """The message with which a recipe of this text is refused."""
    with open("wrong.toml", "w", encoding="utf-8") as file:
        file.write(text)
    with pytest.raises(UsageError) as caught:
        load("wrong.toml", overrides)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("key", [*(n for n in SECTIONS if n != "report"), *KEYS])
def test_a_value_of_the_wrong_type(key):
    message = refused(WHOLE, [f"{key}=2026-11-28"])
    assert f"{key} must be " in message
    assert not THEIRS.search(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "description is missing"),
        (WHOLE.replace("source", "sorce", 1), "model.source is missing: Code or"),
        (WHOLE.replace("source", "sorce", 1), "'sorce' in [model]; did you mean 'source'?"),
        (WHOLE + "[finetun]\nepochs = 3", "no setting 'finetun'; did you mean 'finetune'?"),
        (WHOLE + "[finetune]\nepocs = 3", "finetune: there is no setting 'epocs'"),
        (WHOLE + "[latency]\nthreads = 0", "latency.threads must be a whole number from 1"),
        (WHOLE + "[latency]\nsamples = 0", "latency.samples must be 'auto' or a whole number"),
        (WHOLE + "[[rounds]]\ngate = 1", "rounds[1].gate must be a table of settings, not 1"),
        (WHOLE + "[[rounds]]\n[rounds.fit]\nscor = 1", "'scor' in [rounds[1].fit]"),
        (WHOLE + "[fit]\nbudget = 'mac=0.5'\ntarget = 'onxruntime'", "mean 'onnxruntime'?"),
        (WHOLE + "[finetune]\nbudget = 'flops=0.5'", "not 'flops'; did you mean 'macs'?"),
        (WHOLE + "[finetune]\nbudget = 'macs=0.5%'", "write macs=0.5 or macs=50%"),
        (WHOLE + "[gate]\nkind = 'hard'", "did you mean 'hard-concrete'?"),
    ],
)
def test_a_mistake_is_named_with_its_place(text, message):
    found = refused(text)
    assert message in found
    assert not THEIRS.search(found)
