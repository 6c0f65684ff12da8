"""Folders written whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from l0prune.errors import FileError
from l0prune.files.atomic import PathLike, sync_folder, writing


@contextmanager
def replaced_folder(path: PathLike, last: str, known: Collection[str]) -> Iterator[Path]:
    """A folder beside ``path``, for files to be made in the context; they are put there after it.

    Where there was no such folder, a kill at any moment leaves none or the whole of it. Into one
    that is there its files are moved one by one, ``last`` at the end; what else lies in it stays.
    Where the context raises, nothing is changed.

    Args:
        path: of the folder.
        last: name of the file that says what the others are.
        known: names of files that belong to ``last``: old ones that are not made anew are removed.

    Raises:
        FileError: the folder cannot be made, or something else has its name.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise FileError(f"{path} was not written: it is no folder. Give the path of one.")
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with writing(path):
            scratch.mkdir(parents=True)
            yield scratch
            for file in scratch.iterdir():
                with open(file, "rb+") as opened:
                    os.fsync(opened.fileno())
            sync_folder(scratch)
            _move(scratch, target, last, known)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move(scratch: Path, target: Path, last: str, known: Collection[str]) -> None:
    if not target.exists():
        os.rename(scratch, target)
        sync_folder(target.parent)
        return
    names = sorted((file.name for file in scratch.iterdir()), key=lambda name: name == last)
    stale = set(known) - set(names) if (target / last).exists() else set()
    for name in names:
        if name == last:
            for each in stale:
                (target / each).unlink(missing_ok=True)
        os.replace(scratch / name, target / name)
    sync_folder(target)
