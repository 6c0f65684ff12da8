"""Files: atomic writes, and what is refused on reading."""

from __future__ import annotations

import errno
import os

import pytest
import torch
import torchvision
from torch import nn

from l0prune.errors import FileError
from l0prune.files import atomic_write, load_pickle


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path):
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    torch.save(Hostile(marker), path)
    with pytest.raises(FileError, match=r"system.*--trust-pickle") as refusal:
        load_pickle(path)
    assert "--model path.py:factory --weights" in str(refusal.value)
    assert not marker.exists()


def test_a_hostile_object_inside_a_module_is_refused(tmp_path):
    path, marker = tmp_path / "model.pt", tmp_path / "marker"
    module = nn.Linear(2, 2)
    module.extra = Hostile(marker)
    torch.save(module, path)
    with pytest.raises(FileError):
        load_pickle(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["alexnet", "resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5"]
)
def test_ordinary_pickled_models_load(tmp_path, name):
    model = torchvision.models.get_model(name).eval()
    torch.save(model, tmp_path / "model.pt")
    loaded = load_pickle(tmp_path / "model.pt")
    assert type(loaded) is type(model)
    first, second = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_allow_list_is_scoped(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    load_pickle(tmp_path / "model.pt")
    with pytest.raises(Exception, match="Unsupported global"):
        torch.load(tmp_path / "model.pt", weights_only=True)


@pytest.mark.parametrize("content", [b"", b"hello, world", bytes(range(256)) * 9])
def test_what_is_no_model_file(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"empty|not a model file|damaged"):
        load_pickle(path)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        load_pickle(tmp_path / "nothing.pt")
    with pytest.raises(FileError, match="is a folder"):
        load_pickle(tmp_path)


def test_a_truncated_file(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(20, 20), path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(FileError, match="truncated"):
        load_pickle(path)


def test_an_exported_program_is_named_as_such(tmp_path):
    program = torch.export.export(nn.Linear(2, 2), (torch.randn(2, 2),))
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(FileError, match="exported program"):
        load_pickle(tmp_path / "model.pt2")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def disk_full(file):
        file.write(b"half of the new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(FileError, match="the disk is full"):
        atomic_write(path, disk_full)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_write_into_no_folder(tmp_path):
    with pytest.raises(FileError, match="was not written"):
        atomic_write(tmp_path / "missing" / "file", lambda file: None)


def test_an_atomic_write_replaces(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    atomic_write(path, lambda file: file.write(b"new") and None)
    assert path.read_bytes() == b"new"
