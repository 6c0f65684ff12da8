"""Small files that would take all memory, or all time, are refused before they can."""

from __future__ import annotations

import io
import os
import zipfile
from pickle import UnpicklingError

import pytest
import torch
import torch.nn.functional as F
from hostile import Call, with_pickle
from torch import nn
from torchvision.models.feature_extraction import DualGraphModule

from l0prune.errors import FileError
from l0prune.files.allow_list import allowed, check_ordinary
from l0prune.files.pickles import load_bytes, load_pickle


@pytest.fixture
def refused(tmp_path):
    """Save a value; the message with which loading it is refused."""

    def save_and_load(value):
        torch.save(value, tmp_path / "model.pt")
        with pytest.raises(FileError) as refusal:
            load_pickle(tmp_path / "model.pt")
        return str(refusal.value)

    return save_and_load


@pytest.mark.parametrize(
    "call",
    [
        Call(nn.Linear, 2, 2),
        Call(nn.Sequential),
        Call(nn.TransformerEncoder, nn.Linear(2, 2), 3),
        Call(F.relu, torch.zeros(1).expand(2, 2)),
        Call(torch._tensor._rebuild_from_type_v2, nn.Linear, torch.Tensor, (2, 2), ()),
        {"deep": [nn.ReLU(), Call(nn.Linear, 2, 2)]},
    ],
    ids=["linear", "sequential", "copies", "function", "indirect", "deep"],
)
def test_a_pickle_calls_no_class_and_no_function(refused, call):
    assert "a call of" in refused(call)


def test_classes_as_values_come_back_as_themselves(tmp_path):
    module = nn.Sequential(nn.ReLU())
    module.norm_layer, module.deep = nn.BatchNorm2d, [(1, (nn.Linear, F.gelu)), {"a": nn.GELU}]
    torch.save(module, tmp_path / "model.pt")
    loaded = load_pickle(tmp_path / "model.pt")
    assert loaded.norm_layer is nn.BatchNorm2d
    assert loaded.deep == [(1, (nn.Linear, F.gelu)), {"a": nn.GELU}]


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1).expand(10**6, 10**6),
        {"w": torch.zeros(4).as_strided((10**4, 10**4), (0, 0))},
        [torch.zeros(2**20)[i:].expand(300, -1) for i in range(8)],
    ],
)
def test_tensors_are_not_larger_than_their_file_can_mean(refused, value):
    assert "bytes of tensors in a file of" in refused(value)


def test_tensors_that_share_their_memory_load(tmp_path):
    weight = torch.randn(1000)
    torch.save({"a": weight, "b": weight, "c": weight.expand(3, -1)}, tmp_path / "state.pt")
    assert torch.equal(load_pickle(tmp_path / "state.pt")["c"][2], weight)


@pytest.mark.parametrize("name", ["torch.FloatTensor", "torch.sparse.FloatTensor"])
def test_constructors_of_tensors_are_not_called(tmp_path, name):
    torch.save(torch.float32, tmp_path / "model.pt")
    module, _, cls = name.rpartition(".")
    content = with_pickle(
        tmp_path / "model.pt",
        lambda _: f"c{module}\n{cls}\nJ".encode() + (10**9).to_bytes(4, "little") + b"\x85R.",
    )
    with pytest.raises(FileError, match=rf"it names {name}, which no model needs"):
        load_bytes(content, "model.pt")


def test_an_lstm_of_endless_layers(refused):
    lstm = nn.LSTM(2, 2)
    lstm.num_layers, lstm._all_weights = 10**9, [[1]]
    assert "more layers than weights" in refused(lstm)


def test_a_module_inside_itself(refused):
    module = nn.Sequential(nn.Sequential())
    module[0]._modules["back"] = module
    assert "inside itself" in refused(module)


def test_shared_modules_of_shared_modules(refused):
    module = nn.Sequential(nn.Linear(1, 1))
    for _ in range(40):
        module = nn.Sequential(module, module)
    assert "more than 1,000,000 names" in refused(module)


def test_modules_without_end():
    module = nn.Sequential(nn.Linear(1, 1))
    for _ in range(250):
        module = nn.Sequential(module)
    with pytest.raises(UnpicklingError, match="more than 200 levels deep"):
        check_ordinary(module, 10**6)


def test_names_that_a_terminal_would_obey(refused):
    assert r"unusable entry 'a\x1b[2J' in _modules" in refused(
        nn.ModuleDict({"a\x1b[2J": nn.ReLU()})
    )


def rewritten(path, write):
    """The bytes of an archive written anew: ``write(archive, entry, content)`` for each entry."""
    result = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(result, "w") as new:
        for entry in old.infolist():
            write(new, entry.filename, old.read(entry))
    return result.getvalue()


@pytest.fixture
def saved(tmp_path):
    torch.save(nn.Linear(100, 100), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_a_compressed_archive(saved):
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
        content = rewritten(saved, lambda new, name, data, m=method: new.writestr(name, data, m))
        with pytest.raises(FileError, match=r"not loaded: its entry .* is compressed"):
            load_bytes(content, "model.pt")
    stored = rewritten(saved, lambda new, name, data: new.writestr(name, data))
    assert isinstance(load_bytes(stored, "model.pt"), nn.Linear)


def test_entries_that_lie_on_one_another(saved):
    """A directory that names the bytes of one entry many times over."""
    result = io.BytesIO()
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(result, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        large = max(new.infolist(), key=lambda entry: entry.file_size)
        for number in range(100):
            again = zipfile.ZipInfo(f"model/data/{number + 9}")
            again.header_offset, again.CRC = large.header_offset, large.CRC
            again.file_size = again.compress_size = large.file_size
            new.filelist.append(again)
    with pytest.raises(FileError, match=r"its entries claim [\d,]+ bytes"):
        load_bytes(result.getvalue(), "model.pt")


def test_two_directories(saved):
    """One for whoever counts from the end of the file, as Python does, and one for torch."""
    bomb = rewritten(saved, lambda n, name, data: n.writestr(name, data, zipfile.ZIP_DEFLATED))
    plain = rewritten(saved, lambda n, name, data: n.writestr(name, data))
    end = bytearray(plain[-22:])
    start = int.from_bytes(bomb[-6:-2], "little")
    end[-6:-2] = start.to_bytes(4, "little")
    with pytest.raises(FileError, match=r"damaged|harm"):
        load_bytes(bomb[:-22] + plain[:-22] + bytes(end), "model.pt")


def test_something_after_the_archive(saved):
    content = saved.read_bytes()
    for tail in (b"x", b"PK\x05\x06" + bytes(18)):
        commented = content[:-2] + len(tail).to_bytes(2, "little") + tail
        with pytest.raises(FileError, match=r"damaged|harm|not of torch"):
            load_bytes(commented, "model.pt")


def test_more_python_objects_than_a_model_can_need(tmp_path, saved):
    content = with_pickle(saved, lambda pickle: pickle[:-1] + b"\x8f0" * (17 * 2**20) + b".")
    with pytest.raises(FileError, match="bytes of Python objects"):
        load_bytes(content, "model.pt")


def test_modules_that_hold_code_are_not_allowed():
    assert allowed(f"{DualGraphModule.__module__}.{DualGraphModule.__qualname__}") is None


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(FileError, match="is a pipe or a device"):
        load_pickle(tmp_path / "model.pt")
