"""JSON of our own files: read, of a version that we know, and of the right types."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from l0prune.errors import FileError


class Strict(BaseModel):
    """Data that are what they say: no text for a number."""

    model_config = ConfigDict(strict=True)


_Checked = TypeVar("_Checked", bound=Strict)
_SHOWN = 3  # of the entries that are wrong


def checked(
    content: Any, kind: type[_Checked], newest: int, where: object, or_else: str = ""
) -> _Checked:
    """The data of a file, which have a ``version``.

    Args:
        content: JSON as text, or what it says.
        kind: what it has to be.
        newest: the last version of the format that we know.
        where: what messages call the file.
        or_else: what else it may be, if it is not damaged.

    Raises:
        FileError: it is damaged, or of a newer version.
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
        return kind.model_validate(data)
    except ValidationError as error:
        named = dict.fromkeys(".".join(map(str, each["loc"])) for each in error.errors())
        shown = ", ".join(list(named)[:_SHOWN])
        raise FileError(f"{where} is damaged: {shown} missing or of the wrong type.") from error
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise FileError(f"{where} is damaged{or_else}: {error!r}") from error
