"""Files: written whole or not at all, and read as if somebody hostile had made them."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import pickle
import pkgutil
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from l0prune.errors import FileError

# Packages whose nn.Module classes an ordinary pickled model may name.
_TRUSTED = ("torch.nn.modules", "torch.ao.nn.qat.modules", "torchvision.models", "torchvision.ops")
# Activations that modules keep as plain functions. Calling one does nothing but arithmetic.
_ACTIVATIONS = (
    "relu relu6 gelu silu tanh sigmoid elu selu celu leaky_relu hardswish hardtanh mish softplus "
    "softmax log_softmax logsigmoid"
)


def atomic_write(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Write a file so that a kill at any moment leaves the old one or the new one, whole.

    ``write`` gets a binary file in the same folder; it is flushed to disk and renamed.

    Raises:
        FileError: the folder does not exist, is not writable, or the disk is full.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "writ" not in str(error):
            raise
        raise FileError(_cannot_write(target, error)) from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _cannot_write(target: Path, error: Exception) -> str:
    full = getattr(error, "errno", None) == errno.ENOSPC or "file write failed" in str(error)
    cause = "the disk is full" if full else str(error)
    return f"{target} was not written: {cause}. Whatever stood there before is unchanged."


def load_pickle(path: str | os.PathLike[str], *, trust: bool = False) -> Any:
    """What ``torch.save`` wrote, without running code from the file.

    Classes of torch.nn and torchvision.models are allowed besides tensors and plain data.
    With ``trust`` anything is unpickled, which runs whatever code the file names.

    Raises:
        FileError: the file is missing, truncated, no ``torch.save`` file, or names other classes.
    """
    source = Path(path)
    _check_is_archive(source)
    try:
        if trust:
            return torch.load(source, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(list(_allowed())):
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(_refusal(source, str(error))) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile, OSError, KeyError, ValueError) as error:
        raise FileError(f"{source} is damaged or truncated: {_first_line(error)}") from error
    except (AttributeError, ImportError, TypeError) as error:
        raise FileError(
            f"{source} names a class that cannot be found here ({_first_line(error)}). "
            "Give the code and the weights apart: --model path.py:factory --weights state.pt."
        ) from error


def _check_is_archive(source: Path) -> None:
    """Say what the file is where it is no ``torch.save`` archive."""
    if source.is_dir():
        raise FileError(f"{source} is a folder, not a model file.")
    if not source.exists():
        raise FileError(f"{source} does not exist.")
    if source.stat().st_size == 0:
        raise FileError(f"{source} is empty.")
    if not zipfile.is_zipfile(source):
        with source.open("rb") as file:
            head = file.read(4)
        if head[:2] == b"PK":
            raise FileError(f"{source} is damaged or truncated: the end of the archive is missing.")
        if head[:1] == b"\x80":  # the pickle format of torch < 1.6
            return
        raise FileError(
            f"{source} is not a model file: it was not written by torch.save. "
            "Save the whole module with torch.save(model, path)."
        )
    names = zipfile.ZipFile(source).namelist()
    if any(n.endswith(("archive_format", "models/model.json")) for n in names):
        raise FileError(
            f"{source} is an exported program (.pt2), whose modules and training mode are gone. "
            "l0prune trains the model, so give the nn.Module itself: torch.save(model, path)."
        )
    if any(n.endswith("constants.pkl") and "/" in n for n in names) and any(
        "/code/" in n for n in names
    ):
        raise FileError(
            f"{source} is a TorchScript file. Give the nn.Module itself: torch.save(model, path)."
        )


@functools.cache
def _allowed() -> tuple[Any, ...]:
    """Classes and functions that an ordinary pickled model may name."""
    functions = [getattr(nn.functional, name) for name in _ACTIVATIONS.split()]
    classes = [cls for package in _TRUSTED for cls in _module_classes(package)]
    return (*classes, *functions, functools.partial, set, slice)


def _module_classes(package: str) -> Iterator[type]:
    """Every nn.Module class that is defined inside the package itself."""
    root = importlib.import_module(package)
    names = [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
    for name in (package, *names):
        module = importlib.import_module(name)
        for value in vars(module).values():
            is_module = isinstance(value, type) and issubclass(value, nn.Module)
            if is_module and value.__module__.startswith(package):
                yield value


def _refusal(source: Path, text: str) -> str:
    found = re.search(r"(?:GLOBAL|class|global) ([\w.]+)", text)
    named = re.search(r"Unsupported global: GLOBAL ([\w.]+)", text) or found
    what = f"it names {named.group(1)}" if named else _first_line(text)
    return (
        f"{source} was not loaded: {what}, which is neither torch.nn nor torchvision.models, and "
        "unpickling it would run its code. Two ways on: give the code and the weights apart "
        "(--model path.py:factory --weights state.pt), or, if you trust whoever made the file, "
        "add --trust-pickle."
    )


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
