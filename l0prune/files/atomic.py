"""Atomic writing of files and folders, and folders that are locked by one run."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from l0prune.errors import FileError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PathLike = str | os.PathLike[str]


def atomic_write(path: PathLike, write: Callable[[BinaryIO], None]) -> None:
    """Write a file so that a kill at any moment leaves the old one or the new one, whole.

    ``write`` gets a binary file in the same folder; it is flushed to disk and renamed.

    Raises:
        FileError: the folder does not exist, is not writable, or the disk is full, or the path
            is a folder or a device.
    """
    with replacement(path) as temporary, open(temporary, "wb") as file:
        write(file)


@contextmanager
def replacement(path: PathLike) -> Iterator[Path]:
    """Yield an empty file in the same folder, to be filled in the context and renamed after it.

    It is flushed to disk before; if the context raises, it is removed and nothing else is changed.
    Temporary files of earlier writes that were killed are removed.

    Raises:
        FileError: as ``atomic_write``.
    """
    target, temporary = _target(path)
    try:
        remove_litter(target)
        with writing(path), held(temporary, lambda: temporary.touch(exist_ok=False)):
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
            sync_folder(target.parent)
    finally:
        with suppress(OSError):  # such as if the folder is a file, an error that is raised above
            temporary.unlink()


def check_writable(path: PathLike) -> None:
    """Check that a file can be written at the path, before long work.

    Raises:
        FileError: as ``atomic_write``.
    """
    _, temporary = _target(path)
    with writing(path):
        temporary.touch(exist_ok=False)
        temporary.unlink(missing_ok=True)


def _target(path: PathLike) -> tuple[Path, Path]:
    """Return the file that a path resolves to, and a temporary name beside it."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "no ordinary file"
        raise FileError(f"{path} was not written: it is {kind}. Give the path of a file.")
    return target, temporary_name(target)


def temporary_name(target: Path) -> Path:
    """Return a new temporary name beside a file or folder, which ``remove_litter`` recognizes."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")


@contextmanager
def held(temporary: Path, make: Callable[[], None]) -> Iterator[None]:
    """Make and lock a temporary file or folder, so that ``remove_litter`` leaves it alone."""
    handle = None
    while not temporary.exists():  # again if another process removed it before it was locked
        if handle is not None:
            os.close(handle)
        make()
        handle = _locked(temporary, waits=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def remove_litter(target: Path) -> None:
    """Remove temporary files of interrupted writes beside this file or folder.

    Those that another process is writing are locked, and stay; locks end with their process.
    """
    ours = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{8}\.part")
    with suppress(OSError):  # such files only take disk space
        for each in target.parent.iterdir():
            handle = _locked(each) if ours.fullmatch(each.name) else None
            if handle is not None:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
                os.close(handle)


def _locked(path: Path, *, waits: bool = False) -> int | None:
    """Return a file descriptor that locks the path; None if it is locked or cannot be."""
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:  # locked, removed, or a file system without locks
        if handle is not None:
            os.close(handle)
        return None
    return handle


def write_whole(path: PathLike, content: str | bytes) -> None:
    """Write text, as UTF-8, or bytes atomically.

    Raises:
        FileError: as ``atomic_write``.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(file: BinaryIO) -> None:
        file.write(data)

    atomic_write(path, write)


@contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """Turn a failed write in the context into a FileError that names this file or folder."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = _system_error(error)
        if cause is None:
            raise
        raise FileError(_cannot_write(Path(path), cause)) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused the error: torch.save hides it behind a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _cannot_write(target: Path, cause: OSError) -> str:
    full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
    text = "the disk is full" if full else cause.strerror or str(cause)
    return f"{target} was not written: {text}. Whatever stood there before is unchanged."


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that new names survive a power cut (not on Windows)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


LOCK = ".l0prune.lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make a folder and lock it for this run in the context; the lock ends with the process, too.

    A new folder that holds nothing else is removed if the context raises.

    Raises:
        FileError: another run has locked it, or it cannot be made.
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


def is_claimed(folder: Path) -> bool:
    """Return whether a run has locked a folder, as a run does whose launcher was killed."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except (NotImplementedError, OSError):
        return False
    lock.release()
    return False


@contextmanager
def replaced_folder(path: PathLike, last: str, known: Collection[str]) -> Iterator[Path]:
    """Yield a temporary folder, whose files are moved to the folder ``path`` after the context.

    If that did not exist, a kill at any moment leaves none or the whole of it. Into an existing
    one the files are moved one by one, ``last`` at the end; other files in it stay. If the context
    raises, nothing is changed.

    The file ``last`` describes the others; if there was one, files of ``known`` that are not
    written anew are removed.
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
