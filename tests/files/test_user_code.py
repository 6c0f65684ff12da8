"""The user's own files: run once, found by pickles, and not run because a file asks for it."""

from __future__ import annotations

import os
import pickle
import sys

import pytest

from l0prune.errors import FileError, UsageError
from l0prune.files.consent import is_code
from l0prune.files.user_code import called, named


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(path, text):
    path.write_text(text)
    return str(path)


def test_what_is_code():
    assert is_code("dir/net.py:build")
    assert is_code("C:/dir/net.py:build")
    assert not is_code("net.py")
    assert not is_code("net.py:")
    assert not is_code("torchvision:resnet18")


def test_a_file_is_run_once_until_it_changes(tmp_path):
    path = write(tmp_path / "once.py", "things = []\nclass Net: pass\n")
    things = named(f"{path}:things")
    assert named(f"{path}:things") is things
    write(tmp_path / "once.py", "things = [1]\nclass Net: pass\n# longer now\n")
    assert named(f"{path}:things") == [1]


def test_two_files_of_one_name_are_two(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "net.py", f"number = {number}\n")
    assert [named(f"{tmp_path}/{n}/net.py:number") for n in (1, 2)] == [1, 2]


def test_objects_can_be_pickled(tmp_path):
    path = write(tmp_path / "net.py", "class Net: pass\n")
    instance = named(f"{path}:Net")()
    named(f"{path}:Net")  # once more, as a later load does
    assert type(pickle.loads(pickle.dumps(instance))) is type(instance)


def test_a_file_may_import_its_neighbours(tmp_path):
    write(tmp_path / "neighbour_of_net.py", "size = 3\n")
    path = write(
        tmp_path / "net.py",
        "import neighbour_of_net\n"
        "def build():\n    import neighbour_of_net as n\n    return n.size\n",
    )
    assert called(named(f"{path}:build"), f"{path}:build") == 3
    del sys.modules["neighbour_of_net"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n1 / 0\n", r"ZeroDivisionError.*net\.py, line 2"),
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", r"SystemExit\(3\)"),
        ("import no_such_package\n", "no_such_package"),
    ],
)
def test_a_file_that_fails(tmp_path, text, message):
    path = write(tmp_path / "net.py", text)
    for _ in range(2):  # nothing of the first try stays
        with pytest.raises(FileError, match=message):
            named(f"{path}:f")


def test_a_function_that_fails(tmp_path):
    path = write(
        tmp_path / "net.py",
        "def inner():\n    return {}['key']\ndef f():\n    inner()\n    return 1\n"
        "def needs(x):\n    pass\nnumber = 3\n",
    )
    with pytest.raises(UsageError, match=r"KeyError.*net\.py, line 2"):
        called(named(f"{path}:f"), f"{path}:f")
    with pytest.raises(UsageError, match="missing 1 required"):
        called(named(f"{path}:needs"), f"{path}:needs")
    with pytest.raises(UsageError, match="is a int, not a function"):
        called(named(f"{path}:number"), f"{path}:number")
    with pytest.raises(UsageError, match=r"has no 'g'; it defines inner, f, needs"):
        named(f"{path}:g")


def test_missing_files(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        named(f"{tmp_path}/nothing.py:f")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(FileError, match="does not exist"):
        named(f"{tmp_path}/folder.py:f")


def test_code_that_was_compiled_before_is_not_taken_for_it(tmp_path, monkeypatch):
    """Python would, where a file has the same size and was changed in the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "quick.py"
    for number in (1, 2):
        write(path, f"number = {number}\n")
        os.utime(path, ns=(number, 10**18 + number))
        assert named(f"{path}:number") == number
    assert list(tmp_path.iterdir()) == [path]
