"""Defaults of a folder in ``l0prune.toml``, and the names of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from l0prune.errors import UsageError
from l0prune.files.checked_json import read_toml

DEFAULTS_FILE = "l0prune.toml"
_TEXTS = ("model", "input", "data", "data_root")
_SETTINGS = "finetune"


def defaults() -> dict[str, Any]:
    """Return the options given once for all commands in this folder.

    Raises:
        FileError: ``l0prune.toml`` cannot be read, or is no TOML.
        UsageError: it says what is no default.
    """
    path = Path(DEFAULTS_FILE)
    if not path.exists():
        return {}
    found = read_toml(path)
    for name, value in found.items():
        if name not in (*_TEXTS, _SETTINGS):
            raise UsageError(
                f"{DEFAULTS_FILE} has {', '.join(_TEXTS)} and a table [{_SETTINGS}] of the "
                f"settings of training, not {name}"
            )
        kind, what = (dict, "a table") if name == _SETTINGS else (str, "a text")
        if not isinstance(value, kind):
            raise UsageError(f"{name} in {DEFAULTS_FILE} is {what}, not {value!r}")
    return found


def chosen(given: Any, name: str, info: dict[str, Any] | None = None) -> Any:
    """Return an option: as given, else from the model file, else from ``l0prune.toml``."""
    if given is not None:
        return given
    if info and info.get(name) is not None:
        return info[name]
    return defaults().get(name)


def newest(*patterns: str, command: str) -> Path:
    """Return the newest file in this folder that matches any of the patterns.

    Raises:
        UsageError: there is none; ``command`` is what makes one.
    """
    found = [path for pattern in patterns for path in Path().glob(pattern) if path.is_file()]
    if not found:
        raise UsageError(
            f"no file is named and there is no {' or '.join(patterns)} here; `{command}` makes one."
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def output_path(out: Path | None, source: str, suffix: str) -> Path:
    """Return the path to write: ``out``, else here after the model's name: ``model.gated.pt``."""
    if out is not None:
        return out
    kind, _, name = source.rpartition(":")
    stem = name if kind and not Path(source).exists() else Path(source).name
    for ending in (".gated.pt", ".tuned.pt", ".pt", ".pth"):
        if stem.endswith(ending):
            stem = stem.removesuffix(ending)
            break
    return Path(f"{stem.replace('/', '_')}{suffix}")
