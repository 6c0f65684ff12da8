"""Folders are written whole or not at all."""

from __future__ import annotations

import os

import pytest

from l0prune.errors import FileError
from l0prune.files.folder import replaced_folder


def write(path, names, text="new"):
    with replaced_folder(path, "last", {"a", "b"}) as scratch:
        for name in names:
            (scratch / name).write_text(text)


def content(path):
    return {file.name: file.read_text() for file in path.iterdir()}


def test_a_new_folder_is_there_at_once_or_not(tmp_path):
    with pytest.raises(TypeError):
        write(tmp_path / "x", ["a", "last"], text=0)
    assert not list(tmp_path.iterdir())
    write(tmp_path / "deep" / "x", ["a", "last"])
    assert content(tmp_path / "deep" / "x") == {"a": "new", "last": "new"}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["x"]


def test_into_an_old_one_the_last_file_comes_last(tmp_path, monkeypatch):
    write(tmp_path / "x", ["a", "b", "last"], "old")
    (tmp_path / "x" / "theirs").write_text("kept")
    moved, replace = [], os.replace
    monkeypatch.setattr(
        os, "replace", lambda *paths: (moved.append(paths[1].name), replace(*paths))
    )
    write(tmp_path / "x", ["last", "a"])
    assert content(tmp_path / "x") == {"a": "new", "last": "new", "theirs": "kept"}
    assert moved == ["a", "last"]


def test_a_folder_that_is_none_of_ours_loses_nothing(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "b").write_text("theirs")
    write(tmp_path / "x", ["a", "last"])
    assert content(tmp_path / "x") == {"a": "new", "b": "theirs", "last": "new"}


@pytest.mark.parametrize("where", ["file", "file/x", "/proc/x"])
def test_where_none_can_be(where, tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileError, match="was not written"):
        write(tmp_path / where, ["last"])
    assert content(tmp_path) == {"file": "old"}
