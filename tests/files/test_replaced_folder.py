"""Folders are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from l0prune.errors import FileError
from l0prune.files.atomic import claimed, replaced_folder, replacement, write_whole


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


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    with claimed(tmp_path / "run"):
        with (
            pytest.raises(FileError, match=r"another run is going on in .*/run\. Wait"),
            claimed(tmp_path / "run"),
        ):
            pass
        with claimed(tmp_path / "another"):
            pass
    with claimed(tmp_path / "run"):
        pass


def test_a_killed_run_leaves_no_lock(tmp_path):
    code = f"""
import os, pathlib, sys
from l0prune.files.atomic import claimed
with claimed(pathlib.Path({str(tmp_path)!r})):
    print("claimed", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(FileError, match="another run"), claimed(tmp_path):
            pass
        other.kill()
    with claimed(tmp_path):
        pass


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path):
    with pytest.raises(ValueError, match="no"), claimed(tmp_path / "new"):
        raise ValueError("no")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="a file of this name"), claimed(tmp_path / "file"):
        pass


def test_litter_of_killed_writes_is_removed_and_what_is_being_written_stays(tmp_path):
    litter = [tmp_path / f".{name}.0123abcd.part" for name in ("file", "folder")]
    others = [tmp_path / ".other.0123abcd.part", tmp_path / ".file.part", tmp_path / "file.part"]
    for path in (litter[0], *others):
        path.write_text("x")
    litter[1].mkdir()
    (litter[1] / "inner").write_text("x")
    with replacement(tmp_path / "file") as mine:
        write_whole(tmp_path / "file", "theirs")
        assert mine.exists()
        mine.write_text("mine")
    assert (tmp_path / "file").read_text() == "mine"
    with replaced_folder(tmp_path / "folder", "last", ()) as scratch:
        with replaced_folder(tmp_path / "folder", "last", ()) as theirs:
            (theirs / "last").write_text("theirs")
        (scratch / "last").write_text("mine")
    assert (tmp_path / "folder" / "last").read_text() == "mine"
    left = {path.name for path in tmp_path.iterdir()} - {"file", "folder"}
    assert left == {path.name for path in others}
