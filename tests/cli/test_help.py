"""What ``--help`` says, and that its examples are commands that there are."""

import re
import shlex

import pytest
import typer
from commands import run

from l0prune.cli.app import app
from l0prune.cli.help import _GROUPS, _MOST_USED
from l0prune.doors import behind

COMMANDS = {
    name: command
    for name, command in typer.main.get_command(app).commands.items()
    if name != "recipes"
}


def flags(sections):
    """The options that a help text shows."""
    lines = [line for each in sections.values() for line in each]
    return {flag for line in lines for flag in re.findall(r"^  (--[\w-]+)", line)}


def read(text):
    """The sections of a help text, by heading: their lines."""
    sections = re.split(r"^(\w[\w ]*):\n", text, flags=re.MULTILINE)
    return dict(zip(sections[1::2], map(str.splitlines, sections[2::2]), strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_one_sentence_options_in_groups_and_three_examples(done, name):
    out, _ = done(name, "--help-all")
    about = re.split(r"\n\s*\n", out)[1]
    assert about.count(".") <= 2, about
    sections = read(out)
    assert [*sections] == [each for each in ("Arguments", *_GROUPS, "Examples") if each in sections]
    own = {each.opts[0] for each in COMMANDS[name].params if each.param_type_name == "option"}
    assert flags(sections) - {"--help-all"} == own | {"--help"}
    examples = [line.strip() for line in sections["Examples"]]
    assert len(examples) == 3
    for example in examples:
        words = shlex.split(example)
        assert words.pop(words.index("l0prune") + 1) == name
        COMMANDS[name].make_context(name, words[words.index("l0prune") + 1 :])
        assert len(example) <= 78


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_shows_six_options_at_most_and_leads_to_the_rest(done, name):
    short, whole = done(name, "--help")[0], done(name, "--help-all")[0]
    shown = flags(read(short)) - {"--help", "--help-all"}
    assert 0 < len(shown) <= 6
    assert shown <= flags(read(whole))
    assert ("--help-all" in flags(read(short))) == (short != whole)
    assert done(name, "--help")[0] == short  # the longer help changes nothing for the next


def test_most_used_options_are_options_of_their_command(command):
    for name, used in _MOST_USED.items():
        assert {*used} <= {each.name for each in COMMANDS[name].params}, name


def test_a_group_names_only_options_that_there_are(command):
    of_features = {name for name, _ in behind("commands")}
    commands = [each for name, each in COMMANDS.items() if name not in of_features]
    there = {each.name for command in commands for each in command.params}
    assert {name for names in _GROUPS.values() for name in names} <= there
    assert {group for group, _ in behind("options")} <= {*_GROUPS}


def test_help_of_a_process(tmp_path):
    code, out, err = run("finetune", "--help", cwd=tmp_path)
    assert (code, err) == (0, "")
    sections = read(out)
    assert any("--budget" in line for line in sections["Budget"])
    assert any("--epochs" in line and "[10]" in line for line in sections["Training"])
    assert max(map(len, out.splitlines())) <= 80
