"""Loading of pickled models, and of the archives that hold them, as untrusted input."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import MAGIC_NUMBER, get_unsafe_globals_in_checkpoint, safe_globals

from l0prune.errors import FileError, first_line
from l0prune.files.allow_list import allowed, check_ordinary
from l0prune.files.atomic import PathLike

# A pickle names a few objects per layer; one byte of it becomes at most about 200.
_MAX_PICKLE = 32 * 2**20
_CHUNK = 2**20
_DAMAGE = (EOFError, NotImplementedError, OSError, ValueError, struct.error, zipfile.BadZipFile)
_END, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL")
_END64_RECORD = struct.Struct("<4sQ2H2L4Q")
_NO_MODEL_NAMES = re.compile(
    rb"torch[\w.]*\n(?:(?!Tensor\n)\w+Tensor|_rebuild_device_tensor\w*|_rebuild_wrapper_subclass)\n"
)
SAVE = "Save the whole module with torch.save(model, path)."


def check_archive(file: str | io.BytesIO, name: str) -> None:
    """Refuse an archive not written by ``torch.save``, or that would unpack to more than its size.

    Messages call it ``name``.

    Raises:
        FileError: it is damaged, of another kind, compressed, or holds an unusual pickle.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            _check_kind(archive, name)
            _check_directory(archive, name)
            _check_entries(archive, name)
            _check_sums(archive)
            _check_pickles(archive, name)
    except _DAMAGE as error:
        raise FileError(f"{name} is damaged or truncated: {error}.") from error
    finally:
        if isinstance(file, io.BytesIO):
            file.seek(0)


def _check_kind(archive: zipfile.ZipFile, name: str) -> None:
    names = archive.namelist()
    inside = {entry.partition("/")[2] for entry in names}  # all entries are in one folder
    if inside & {"archive_format", "models/model.json", "serialized_exported_program.json"} or (
        "serialized_exported_program.json" in names
    ):
        raise FileError(
            f"{name} is an exported program (.pt2), whose modules and training mode are gone. "
            f"l0prune trains the model, so give the nn.Module itself. {SAVE}"
        )
    if "constants.pkl" in inside:
        raise FileError(
            f"{name} is a TorchScript file, which cannot be trained by l0prune. "
            f"Give the nn.Module itself. {SAVE}"
        )
    if "data.pkl" not in inside:
        raise FileError(
            f"{name} is not a model file: it is an archive, but not of torch.save. {SAVE}"
        )


def _check_directory(archive: zipfile.ZipFile, name: str) -> None:
    """Refuse an archive in which torch could find another directory than zipfile has checked."""
    file = archive.fp
    assert file is not None
    end = file.seek(-_END.size, os.SEEK_END)
    signature, *_, start, comment = _END.unpack(file.read(_END.size))
    if signature != b"PK\x05\x06" or comment:
        raise FileError(f"{name} is damaged, or made to do harm: something follows its archive.")
    if end >= _END64.size:
        file.seek(end - _END64.size)
        signature, _, record, _ = _END64.unpack(file.read(_END64.size))
        if signature == b"PK\x06\x07":
            file.seek(record)
            start = _END64_RECORD.unpack(file.read(_END64_RECORD.size))[-1]
    if archive.start_dir != start:
        raise FileError(f"{name} is damaged, or made to do harm: its archive has two directories.")


def _check_entries(archive: zipfile.ZipFile, name: str) -> None:
    file = archive.fp
    assert file is not None
    length, total = file.seek(0, os.SEEK_END), 0
    for entry in archive.infolist():
        total += entry.file_size
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise FileError(
                f"{name} was not loaded: its entry {entry.filename} is compressed, which "
                "torch.save never does, and could unpack to any size. Save it anew with torch."
            )
    if total > length:
        raise FileError(
            f"{name} was not loaded: its entries claim {total:,} bytes, the file has {length:,}."
        )


def _check_sums(archive: zipfile.ZipFile) -> None:
    """Verify the checksum of every entry by reading it whole: torch ignores checksums."""
    for entry in archive.infolist():
        if entry.CRC:  # torch.serialization.set_crc32_options(False) writes none
            with archive.open(entry) as file:
                while file.read(_CHUNK):
                    pass


def _check_pickles(archive: zipfile.ZipFile, name: str) -> None:
    for entry in archive.infolist():
        if not entry.filename.endswith("data.pkl"):
            continue
        if entry.file_size > _MAX_PICKLE:
            raise FileError(
                f"{name} was not loaded: it holds {entry.file_size:,} bytes of Python objects "
                f"beside its tensors, more than the {_MAX_PICKLE:,} that a model can need. Save "
                "the state_dict alone."
            )
        found = _NO_MODEL_NAMES.search(archive.read(entry))
        if found:
            what = found[0].decode().strip().replace("\n", ".")
            raise FileError(
                f"{name} was not loaded: it names {what}, which no model needs on a CPU. Save the "
                "tensors as plain ones on the CPU (model.cpu())."
            )


_WAYS_ON = (
    "Two ways on: give the code and the weights apart (--model path.py:factory --weights "
    "state.pt), or, if you trust whoever made the file, add --trust-pickle (trust_pickle=True)."
)
_BEFORE_1_6 = pickle.dumps(MAGIC_NUMBER, protocol=2)  # how files of torch before 1.6 begin


def load_pickle(path: PathLike, *, trust: bool = False) -> Any:
    """Load a file of ``torch.save`` onto the CPU, without running code from it.

    Classes of torch.nn and torchvision.models are allowed besides tensors and plain data, and
    what the user allowed by ``torch.serialization.add_safe_globals``. With ``trust`` anything is
    unpickled, which runs whatever code the file names.

    Raises:
        FileError: the file is missing, truncated, no ``torch.save`` file, or names other classes.
    """
    source = Path(path)
    check_whole(source)
    return _load(str(source), str(source), trust)


def load_bytes(content: bytes, name: str, *, trust: bool = False, room: int = 0) -> Any:
    """Load a file in memory as ``load_pickle`` does; messages call it ``name``.

    Its tensors may look larger than ``content`` by ``room`` bytes.
    """
    file = io.BytesIO(content)
    check_archive(file, name)
    return _load(file, name, trust, room)


def check_exists(source: Path) -> None:
    """Raise FileError unless the path is an ordinary file; reading any other could block."""
    if source.is_dir():
        is_of_transformers = (source / "config.json").is_file()
        way_on = f" Of a model of transformers give transformers:{source}." * is_of_transformers
        raise FileError(f"{source} is a folder, not a model file.{way_on}")
    if not source.exists():
        before, _, name = str(source).partition(":")
        is_name = name and len(before) > 1  # torchvision:resnet18; one letter is a drive
        way_on = f" Of a network by name, `l0prune gate {source}` makes a file." if is_name else ""
        raise FileError(f"{source} does not exist.{way_on}")
    if not source.is_file():
        raise FileError(f"{source} is a pipe or a device, not a model file.")


def check_whole(source: Path) -> None:
    """Raise FileError for a file that ``torch.save`` did not write, or that is truncated."""
    check_exists(source)
    try:
        with source.open("rb") as file:
            head = file.read(len(_BEFORE_1_6))
        is_archive = zipfile.is_zipfile(source)
    except OSError as error:
        raise FileError(f"{source} cannot be read: {error.strerror or error}.") from error
    except zipfile.BadZipFile as error:
        raise FileError(f"{source} is damaged or truncated: {error}.") from error
    if not head:
        raise FileError(f"{source} is empty.")
    if is_archive:
        check_archive(str(source), str(source))
    elif head[:2] == b"PK":
        raise FileError(f"{source} is damaged or truncated: the end of the archive is missing.")
    elif source.suffix == ".onnx":
        raise FileError(f"{source} is an ONNX file without gates: first l0prune gate {source}")
    elif head != _BEFORE_1_6:
        raise FileError(f"{source} is not a model file: it was not written by torch.save. {SAVE}")


def _load(file: str | io.BytesIO, name: str, trust: bool, room: int = 0) -> Any:
    if trust:
        return _load_trusted(file, name)
    try:
        with safe_globals(_needed(file, name)):
            found = torch.load(file, map_location="cpu", weights_only=True)
        check_ordinary(found, _length(file) + room)
    except FileError:
        raise
    except pickle.UnpicklingError as error:
        raise FileError(_refusal(name, _is_old(file), error)) from error
    # A pickle is a foreign program, which can raise anything.
    except Exception as error:
        raise FileError(f"{name} is damaged or truncated: {first_line(error)}") from error
    return found


def _length(file: str | io.BytesIO) -> int:
    return os.path.getsize(file) if isinstance(file, str) else file.getbuffer().nbytes


def _is_old(file: str | io.BytesIO) -> bool:  # as torch before 1.6 wrote it
    return isinstance(file, str) and not zipfile.is_zipfile(file)


def _needed(file: str | io.BytesIO, name: str) -> list[Any]:
    """Return the globals that the file names, each after the object that replaces it."""
    if _is_old(file):
        return []  # state_dicts need none, modules cannot be read
    globals_ = sorted(get_unsafe_globals_in_checkpoint(file))
    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        found = {global_: allowed(global_) for global_ in globals_}
    except (ImportError, RuntimeError) as error:
        raise FileError(
            f"{name} needs torchvision, which cannot be imported here: {first_line(error)}. "
            "Install the torchvision that belongs to this torch."
        ) from error
    refused = [global_ for global_, value in found.items() if value is None]
    if refused:
        shown = ", ".join(refused[:3]) + (f" and {len(refused) - 3} more" * (len(refused) > 3))
        raise FileError(
            f"{name} was not loaded: it names {shown}, which {'is' if len(refused) == 1 else 'are'}"
            " not among the classes of torch.nn and torchvision.models, and unpickling it would "
            f"run that code. {_WAYS_ON}"
        )
    return [(value, global_) for global_, value in found.items()]


def _load_trusted(file: str | io.BytesIO, name: str) -> Any:
    try:
        with _importable_from_here():
            return torch.load(file, map_location="cpu", weights_only=False)
    except (AttributeError, ImportError) as error:
        raise FileError(
            f"{name} names a class that cannot be found here ({first_line(error)}). Run in the "
            "folder that holds its code, or give the code and the weights apart: "
            "--model path.py:factory --weights state.pt."
        ) from error
    except Exception as error:
        raise FileError(f"{name} could not be unpickled: {error!r}") from error


@contextmanager
def _importable_from_here() -> Iterator[None]:
    """Let pickles find modules in the current folder, as ``python -c`` would."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _refusal(name: str, is_old: bool, error: pickle.UnpicklingError) -> str:
    # torch wraps the unpickler's message in a page of advice about weights_only.
    *_, reason = str(error).partition("WeightsUnpickler error: ")
    short = (reason or first_line(error)).partition(" was not an allowed global")[0]
    what = (
        "only weights can be read safely from files of torch before 1.6, and this one holds more"
        if is_old
        else "it is damaged, or made to do harm"
    )
    return f"{name} was not loaded: {what} ({short}). {_WAYS_ON}"
