"""Files: atomic writes, and what is refused on reading."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import sys
import zipfile

import pytest
import torch
from hostile import Touch, with_pickle
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import l0prune
from l0prune.errors import FileError
from l0prune.files.atomic import atomic_write, check_writable
from l0prune.files.pickles import load_bytes, load_pickle


def test_the_allow_list_is_scoped(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    load_pickle(tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        torch.load(tmp_path / "model.pt", weights_only=True)


class Mine(nn.Linear):
    pass


def test_what_the_user_allowed_is_allowed(tmp_path):
    torch.save(Mine(2, 2), tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"names test_loading\.Mine"):
        load_pickle(tmp_path / "model.pt")
    with torch.serialization.safe_globals([Mine]):
        assert type(load_pickle(tmp_path / "model.pt")) is Mine
        assert Mine in torch.serialization.get_safe_globals()


def test_trusted_classes_that_are_not_there(tmp_path, monkeypatch):
    (tmp_path / "their_net.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    with monkeypatch.context() as there:
        there.syspath_prepend(tmp_path)
        import their_net

        torch.save(their_net.Net(2, 2), tmp_path / "model.pt")
    del sys.modules["their_net"]
    with pytest.raises(FileError, match=r"cannot be found here.*their_net"):
        load_pickle(tmp_path / "model.pt", trust=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_pickle("model.pt", trust=True), nn.Linear)
    assert str(tmp_path) not in sys.path
    del sys.modules["their_net"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, world", "not a model file"),
        (bytes(range(256)) * 9, "not a model file"),
        (b"PK\x03\x04" + bytes(500), "truncated"),
        (pickle.dumps({"weight": 1}), "not a model file"),
        (pickle.dumps({"weight": 1}, protocol=2), "not a model file"),
    ],
)
def test_what_is_no_model_file(tmp_path, content, message):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    for trust in (False, True):
        with pytest.raises(FileError, match=message):
            load_pickle(path, trust=trust)


def test_an_onnx_file_is_gated_first(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    with pytest.raises(FileError, match="without gates: first l0prune gate "):
        l0prune.load(tmp_path / "net.onnx")


def test_an_archive_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("letter.txt", "dear")
    with pytest.raises(FileError, match=r"not of torch\.save"):
        load_pickle(tmp_path / "model.pt")


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


@pytest.fixture
def ordinary(tmp_path):
    torch.save(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_every_truncation_is_noticed(ordinary):
    whole = ordinary.read_bytes()
    for length in range(0, len(whole), 97):
        ordinary.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"truncated|empty|not a model file"):
            load_pickle(ordinary)


@given(st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_mutilated_pickle_loads_or_is_refused(ordinary, data):
    def mutilate(content):
        changed = bytearray(content)
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(changed) - 1))
            changed[place] = data.draw(st.integers(0, 255))
        return bytes(changed)

    content = with_pickle(ordinary, mutilate)
    with contextlib.suppress(FileError):  # any other error fails the test
        load_bytes(content, "model.pt")


def test_an_exported_program_is_named_as_such(tmp_path):
    program = torch.export.export(nn.Linear(2, 2), (torch.randn(2, 2),))
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(FileError, match=r"exported program.*torch.save\(model, path\)"):
        load_pickle(tmp_path / "model.pt2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_torchscript_file_is_named_as_such(tmp_path):
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.randn(2, 2)), tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"TorchScript.*torch.save\(model, path\)"):
        load_pickle(tmp_path / "model.pt")


def test_files_of_old_versions_of_torch(tmp_path):
    path, marker = tmp_path / "old.pt", tmp_path / "marker"
    linear = nn.Linear(2, 2)
    torch.save(linear.state_dict(), path, _use_new_zipfile_serialization=False)
    assert torch.equal(load_pickle(path)["weight"], linear.weight)
    for value in (linear, Touch(marker)):
        torch.save(value, path, _use_new_zipfile_serialization=False)
        with pytest.raises(FileError, match=r"before 1.6.*--trust-pickle"):
            load_pickle(path)
    assert not marker.exists()


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


def test_what_cannot_be_written_is_known_before(tmp_path):
    (tmp_path / "file").write_text("there")
    for path in (tmp_path, tmp_path / "missing" / "file", tmp_path / "file" / "within"):
        for attempt in (check_writable, lambda path: atomic_write(path, lambda file: None)):
            with pytest.raises(FileError, match="was not written"):
                attempt(path)
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "there"


def test_an_atomic_write_replaces(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    atomic_write(path, lambda file: file.write(b"new") and None)
    assert path.read_bytes() == b"new"


def test_a_disk_that_is_full_for_torch(tmp_path):
    """torch.save turns the system's error into one about the archive; /dev/full is always full."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(FileError, match="the disk is full"),
    ):
        atomic_write(path, lambda file: torch.save({"x": torch.zeros(9999)}, full))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_may_not_grow(tmp_path):
    """The real thing: files may hold 50 kB while a tensor of 400 kB is saved."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(FileError, match=r"File too large\. Whatever stood there before"):
            atomic_write(path, lambda file: torch.save(torch.zeros(100_000), file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_another_error_of_the_writer_is_its_own(tmp_path):
    def fail(file):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        atomic_write(tmp_path / "file", fail)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, interrupted)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link_and_permissions_are_the_usual_ones(tmp_path):
    (tmp_path / "store").mkdir()
    link = tmp_path / "model.pt"
    link.symlink_to(tmp_path / "store" / "real.pt")
    atomic_write(link, lambda file: file.write(b"new") and None)
    assert link.is_symlink()
    assert (tmp_path / "store" / "real.pt").read_bytes() == b"new"
    (tmp_path / "plain").touch()
    assert link.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_device_or_folder_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FileError, match="not written"):
            atomic_write(tmp_path / name, lambda file: file.write(b"x"))
    assert (tmp_path / "pipe").is_fifo()


def test_a_name_where_a_file_is_needed_says_how_to_make_one():
    with pytest.raises(FileError, match="`l0prune gate torchvision:resnet18` makes a file"):
        load_pickle("torchvision:resnet18")
