import inspect
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from l0prune.cli.finetune import finetune
from l0prune.cli.options import key_and_value, key_values, with_settings
from l0prune.errors import UsageError
from l0prune.training.settings import Settings


def made(*names):
    """A command with these settings, and what came to it."""
    app, came = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @with_settings(*names)
    def command(
        first: Annotated[str, typer.Argument()], *, settings: dict[str, Any], last: int = 3
    ) -> None:
        came.append((first, settings, last))

    return app, came


def test_what_is_given_comes_by_the_settings_names_and_nothing_else_does():
    app, came = made("lam", "budget", "lr", "augment", "learn", "epochs")
    given = ["x", "--lambda", "1/N", "--budget", "macs=0.5", "--budget", "params=0.5",
             "--no-learn", "--last", "4"]  # fmt: skip
    assert CliRunner().invoke(app, given).exit_code == 0
    settings = {"lam": "1/N", "budget": ["macs=0.5", "params=0.5"], "learn": False}
    assert came == [("x", settings, 4)]
    assert CliRunner().invoke(app, ["x"]).exit_code == 0
    assert came[1] == ("x", {}, 3)


def test_a_word_in_the_place_of_true_or_false():
    app, came = made("learn")
    for given in (["--learn", "gates"], ["--learn", "true"], ["--no-learn"], ["--learn", "false"]):
        assert CliRunner().invoke(app, ["x", *given]).exit_code == 0
    assert [settings["learn"] for _, settings, _ in came] == ["gates", True, False, False]


def test_a_list_of_numbers_is_one_option():
    app, came = made("bits")
    for given in ("0,4,8", "0 4 8", "0, 4, 8"):
        assert CliRunner().invoke(app, ["x", "--bits", given]).exit_code == 0
    assert [settings["bits"] for _, settings, _ in came] == [[0, 4, 8]] * 3
    wrong = CliRunner().invoke(app, ["x", "--bits", "0,four"])
    assert wrong.exit_code == 2
    assert "no list of whole numbers" in wrong.output


def test_options_have_the_types_of_their_settings():
    app, _ = made("epochs", "lr")
    for wrong in (["--epochs", "2.5"], ["--lr", "fast"]):
        assert CliRunner().invoke(app, ["x", *wrong]).exit_code == 2


def test_help_is_the_settings_own_words_with_their_default(monkeypatch):
    monkeypatch.setattr(Settings.model_fields["epochs"], "default", 77)
    monkeypatch.setattr(Settings.model_fields["lr"], "description", "How fast. And more.")
    app, _ = made("epochs", "lr", "augment", "gate_lr")
    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output.split())
    assert "Passes over the training data [77]." in text
    assert "How fast [0.001]." in text
    assert "And more" not in text
    assert "[no-augment]." in text
    assert "chosen by the number of steps in which they learn." in text


def test_a_signature_says_what_there_is():
    names = list(inspect.signature(finetune).parameters)
    assert names[:6] == ["file", "data", "data_root", "tokenizer", "loss", "metric"]
    assert "settings" not in names


def test_keys_and_values_are_split_at_the_first_equals_sign():
    assert key_and_value(" finetune.budget = macs=0.5 ", "a=1") == ("finetune.budget", "macs=0.5")
    assert key_and_value("finetune.budget=", "a=1", may_be_empty=True) == ("finetune.budget", "")
    texts = ["a=1", "b=1e-3", "c=true", "d=[1, 2]", "e=0.1/N", "a=2"]
    assert key_values(texts, "a=1") == {"a": 2, "b": 1e-3, "c": True, "d": [1, 2], "e": "0.1/N"}
    assert key_values(None, "a=1") == {}


@pytest.mark.parametrize("text", ["a", "a=", "a= ", "=1", " = 1", "a.=1", ""])
def test_a_text_without_key_or_value_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="is not KEY=VALUE, such as clip=1"):
        key_values([text], "clip=1")
