"""What a file asks for is done only where the user has named it before."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from commands import in_process
from torch import nn

import l0prune
from l0prune.errors import FileError
from l0prune.files import consent, user_code
from l0prune.files.consent import check_consent, check_root_consent, remember, remember_root

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)
    def forward(self, x):
        return self.b(self.a(x).relu())
"""
DATA = """
import torch
def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return (x, (x[:, 0] > 0).long()), (x, (x[:, 0] > 0).long())
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of the user's, and an unchanged ``sys.path``."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Foreign(nn.Linear):
    """Of a class that is not unpickled without trust."""


def artifact(path, spec, **info):
    """A file as somebody else would make it: it names ``spec`` as what builds its model."""
    model = l0prune.gate(nn.Sequential(Foreign(4, 5), nn.Linear(5, 2)), (torch.randn(2, 4),))
    l0prune.save(model, path, {"model": spec, **info})
    return path


def test_code_beside_a_downloaded_file_does_not_run(here):
    (here / "net.py").write_text(f"open({str(here / 'marker')!r}, 'w').close()\n" + NET)
    artifact("a.pt", "net.py:Net")
    with pytest.raises(FileError, match=r"a\.pt asks to run net\.py:Net \(.*/net\.py\).*trust"):
        l0prune.load("a.pt")
    assert not (here / "marker").exists()


@pytest.mark.parametrize(
    "spec",
    [
        "transformers:owner/repo", "transformers:gpt2", "timm:hf-hub:owner/repo",
        "timm:hf_hub:owner/repo", "timm:local-dir:/somewhere", "timm:../x", "timm:a/b",
    ],
)  # fmt: skip
@pytest.mark.one_in(7)
def test_a_file_does_not_choose_what_is_fetched(spec, monkeypatch):
    artifact("a.pt", spec)
    fetched = []

    def package(name):
        fetched.append(name)
        raise AssertionError

    monkeypatch.setattr(user_code, "_package", package)
    with pytest.raises(FileError, match=r"asks to fetch .*--trust-pickle"):
        l0prune.load("a.pt")
    assert not fetched
    with pytest.raises(AssertionError):
        l0prune.load("a.pt", trust_pickle=True)
    assert fetched


@pytest.mark.parametrize("spec", ["torchvision:resnet18", "timm:resnet18", "timm:vit_b.in1k"])
def test_what_fetches_and_runs_nothing_needs_no_consent(spec):
    check_consent(spec, "a.pt")


def test_what_the_user_has_named_may_be_named_by_a_file_until_it_changes(here):
    (here / "net.py").write_text(NET)
    model = l0prune.gate(l0prune.load_model("net.py:Net"), (torch.randn(2, 4),))
    l0prune.save(model, "a.pt", {"model": "net.py:Net"})
    assert l0prune.load("a.pt").state_dict().keys() == model.state_dict().keys()
    (here / "net.py").write_text(NET + "# somebody else's now\n")
    with pytest.raises(FileError, match=r"or it has changed since"):
        l0prune.load("a.pt")
    l0prune.load("a.pt", model=l0prune.load_model("net.py:Net"))
    l0prune.load("a.pt")


def test_code_of_the_same_content_elsewhere_is_other_code(here, monkeypatch):
    for folder in ("mine", "theirs"):
        (here / folder).mkdir()
        (here / folder / "net.py").write_text(NET)
    remember("mine/net.py:Net")
    check_consent("mine/net.py:Other", "a.pt")  # the file was agreed to, whatever it defines
    with pytest.raises(FileError, match="asks to run"):
        check_consent("theirs/net.py:Net", "a.pt")
    monkeypatch.chdir(here / "theirs")
    with pytest.raises(FileError, match="asks to run"):
        check_consent("net.py:Net", "a.pt")


def test_a_link_to_other_code_is_other_code(here):
    (here / "mine.py").write_text(NET)
    (here / "net.py").symlink_to(here / "mine.py")
    remember("net.py:Net")
    check_consent("net.py:Net", "a.pt")
    (here / "theirs.py").write_text(NET)
    (here / "net.py").unlink()
    (here / "net.py").symlink_to(here / "theirs.py")
    with pytest.raises(FileError, match=r"theirs\.py"):
        check_consent("net.py:Net", "a.pt")


def test_a_folder_for_downloads_is_the_users_choice(here):
    with pytest.raises(FileError, match="asks to keep data in"):
        check_root_consent(here / "data", "a.pt")
    remember_root(here / "data")
    check_root_consent(here / "data", "a.pt")


def test_where_nothing_can_be_noted_consent_is_asked_for_again(here, monkeypatch):
    (here / "net.py").write_text(NET)
    (here / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "file" / "below"))
    l0prune.load_model("net.py:Net")
    with pytest.raises(FileError, match="asks to run"):
        check_consent("net.py:Net", "a.pt")


def test_of_l0prunes_own_code_the_functions_of_recipes_need_none():
    check_consent(f"{consent.RECIPES}/vision.py:lenet5", "a.pt")
    check_consent(f"{consent.RECIPES}/crepe.py:little_data", "a.pt")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("spec", ["vision.py:nn", "crepe.py:torch", "../l0prune/cli/app.py:main"])
def test_other_code_of_l0prune_is_code(spec):
    with pytest.raises(FileError, match="asks to run"):
        check_consent(f"{consent.RECIPES}/{spec}", "a.pt")


def test_the_three_commands_with_code_of_ones_own_ask_nothing(here, capfd):
    (here / "net.py").write_text(NET)
    (here / "data.py").write_text(DATA)
    named = ("gate", "net.py:Net", "--input", "2x4", "--data", "data.py:data")
    for command in (named, ("finetune", "--epochs", "1"), ("export", "--json")):
        code, out, err = in_process(capfd, *command)
        assert code == 0, err
    assert json.loads(out)["files"] == ["Net.onnx"]


def test_the_command_line_does_not_run_data_that_a_file_names(here, capfd):
    (here / "data.py").write_text(f"open({str(here / 'marker')!r}, 'w').close()\n" + DATA)
    model = l0prune.gate(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), (torch.randn(2, 4),))
    l0prune.save(model, "a.gated.pt", {"data": "data.py:data"})
    for command in (["finetune"], ["fit", "--budget", "params=0.5", "--score", "taylor"]):
        code, _, err = in_process(capfd, *command)
        assert code == 1
        assert "a.gated.pt asks to run data.py:data" in err
        assert "Traceback" not in err
    assert not (here / "marker").exists()
    code, _, err = in_process(capfd, "finetune", "--data", "data.py:data", "--epochs", "1")
    assert code == 0, err
