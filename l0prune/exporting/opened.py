"""Loading of any model that l0prune reads or writes as a module for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.capture.threads import muted
from l0prune.errors import DataError, FileError, first_line
from l0prune.files.artifact import load
from l0prune.files.model_sources import load_model
from l0prune.files.onnx_session import session_of
from l0prune.files.pickles import check_exists
from l0prune.files.smaller_model import is_smaller_model
from l0prune.files.tensor_file import is_tensor_file, read_texts

ONNX, PROGRAM = ".onnx", ".pt2"
ON_CPU = (ONNX, PROGRAM)  # files that run on the CPU only


def opened(spec: str, *, trust_pickle: bool = False) -> nn.Module:
    """Load the model of a file, a folder or a name.

    Args:
        spec: an ONNX file, a program (``.pt2``), a gated model, a smaller one (a folder, a state),
            a pickled module, or a name, as ``load_model`` takes it.
        trust_pickle: see ``load_model``; required for programs.

    Raises:
        FileError: the file is missing, damaged, or not trusted.
        UsageError: the name is unknown.
    """
    path = Path(spec)
    if path.suffix == ONNX:
        check_exists(path)
        return OnnxFile(path)
    if path.suffix == PROGRAM:
        check_exists(path)
        return _Program(path, trust_pickle)
    is_gated = is_tensor_file(path) and "l0prune" in read_texts(path)
    if is_gated or is_smaller_model(path):
        return load(path, trust_pickle=trust_pickle)
    return load_model(spec, trust_pickle=trust_pickle)


class Outputs(dict[str, Tensor]):
    """Outputs of an ONNX file by key, attribute or index."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __getitem__(self, key: str | int) -> Tensor:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class OnnxFile(nn.Module):
    """An ONNX file in ONNX Runtime, on the CPU.

    Attributes:
        facts: metadata of the file, by key.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            self._session = session_of(str(path))
            self.facts: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        except Exception as error:  # ONNX Runtime has many classes
            raise FileError(f"ONNX Runtime cannot open {path}: {first_line(error)}") from error
        self._path = path

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Return the file's output, or ``Outputs`` if it has several.

        Raises:
            DataError: the inputs are not those that the file takes.
        """
        given = self._session.get_inputs()
        by_place = zip((each.name for each in given), inputs, strict=False)
        tensors = {**dict(by_place), **named}
        if len(inputs) > len(given) or any(each.name not in tensors for each in given):
            takes = ", ".join(each.name for each in given)
            gives = ", ".join([*(["inputs by place"] if inputs else []), *named])
            raise DataError(f"{self._path} takes {takes}; the data gives {gives or 'nothing'}")
        feed = {each.name: self._fitted(each, tensors[each.name]) for each in given}
        try:
            found = self._session.run(None, feed)
        except Exception as error:
            reason = first_line(error)
            raise DataError(f"{self._path} does not run on this data: {reason}") from error
        names = [each.name for each in self._session.get_outputs()]
        values = [torch.from_numpy(np.asarray(each)) for each in found]
        return values[0] if len(values) == 1 else Outputs(zip(names, values, strict=True))

    def _fitted(self, wanted: Any, tensor: Tensor) -> np.ndarray:
        """Convert a tensor to the file's input type; DataError if shape or kind do not fit."""
        sizes, shape = list(wanted.shape), tuple(tensor.shape)
        fits = [a == b or not isinstance(a, int) for a, b in zip(sizes, shape, strict=False)]
        kind = np.dtype(_TYPES.get(wanted.type, "object"))
        array = tensor.detach().cpu().numpy()
        if len(sizes) == len(shape) and all(fits) and array.dtype.kind == kind.kind:
            return np.ascontiguousarray(array, dtype=kind)
        text = (
            f"{self._path} takes {wanted.name} of shape ({', '.join(map(str, sizes))}) in {kind}; "
            f"the data gives {shape} in {array.dtype}"
        )
        if len(sizes) == len(shape) and all(fits[1:]) and isinstance(sizes[0], int):
            text += f". The file is for batches of {sizes[0]}: --batch-size {sizes[0]}"
        raise DataError(text)


_TYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


class _Program(nn.Module):
    """Module around a ``torch.export`` program; its graph raises on ``train()`` and ``eval()``."""

    def __init__(self, path: Path, trust: bool) -> None:
        super().__init__()
        if not trust:
            raise FileError(
                f"{path} was not opened: torch's reader of .pt2 files can run code that is in "
                "them. Add --trust-pickle (trust_pickle=True) if you trust whoever made it; the "
                "ONNX file of the same export needs no trust."
            )
        try:
            with muted():  # torch logs a traceback before it raises
                program = torch.export.load(path)
        except Exception as error:  # a damaged archive may raise any class
            raise FileError(f"{path} is damaged: {first_line(error)}") from error
        self._graph = (program.module(),)  # in a tuple, hidden from train() and eval()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the program's outputs."""
        return self._graph[0](*inputs, **named)
