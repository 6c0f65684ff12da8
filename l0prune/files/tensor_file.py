"""Tensors and a few texts in one file, in the format of safetensors.

Reading is the library's, which checks every offset against the file's length. Writing is ours: the
library writes texts in an order of their own each time, and holds the whole file in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from l0prune.errors import FileError
from l0prune.files.atomic import PathLike, atomic_write

# Numbers that every version of safetensors knows by these names.
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


def is_tensor_file(path: PathLike) -> bool:
    """Does the file begin as one of safetensors? False for what is no ordinary file."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(10)
    header = int.from_bytes(head[:8], "little")
    return head[8:] in (b'{"', b"{}") and header <= os.path.getsize(path) - 8


def each_once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without those that are tied to an earlier one, and the names of those.

    Returns:
        Tensors by name, and for each further name of one of them that name.
    """
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
    """Write tensors and texts, atomically; the same ones give the same bytes.

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
    # Wide numbers first, so that all of them lie at multiples of their size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {_TEXTS: dict(texts)} if texts else {}
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
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().reshape(-1)
            file.write(plain.contiguous().view(torch.uint8).numpy().data)

    atomic_write(path, write)


def read_texts(path: PathLike) -> dict[str, str]:
    """The texts in a file; no tensor is read.

    Raises:
        FileError: the file is missing, damaged or truncated.
    """
    with _opened(path) as file:
        return dict(file.metadata() or {})


def read_tensors(path: PathLike) -> dict[str, Tensor]:
    """The tensors in a file, on the CPU, in memory of their own.

    Raises:
        FileError: the file is missing, damaged or truncated, or holds numbers that are not known.
    """
    try:
        with _opened(path) as file:
            # The library's tensors lie in the file, which somebody else may write to.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged: {error}") from error


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
