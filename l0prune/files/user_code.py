"""The user's own Python files: ``file.py:name`` names what one of them defines."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from l0prune.errors import FileError, L0pruneError, UsageError
from l0prune.files.consent import remember


def named(spec: str) -> Any:
    """What ``file.py:name`` names. The file is run, once as long as it does not change.

    Its folder is put at the front of ``sys.path``, as Python does for a script. Files may name
    this code from now on, as long as it does not change.

    Raises:
        FileError: there is no such file, or it fails while it runs.
        UsageError: it defines no such name.
    """
    path, _, name = spec.rpartition(":")
    remember(spec)
    module = _imported(Path(path))
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{path} has no {name!r}; it defines {', '.join(own) or 'no function'}.")
    return getattr(module, name)


def called(function: Any, spec: str) -> Any:
    """What the user's function returns when it is called without arguments.

    Raises:
        UsageError: it is no function, or fails.
    """
    if not callable(function):
        raise UsageError(f"{spec} is a {type(function).__name__}, not a function to call.")
    try:
        return function()
    except L0pruneError:
        raise
    except (Exception, SystemExit) as error:
        where = _place(error, spec.rpartition(":")[0])
        raise UsageError(
            f"{spec} failed when it was called without arguments: {error!r}{where}"
        ) from error


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileError(f"{path} does not exist.")
    path = path.resolve()
    stat = path.stat()
    # Pickles find a class by the name of its module, so one content must have one module.
    version = hashlib.sha256(f"{path} {stat.st_mtime_ns} {stat.st_size}".encode()).hexdigest()[:8]
    name = f"l0prune_user_{path.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or path.suffix != ".py":
        raise FileError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        where = _place(error, str(path))
        raise FileError(f"{path} failed while it was imported: {error!r}{where}") from error
    return module


class _FromSource(SourceFileLoader):
    """Reads the file each time, and leaves no ``__pycache__`` beside it.

    Python takes compiled code for that of a file if its size and the second of its last change are
    the same: a number that was changed right after a run would be the old one.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _place(error: BaseException, path: str) -> str:
    """The last line of the user's file that the error came through."""
    if isinstance(error, SyntaxError):
        return ""  # says itself where it is
    file = str(Path(path).resolve())
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({path}, line {lines[-1]})" if lines else ""
