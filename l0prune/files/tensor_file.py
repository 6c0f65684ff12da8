"""Files of tensors and a few texts, in the safetensors format.

The safetensors library reads, and checks every offset against the file's length. Writing is done
here: the library writes texts in a varying order, and holds the whole file in memory. Two digests
among the texts detect changed bytes: one of the tensors, and one of the header, which holds the
first.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from l0prune.errors import FileError
from l0prune.files.atomic import PathLike, atomic_write
from l0prune.files.checked_json import damaged

# Dtypes that every version of safetensors knows by these names.
DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MAX_HEADER = 64 * 2**20
_TEXTS = "__metadata__"
# Keys of texts that only l0prune writes, and that require the digests: for a gated model, a
# smaller model, and a folder of one.
GATED, MANIFEST, SAVE = "l0prune", "manifest", "save"
_OF_DATA, _OF_HEADER = "digest_of_tensors", "digest_of_header"
_HASH_BYTES, _CHUNK = 16, 2**20
_NO_DIGEST = "0" * (2 * _HASH_BYTES)  # in the header while its digest is computed


def is_tensor_file(path: PathLike) -> bool:
    """Return whether the file begins like safetensors; False for a pipe or a device."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(10)
    header = int.from_bytes(head[:8], "little")
    return head[8:] in (b'{"', b"{}") and header <= os.path.getsize(path) - 8


def each_once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors without tied duplicates, and the first name for each duplicate."""
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor
    return kept, tied


def write_tensors(path: PathLike, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors and texts with their digests, atomically; the same ones give the same bytes.

    Args:
        path: the file.
        tensors: by name; of one of ``DTYPES``, on any device.
        texts: what ``read_texts`` gives back.

    Raises:
        FileError: the file cannot be written, or a tensor is of no such dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            kind = "meta" if tensor.is_meta else f"{tensor.dtype} {tensor.layout}"
            raise FileError(
                f"{path} was not written: {name} is a tensor ({kind}) that safetensors cannot hold."
            )
    # Widest dtypes first, so that every tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {_TEXTS: {**texts, _OF_DATA: _NO_DIGEST, _OF_HEADER: _NO_DIGEST}}
    start = 0
    for name in order:
        tensor = tensors[name]
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise FileError(f"{path} was not written: its header has {len(text):,} bytes.")

    def write(file: BinaryIO) -> None:
        found = _hash()
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().reshape(-1)
            content = plain.contiguous().view(torch.uint8).numpy().data
            found.update(content)
            file.write(content)
        whole = _with_digest(text, _OF_DATA, found.hexdigest())
        file.seek(8)
        file.write(_with_digest(whole, _OF_HEADER, _hash(whole).hexdigest()))

    atomic_write(path, write)


def _hash(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=_HASH_BYTES)


def _with_digest(header: bytes, name: str, digest: str, before: str = _NO_DIGEST) -> bytes:
    """Return the header with the digest under this name replaced."""
    entry = f'"{name}":"{{}}"'
    return header.replace(entry.format(before).encode(), entry.format(digest).encode(), 1)


def read_texts(path: PathLike) -> dict[str, str]:
    """Return the texts in a file; no tensor is read.

    Raises:
        FileError: the file is missing, damaged or truncated, or has changed since it was written.
    """
    with _opened(path) as file:
        texts = dict(file.metadata() or {})
    found, _ = texts.pop(_OF_HEADER, None), texts.pop(_OF_DATA, None)
    if found is not None or _is_ours(texts):
        with open(path, "rb") as raw:
            header = raw.read(int.from_bytes(raw.read(8), "little"))
        plain = _with_digest(header, _OF_HEADER, _NO_DIGEST, before=str(found))
        _check(found, _hash(plain), path)
    return texts


def read_tensors(path: PathLike) -> dict[str, Tensor]:
    """Return the tensors in a file, as copies on the CPU.

    Raises:
        FileError: the file is missing, damaged or truncated, has changed since it was written, or
            holds an unknown dtype.
    """
    texts = read_texts(path)
    try:
        with _opened(path) as file:
            digest = (file.metadata() or {}).get(_OF_DATA)
            # The library's tensors are memory-mapped, and another process may write to the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if digest is not None or _is_ours(texts):
        found = _hash()
        with open(path, "rb") as raw:
            raw.seek(8 + int.from_bytes(raw.read(8), "little"))
            while chunk := raw.read(_CHUNK):
                found.update(chunk)
        _check(digest, found, path)
    return tensors


def _is_ours(texts: Mapping[str, str]) -> bool:
    """Return whether only ``write_tensors`` can have written the file."""
    return not texts.keys().isdisjoint({GATED, MANIFEST, SAVE})


def _check(digest: str | None, found: hashlib.blake2b, path: PathLike) -> None:
    if digest != found.hexdigest():
        raise damaged(path)


def _opened(path: PathLike) -> safe_open:
    try:
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > _MAX_HEADER:
            raise FileError(f"{path} is damaged: it claims a header of {header:,} bytes.")
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise FileError(f"{path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error


class Stored(NamedTuple):
    """Stored form of tensors: no duplicates, supported dtypes, and notes to restore the rest.

    Attributes:
        tensors: by name, as they are stored.
        ties: further names of tensors that are stored under another one.
        notes: for a tensor that is stored in another form, how to restore it: ``dtype`` and
            ``shape`` if it is stored as bytes, ``order`` if its dims are permuted.
    """

    tensors: dict[str, Tensor]
    ties: dict[str, str]
    notes: dict[str, dict[str, Any]]

    @staticmethod
    def of(given: Mapping[str, Tensor]) -> Stored:
        """Return the stored form of tensors, which must be ``storable``."""
        tensors, ties = each_once(given)
        stored, notes = {}, {}
        for name, tensor in tensors.items():
            stored[name], note = _noted(tensor.detach())
            if note:
                notes[name] = note
        return Stored(stored, ties, notes)

    def opened(self) -> dict[str, Tensor]:
        """Restore the tensors under all their names; tied ones are one object.

        Raises:
            KeyError, RuntimeError, TypeError, ValueError: notes or ties do not fit the tensors.
        """
        found = {name: _as_noted(t, self.notes.get(name, {})) for name, t in self.tensors.items()}
        return {**found, **{name: found[other] for name, other in self.ties.items()}}


def storable(tensor: Tensor) -> Tensor:
    """Return the tensor; raise TypeError if it has no entries that a file could hold."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError("a tensor without ordinary entries (on the meta device, sparse, …)")
    return tensor


def _noted(tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    note: dict[str, Any] = {}
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -tensor.shape[dim]))
    if order != sorted(order) and tensor.permute(order).is_contiguous():
        note["order"] = order
        tensor = tensor.permute(order)
    if tensor.dtype not in DTYPES:
        note |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        tensor = tensor.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return tensor, note


def _as_noted(tensor: Tensor, note: Mapping[str, Any]) -> Tensor:
    if "dtype" in note:
        dtype = getattr(torch, note["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{note['dtype']!r} is no dtype")
        tensor = tensor.view(dtype).reshape(note["shape"])
    if "order" in note:
        order = note["order"]
        tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
    return tensor


def encode(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Return the value as JSON data; put its tensors into ``tensors``, under ``name``.

    Raises:
        TypeError: it holds anything but tensors, numbers and text in tuples, lists and dicts.
    """
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
        tensors[name] = storable(value)
        return {"tensor": name}
    if type(value) in (tuple, list):
        parts = [encode(part, tensors, f"{name}.{number}") for number, part in enumerate(value)]
        return parts if type(value) is list else {"tuple": parts}
    if type(value) is dict:
        pairs = list(value.items())
        return {"dict": [encode(list(p), tensors, f"{name}.{n}") for n, p in enumerate(pairs)]}
    if type(value) is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) in (int, float, bool, str, type(None)):
        return value
    raise TypeError(f"a {type(value).__name__}")


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of ``encode``.

    Raises:
        KeyError, TypeError, ValueError: the data does not come from ``encode``.
    """
    match data:
        case list(parts):
            return [decode(part, tensors) for part in parts]
        case {"tensor": str(name)}:
            return tensors[name]
        case {"tuple": list(parts)}:
            return tuple(decode(part, tensors) for part in parts)
        case {"dict": list(pairs)}:
            return dict(decode(pair, tensors) for pair in pairs)
        case {"complex": [str(real), str(imaginary)]}:
            return complex(float(real), float(imaginary))
        case {"float": str(text)}:
            return float(text)
        case int() | float() | str() | None:
            return data
    raise ValueError(f"{data!r} stands for nothing")
