"""Tensors and texts in the format of safetensors, which the library reads as we wrote them."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l0prune.errors import FileError
from l0prune.files.tensor_file import (
    DTYPES,
    is_tensor_file,
    read_tensors,
    read_texts,
    write_tensors,
)

TENSORS = {
    "b": torch.arange(6.0).view(2, 3),
    "a": torch.arange(3, dtype=torch.int8),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "turned": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
}


def test_the_library_reads_what_we_write(tmp_path):
    write_tensors(tmp_path / "a", TENSORS, {"ä": "ö", "n": "1"})
    for found in (safetensors.torch.load_file(tmp_path / "a"), read_tensors(tmp_path / "a")):
        assert found.keys() == TENSORS.keys()
        for name, value in TENSORS.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
    assert read_texts(tmp_path / "a") == {"ä": "ö", "n": "1"}


def test_we_read_what_the_library_writes(tmp_path):
    safetensors.torch.save_file({"b": TENSORS["b"]}, tmp_path / "a")
    assert is_tensor_file(tmp_path / "a")
    assert torch.equal(read_tensors(tmp_path / "a")["b"], TENSORS["b"])
    assert read_texts(tmp_path / "a") == {}


@given(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 3), max_size=3))
@settings(max_examples=30, deadline=None)
def test_every_dtype_and_shape(tmp_path_factory, dtype, shape):
    path = tmp_path_factory.mktemp("x") / "a"
    tensor = torch.randint(0, 2, shape).to(dtype)
    write_tensors(path, {"x": tensor, "y": tensor.clone()}, {})
    assert torch.equal(read_tensors(path)["y"], tensor)
    assert read_tensors(path)["x"].dtype == dtype


def test_tensors_that_are_read_lie_in_memory_of_their_own(tmp_path):
    write_tensors(tmp_path / "a", {"x": torch.zeros(2000)}, {})
    found = read_tensors(tmp_path / "a")["x"]
    with open(tmp_path / "a", "r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 8000)
    assert not found.any()


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
def test_what_cannot_be_held(tmp_path, tensor):
    with pytest.raises(FileError, match=r"x is a tensor .* cannot hold"):
        write_tensors(tmp_path / "a", {"x": tensor}, {})
    assert not list(tmp_path.iterdir())


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        raw({"x": ENTRY}, bytes(7)),
        raw({"x": ENTRY}, bytes(9)),
        raw({"x": {**ENTRY, "shape": [2**62, 2]}}, bytes(8)),
        raw({"x": {**ENTRY, "shape": [-2]}}, bytes(8)),
        raw({"x": {**ENTRY, "shape": [10**12]}}, bytes(8)),
        raw({"x": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        raw({"x": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8)),
        raw({"x": ENTRY, "y": ENTRY}, bytes(8)),
        raw({"x": {**ENTRY, "dtype": "F99"}}, bytes(8)),
        raw({"x": {**ENTRY, "dtype": "F64"}}, bytes(8)),
        raw(b'{"x": 1'),
        raw(b'{"__metadata__": {"a": 1}}'),
        raw(b'{"a' + b"[" * 10**5 + b"}"),
        raw({"x": ENTRY}, bytes(8), length=2**63 + 5),
        raw({"x": ENTRY}, bytes(8), length=2**27),
        b"",
        b"\x08",
    ],
)
def test_damage_is_noticed(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FileError, match="damaged"):
        read_tensors(tmp_path / "a")


def test_no_header_is_read_that_is_larger_than_any_of_ours(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        file.write((2**26 + 1).to_bytes(8, "little") + b'{"')
        file.truncate(2**27)  # a file with holes takes no room
    assert is_tensor_file(tmp_path / "a")
    with pytest.raises(FileError, match="claims a header of 67,108,865 bytes"):
        read_texts(tmp_path / "a")


def test_other_things_are_no_tensor_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(b"\x05")
    torch.save({"x": 1}, tmp_path / "torch")
    for name in ("pipe", "short", "torch", "missing", "."):
        assert not is_tensor_file(tmp_path / name)
