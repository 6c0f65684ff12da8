"""Files of other formats that networks are read from, where the network is what the file says."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class SourceFile:
    """Source file of a network, and the network's measured error.

    Attributes:
        file: its path.
        sha256: of its bytes, without those of weights beside it.
        inputs, outputs: names in the file.
        batch: examples on which ONNX Runtime, with the file, and the network were compared.
        error: their largest difference, relative to the output's scale; in float32.
        tolerance: the largest error allowed.
    """

    file: str
    sha256: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int
    error: float
    tolerance: float


def source_file_of(model: nn.Module) -> SourceFile | None:
    """Return the file that a network was read from, its attribute ``origin``; None if none was.

    Such a network also has an ``example_input_array`` of the shapes that the file declares.
    """
    found = getattr(model, "origin", None)
    return found if isinstance(found, SourceFile) else None
