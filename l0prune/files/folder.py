"""Folders written whole or not at all; folders of one run at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from l0prune.errors import FileError
from l0prune.files.atomic import (
    PathLike,
    held,
    remove_litter,
    sync_folder,
    temporary_name,
    writing,
)

LOCK = ".l0prune.lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Within the context the folder, which is made, is this run's; the lock ends with its process.

    A folder that was made for nothing, as the context raises, is removed.

    Raises:
        FileError: another run has it, or it cannot be made.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file of this name is there" if folder.is_file() else error.strerror or error
        raise FileError(f"the folder {folder} cannot be made: {why}") from error
    lock = FileLock(folder / LOCK)
    try:
        with suppress(NotImplementedError):  # a file system without locks
            lock.acquire(timeout=0)
    except Timeout as error:
        raise FileError(
            f"another run is going on in {folder}. Wait until it is done, or stop it; or give this "
            "run a folder of its own (--out, --run; out= in Python)."
        ) from error
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {error.strerror or error}.") from error
    try:
        yield
    except BaseException:
        if is_new and [each.name for each in folder.iterdir()] == [LOCK]:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


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
    scratch = temporary_name(target)
    try:
        remove_litter(target)
        with writing(path), held(scratch, lambda: scratch.mkdir(parents=True)):
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
