"""ONNX files whose weights lie beside them, at a limit much below 2 GB."""

from __future__ import annotations

import functools
import os

import onnx
import pytest
import torch
from deadness import close_some, randomise
from differences import run_onnx
from torch import nn

import l0prune
from l0prune.errors import FileError
from l0prune.exporting.onnx import external

X = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))


@functools.cache
def exported(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4)
    )
    return l0prune.export(close_some(l0prune.gate(randomise(model).eval(), X, exclude="*.in")))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(external, "LARGEST", 1000)


def is_of(path, dense):
    return torch.allclose(run_onnx(path, X)[0], dense.module(X), atol=1e-5)


def test_weights_that_would_fit_lie_beside_the_file_where_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.undo()
    path, data = exported().save_onnx(tmp_path / "model.onnx", external_data=True)
    assert {path, data} == set(tmp_path.iterdir())
    assert data.stat().st_size >= 4 * exported().params
    assert is_of(path, exported())
    (path,) = exported().save_onnx(tmp_path / "model.onnx")
    assert {path} == set(tmp_path.iterdir())


def test_weights_beside_the_file(tmp_path):
    dense = exported()
    path, data = dense.save_onnx(tmp_path / "model.onnx")
    assert {path, data} == set(tmp_path.iterdir())
    onnx.checker.check_model(path)
    model = onnx.load(path, load_external_data=False)
    outside = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {
        entry.value for t in outside for entry in t.external_data if entry.key == "location"
    } == {data.name}
    assert {"l0prune.certificate", "l0prune.batch"} <= {p.key for p in model.metadata_props}
    assert is_of(path, dense)
    path.rename(tmp_path / "other.onnx")  # the weights are found by their own name
    assert is_of(tmp_path / "other.onnx", dense)


@pytest.mark.slow
def test_the_next_save_takes_the_old_weights_away(tmp_path):
    exported().save_onnx(tmp_path / "model.onnx")
    (tmp_path / "model.onnx.data").write_text("theirs")
    path, data = exported(1).save_onnx(tmp_path / "model.onnx")
    assert {p.name for p in tmp_path.iterdir()} == {path.name, data.name, "model.onnx.data"}
    assert is_of(path, exported(1))


@pytest.mark.slow
def test_small_ones_have_none_any_more(tmp_path, monkeypatch):
    exported().save_onnx(tmp_path / "model.onnx")
    monkeypatch.setattr(external, "LARGEST", 2**31)
    assert exported(1).save_onnx(tmp_path / "model.onnx") == (tmp_path / "model.onnx",)
    assert list(tmp_path.iterdir()) == [tmp_path / "model.onnx"]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.slow
def test_a_kill_leaves_the_old_model_or_the_new(moment, tmp_path, monkeypatch):
    """A process that is killed does nothing any more: no error is caught, nothing is removed."""
    path = tmp_path / "model.onnx"
    exported().save_onnx(path)
    real, unlink = os.replace, type(path).unlink

    def killed(source, target):
        if os.fspath(target) == os.fspath(path):
            monkeypatch.setattr(type(path), "unlink", lambda self, missing_ok=False: None)
            if moment == "after":
                real(source, target)
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        exported(1).save_onnx(path)
    assert is_of(path, exported(1 if moment == "after" else 0))
    monkeypatch.setattr(os, "replace", real)
    monkeypatch.setattr(type(path), "unlink", unlink)
    exported(1).save_onnx(path)  # and the next save tidies up
    assert len([p for p in tmp_path.iterdir() if p.suffix == ".data"]) == 1


@pytest.mark.slow
def test_an_error_after_the_new_name_leaves_the_new_weights(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    exported().save_onnx(path)

    def failing(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("l0prune.files.atomic.sync_folder", failing)
    with pytest.raises(FileError):
        exported(1).save_onnx(path)
    assert is_of(path, exported(1))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path, data = exported().save_onnx(tmp_path / "model.onnx")

    def full(model, data):
        data.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("l0prune.exporting.onnx.file.move_out", full)
    with pytest.raises(FileError, match="the disk is full"):
        exported(1).save_onnx(path)
    assert set(tmp_path.iterdir()) == {path, data}
    assert is_of(path, exported())
