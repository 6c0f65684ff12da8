"""The archives of ``torch.save``: what they must look like before anything in them is read."""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile

from l0prune.errors import FileError

# A pickle names a few objects a layer; what it makes of one byte is at most some 200.
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
    """Refuse an archive that is none of ``torch.save``, or that would unpack to more than it is.

    Args:
        file: the path of a zip archive, or its bytes.
        name: what messages call it.

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
    inside = {entry.partition("/")[2] for entry in names}  # all of it lies in one folder
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
    """torch reads the archive anew: both must find the same directory, or checks are in vain."""
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
    """Read every entry whole: the library compares its checksum, which torch does not look at.

    Raises:
        BadZipFile: another one was written.
    """
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
