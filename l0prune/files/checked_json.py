"""Reading of JSON and TOML; version, digest and types of l0prune's files are checked."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from l0prune.errors import FileError
from l0prune.files.atomic import PathLike


class Strict(BaseModel):
    """Base of strictly typed data: a string is not converted to a number."""

    model_config = ConfigDict(strict=True)


def read_text(path: PathLike) -> str:
    """Return the UTF-8 text in a file.

    Raises:
        FileError: it is missing, cannot be read, or holds no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is damaged: it is no text in UTF-8 ({error.reason}).") from error


def read_json(path: PathLike, way_on: str = "Write it anew.") -> Any:
    """Return the data in a file of JSON.

    Raises:
        FileError: it is missing, cannot be read, or is no JSON; ends with the ``way_on``.
    """
    return _parsed(path, json.loads, f"{path} is damaged, it is no JSON", way_on)


def read_toml(path: PathLike) -> dict[str, Any]:
    """Return the data in a file of TOML.

    Raises:
        FileError: it is missing, cannot be read, or is no TOML.
    """
    found: dict[str, Any] = _parsed(path, tomllib.loads, f"{path} is no TOML", "Correct it there.")
    return found


def _parsed(path: PathLike, parse: Callable[[str], Any], wrong: str, way_on: str) -> Any:
    text = read_text(path)
    try:
        return parse(text)
    except (RecursionError, ValueError) as error:
        reason = "it is nested without end" if isinstance(error, RecursionError) else error
        raise FileError(f"{wrong}: {reason}. {way_on}") from error


T = TypeVar("T")
_Checked = TypeVar("_Checked", bound=Strict)
_SHOWN = 3  # number of wrong entries in a message


def checked(
    content: Any, kind: type[_Checked], newest: int, where: object, or_else: str = ""
) -> _Checked:
    """Return the data of a file as ``kind``, with the ``version`` and any ``digest`` checked.

    ``newest`` is the last version of the format that we know, ``where`` what messages call the
    file, ``or_else`` what else it may be, if it is not damaged.

    Raises:
        FileError: it is damaged, was changed after it was written, or is of a newer version.
    """
    try:
        data = json.loads(content) if isinstance(content, str | bytes) else content
        version = data["version"]
        if type(version) is not int or version < 1:
            raise ValueError(f"version {version!r}")
        if version > newest:
            raise FileError(
                f"{where} was written by a newer l0prune (format {version}, this one reads up to "
                f"{newest}). Upgrade with: pip install --upgrade l0prune"
            )
        result = kind.model_validate(data)
        if "digest" in kind.model_fields:
            check_seal(data, where)
        return result
    except ValidationError as error:
        raise FileError(f"{where} is damaged: {_wrong(error)}.") from error
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise FileError(f"{where} is damaged{or_else}: {error!r}") from error


def parsed(kind: TypeAdapter[T], data: Any) -> T:
    """Validate data of JSON as this type.

    Raises:
        ValueError: the data is of another type; the message is one line.
    """
    try:
        return kind.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ValueError(_wrong(error)) from error
    except (RecursionError, TypeError) as error:
        raise ValueError(repr(error)) from error


def _wrong(error: ValidationError) -> str:
    named = dict.fromkeys(".".join(map(str, each["loc"])) for each in error.errors())
    return f"{', '.join(list(named)[:_SHOWN])} missing or of the wrong type"


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON data with its digest as the last entry."""
    rest = {name: value for name, value in data.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def check_seal(data: Mapping[str, Any], where: object) -> None:
    """Raise FileError if the digest in JSON data does not match the data."""
    if data.get("digest") != sealed(data)["digest"]:
        raise damaged(where)


def damaged(where: object) -> FileError:
    """Return the error for a file with a wrong or missing digest."""
    return FileError(
        f"{where} is damaged: its content has changed since it was written (its digest is "
        "another). Copy or write it anew."
    )
