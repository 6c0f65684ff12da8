"""JSON of our own files: its version and its types."""

import json

import pytest

from l0prune.errors import FileError
from l0prune.files.checked_json import Strict, checked


class Kept(Strict):
    version: int
    names: list[str]
    a: int = 0
    b: int = 0
    c: int = 0


GOOD = {"version": 2, "names": ["x"]}


@pytest.mark.parametrize("content", [GOOD, json.dumps(GOOD), json.dumps(GOOD).encode()])
def test_what_is_right_is_read(content):
    assert checked(content, Kept, 2, "it") == Kept(version=2, names=["x"])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({**GOOD, "version": 3}, r"it was written by a newer l0prune \(format 3.* up to 2\)"),
        ({**GOOD, "version": True}, "it is damaged, or none: ValueError"),
        ({**GOOD, "version": 0}, "it is damaged, or none: ValueError"),
        ({"names": []}, "it is damaged, or none: KeyError"),
        ({**GOOD, "names": [1]}, r"it is damaged: names.0 missing or of the wrong type"),
        ({**GOOD, "names": 1, "a": "", "b": "", "c": ""}, "it is damaged: names, a, b missing"),
        ("[]", "it is damaged, or none: TypeError"),
        ("{", "it is damaged, or none: JSONDecodeError"),
        ("[" * 100_000, "it is damaged, or none: RecursionError"),
    ],
)
def test_what_is_wrong_is_said(content, text):
    with pytest.raises(FileError, match=text):
        checked(content, Kept, 2, "it", ", or none")
