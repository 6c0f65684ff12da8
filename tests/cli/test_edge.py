"""What the command line finds and says, whatever names lie about."""

from __future__ import annotations

import pytest

from l0prune.cli.edge import complain, say
from l0prune.cli.project import newest
from l0prune.errors import UsageError


def test_the_newest_file_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gated.pt").symlink_to(tmp_path / "nothing")
    (tmp_path / "b.gated.pt").mkdir()
    with pytest.raises(UsageError, match="no file is named"):
        newest("*.gated.pt", command="l0prune gate")
    (tmp_path / "c.gated.pt").touch()
    assert newest("*.gated.pt", command="l0prune gate").name == "c.gated.pt"


@pytest.mark.parametrize("tell", [say, complain])
def test_messages_give_the_terminal_no_orders(tell, capfd):
    tell("names a\x1b[2J[/b].Net, which\nis not")
    expected = "names a\N{REPLACEMENT CHARACTER}[2J[/b].Net, which\nis not\n"
    assert capfd.readouterr().err.endswith(expected)
