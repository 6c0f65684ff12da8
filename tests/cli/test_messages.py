"""What the command line finds and says, whatever names lie about."""

from __future__ import annotations

import signal
import warnings

import pytest
import typer

from l0prune.cli.app import COMMANDS, main
from l0prune.cli.messages import complain, own_warnings, run_command, say
from l0prune.cli.project import defaults, newest
from l0prune.errors import FileError, Interrupted, L0pruneWarning, UsageError


def test_the_newest_file_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gated.pt").symlink_to(tmp_path / "nothing")
    (tmp_path / "b.gated.pt").mkdir()
    with pytest.raises(UsageError, match="no file is named"):
        newest("*.gated.pt", command="l0prune gate")
    (tmp_path / "c.gated.pt").touch()
    assert newest("*.gated.pt", command="l0prune gate").name == "c.gated.pt"


def test_what_a_folder_knows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert defaults() == {}
    (tmp_path / "l0prune.toml").write_text('data = "mnist"\n[finetune]\nbudget = "macs=0.5"\n')
    assert defaults() == {"data": "mnist", "finetune": {"budget": "macs=0.5"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('budget = "macs=0.5"', r"a table \[finetune\] of the settings of training, not budget"),
        ("data = 5", "data in l0prune.toml is a text, not 5"),
        ("finetune = 3", "finetune in l0prune.toml is a table, not 3"),
    ],
)
def test_what_a_folder_cannot_say(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l0prune.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        defaults()


@pytest.mark.parametrize("text", [b"data = ", b"data = '\xff'", b"data = " + b"[" * 10**5])
def test_a_folder_whose_defaults_cannot_be_read(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l0prune.toml").write_bytes(text)
    with pytest.raises(FileError, match=r"l0prune.toml is (no TOML|damaged: it is no text)"):
        defaults()


@pytest.mark.parametrize("tell", [say, complain])
def test_messages_give_the_terminal_no_orders(tell, capfd):
    tell("names a\x1b[2J[/b].Net, which\nis not")
    expected = "names a\N{REPLACEMENT CHARACTER}[2J[/b].Net, which\nis not\n"
    assert capfd.readouterr().err.endswith(expected)


def test_own_warnings_are_said_once_each_and_others_are_not(capfd, monkeypatch):
    with own_warnings():
        for text in (
            "l0prune: the budget\nis missed",
            "l0prune: the budget\nis missed",
            "l0prune: b",
        ):
            warnings.warn(text, L0pruneWarning)
        warnings.warn("the library is old", UserWarning)
        for name, value in (("TORCHELASTIC_RUN_ID", "a"), ("WORLD_SIZE", "2"), ("RANK", "1")):
            monkeypatch.setenv(name, value)
        warnings.warn("l0prune: the first process says it", L0pruneWarning)
    assert capfd.readouterr() == ("", "warning: the budget is missed\nwarning: b\n")
    with pytest.warns(UserWarning, match="is old"):  # as they were
        warnings.warn("the library is old", UserWarning)


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (KeyboardInterrupt(), 130),
        (Interrupted(signal.SIGINT, "training stopped in epoch 2"), 130),
        (Interrupted(signal.SIGTERM, "training stopped in epoch 2"), 143),
        (typer.Abort(), 130),
    ],
)
def test_what_is_stopped_says_so_in_a_sentence(capfd, stop, code):
    def command():
        raise stop

    assert run_command(command) == code
    out, err = capfd.readouterr()
    assert out == ""
    known = "stopped. The same command goes on from the last checkpoint, if it wrote one."
    assert err.splitlines() == [f"error: {str(stop) or known}"]


@pytest.mark.parametrize("command", [each.__name__ for each in COMMANDS])
def test_every_command_is_stopped_by_ctrl_c(command, capfd, monkeypatch):
    """Wherever it comes: here as soon as the arguments are known."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("l0prune.cli.early.check", stop)
    needed = {"run": ["r"], "sweep": ["r"], "experts": ["--experts", "2"]}.get(command, [])
    monkeypatch.setattr("sys.argv", ["l0prune", command, *needed])
    with pytest.raises(SystemExit) as found:
        main()
    assert found.value.code == 130
    assert capfd.readouterr().err.startswith("error: stopped.")
