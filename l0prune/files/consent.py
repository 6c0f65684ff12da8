"""Consent of the user to code that a file names, and to downloads.

The author of a model file chose its requests, so that they are not trusted. Specs that the user
names by hand, on the command line or in Python, are recorded on this machine, outside all model
files: a Python file by its path and its content, a network of a hub and a folder for downloads by
their names. A file may request those again. Anything else requires ``--trust-pickle``.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from l0prune.doors import Registry
from l0prune.errors import FileError

_ROOT = Path(__file__).resolve().parents[1]
# The recipes that come with l0prune: in an installed package, or at the top of the repository.
RECIPES = next(p for p in (_ROOT / "recipes", _ROOT.parent / "recipes") if p.is_dir())
# torchvision and timm build a network of a plain name without fetching anything.
_HARMLESS = re.compile(
    r"[^:]*(:\d+)?|(torchvision|timm):[\w.\-]+|(imagefolder|text):.*", re.ASCII | re.DOTALL
)
_DATA_ROOT = "data root"
# Builders of models that are not files of torch: by what stands before the colon of a spec
# (``torchvision``), or by the suffix of a file. They are given what follows, or the path.
SOURCES: Registry[Callable[[str], Any]] = Registry("source of models", "sources")


class _Request(NamedTuple):
    """Request for consent: the exact text to record, and the words for messages."""

    exact: str
    what: str
    way_on: str


def remember(spec: str) -> None:
    """Record the user's consent to the code or the download of a spec, as it is now.

    If nothing can be recorded (no home folder, a read-only disk), consent is required again.
    """
    request = _request(spec)
    if request is not None:
        _note(request)


def remember_root(folder: str | os.PathLike[str]) -> None:
    """Record the user's consent to a folder for data sets that are downloaded."""
    _note(_root_request(folder))


def check_consent(spec: str, file: Any) -> None:
    """Refuse a spec in ``file`` unless the user has named it before on this machine.

    Raises:
        FileError: the spec runs code or fetches something, and the user never named it, or the
            code has changed since.
    """
    request = _request(spec)
    if request is not None:
        _check(request, file)


def check_root_consent(folder: str | os.PathLike[str], file: Any) -> None:
    """Refuse a download folder in ``file`` unless the user has named it before.

    Raises:
        FileError: the user has not named it before on this machine.
    """
    _check(_root_request(folder), file)


def is_code(spec: str) -> bool:
    """Return whether the spec has the form ``file.py:name``."""
    path, _, name = spec.rpartition(":")
    return path.endswith(".py") and bool(name)


def is_read(spec: str) -> bool:
    """Return whether the spec is a file of a format that a network can be made of."""
    return SOURCES.knows(Path(spec).suffix)


def makers(path: str) -> list[str]:
    """Return the functions and classes of a Python file that may be called without arguments.

    The file is not run; the list is empty if it cannot be read.
    """
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        each.name
        for each in body
        if isinstance(each, ast.ClassDef | ast.FunctionDef)
        and not each.name.startswith("_")
        and (isinstance(each, ast.ClassDef) or len(each.args.args) == len(each.args.defaults))
    ]


def _request(spec: str) -> _Request | None:
    """Return the request for consent to a spec; None if it needs none."""
    by_hand = f'name it yourself (l0prune.load(path, model=l0prune.load_model("{spec}")))'
    if is_code(spec):
        path = Path(spec.rpartition(":")[0]).resolve()
        if not path.is_file() or _is_of_a_recipe(path, spec.rpartition(":")[2]):
            return None
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        by_hand = by_hand.removesuffix(")") + "; for data: --data)"
        return _Request(f"code {path} {content}", f"run {spec} ({path})", by_hand)
    if is_read(spec):
        path = Path(spec).resolve()
        if not path.is_file():
            return None
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        return _Request(f"{path.suffix[1:]} {path} {content}", f"read {spec} ({path})", by_hand)
    if _HARMLESS.fullmatch(spec):
        return None
    return _Request(f"fetch {spec}", f"fetch {spec}", by_hand)


def _is_of_a_recipe(path: Path, name: str) -> bool:
    """Return whether a recipe of l0prune names this function of a file beside it."""
    texts = (recipe.read_text(encoding="utf-8") for recipe in RECIPES.glob("*.toml"))
    wanted = re.compile(rf"\b{re.escape(f'{path.name}:{name}')}\b")
    return path.parent == RECIPES and any(map(wanted.search, texts))


def _root_request(folder: str | os.PathLike[str]) -> _Request:
    path = Path(folder).resolve()
    return _Request(
        f"{_DATA_ROOT} {path}", f"keep data in {path}", "name it yourself (--data-root)"
    )


def _check(request: _Request, file: Any) -> None:
    if not _is_noted(request):
        raise FileError(
            f"{file} asks to {request.what}. That is not done only because a file asks for it: "
            "you have not named this on this machine, or it has changed since. Two ways on: "
            f"{request.way_on}; or, if you trust whoever made it, add --trust-pickle "
            "(trust_pickle=True)."
        )


def _note(request: _Request) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        place = _place(request)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.touch(mode=0o600)


def _is_noted(request: _Request) -> bool:
    try:
        return _place(request).is_file()
    except (OSError, RuntimeError):
        return False


def _place(request: _Request) -> Path:
    """Return the path of the empty file whose existence records consent to the request."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    digest = hashlib.sha256(request.exact.encode("utf-8", "surrogatepass")).hexdigest()
    return Path(state) / "l0prune" / "consent" / digest
