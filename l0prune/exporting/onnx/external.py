"""Weights of an ONNX file in a separate one, where both would be larger than protobuf allows."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

LARGEST = 2**31 - 1  # a protobuf file cannot be larger
_ROOM = 0.95  # share of it for weights; the rest is for the graph


@contextmanager
def data_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new path for the weights of an ONNX file, if they need a separate file.

    Enter the context before the ONNX file is made, leave it after the file has its name. So a kill
    leaves the old file with its weights, or the new file with the new ones. On exit weights that
    the file does not name are deleted: the old ones, or the new ones if it was not replaced.
    """
    target = Path(os.path.realpath(path))
    ours = re.compile(re.escape(target.name) + r"\.[0-9a-f]{8}\.data")
    try:
        yield target.with_name(f"{target.name}.{secrets.token_hex(4)}.data")
    finally:
        with contextlib.suppress(OSError):  # leftovers only take space
            found = [file for file in target.parent.iterdir() if ours.fullmatch(file.name)]
            content = target.read_bytes() if found and target.exists() else b""
            for file in found:
                if file.name.encode() not in content:
                    file.unlink()


def is_large(model: onnx_ir.Model) -> bool:
    """Check whether the weights of a model are too large for one file."""
    weights = {id(value.const_value): value.const_value for value in _weights(model)}
    return sum(tensor.nbytes for tensor in weights.values() if tensor) > _ROOM * LARGEST


def move_out(model: onnx_ir.Model, data: Path) -> None:
    """Move the weights of a model to an external data file, in place."""
    import onnx_ir

    onnx_ir.external_data.unload_from_model(model, data.parent, data.name)
    with open(data, "rb+") as file:
        os.fsync(file.fileno())


def _weights(model: onnx_ir.Model) -> list[onnx_ir.Value]:
    return [value for graph in model.graphs() for value in graph.initializers.values()]
