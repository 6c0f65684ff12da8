"""Everything that l0prune raises on purpose::

    L0pruneError
    ├── CaptureError       torch.export could not capture the model
    ├── NothingToPrune     the survey found no axis that may be cut
    ├── NotGated           the model carries no gates
    ├── AlreadyGated       the model carries gates already
    ├── CertificateError   the exported model does not compute what the gated one does
    ├── FileError          a file cannot be read, written or trusted
    ├── UsageError         an argument or option cannot be understood (exit code 2 on the CLI)
    ├── DataError          a data source is missing, empty or does not fit the model
    │   └── Mismatch           it does not fit
    └── TrainingError      training cannot go on (NaN loss, …)
        └── StoppedElsewhere   another process of the run stopped, and said why

Interrupted (a KeyboardInterrupt): training was stopped by Ctrl-C or SIGTERM.
L0pruneWarning (a UserWarning): something works, but not as the user may expect.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

# A warning points at the line that called these packages, not at a line inside them.
_INSIDE = {
    "l0prune",
    "torch",
    "pydantic",
    "contextlib",
    "functools",
    "threading",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "click",
    "typer",
}


class L0pruneError(Exception):
    """Base of all errors that l0prune raises on purpose; the text is written for users."""


class CaptureError(L0pruneError):
    """torch.export could not capture the model."""


class NothingToPrune(L0pruneError):
    """The survey found no axis that may be cut."""


class NotGated(L0pruneError):
    """The model carries no gates."""


class AlreadyGated(L0pruneError):
    """The model carries gates already."""


class CertificateError(L0pruneError):
    """The exported model does not compute what the gated one does."""


class FileError(L0pruneError):
    """A file cannot be read, written or trusted."""


class UsageError(L0pruneError):
    """An argument or option cannot be understood."""


class OutOfReach(UsageError):
    """A budget cannot be met by any choice of gates."""


class DataError(L0pruneError):
    """A data source is missing, empty or does not fit the model."""


class Mismatch(DataError):
    """Data, model and loss do not fit together."""


class TrainingError(L0pruneError):
    """Training cannot go on."""


class StoppedElsewhere(TrainingError):
    """This process stops because another one failed and reported the reason."""


class Interrupted(KeyboardInterrupt):
    """Training was stopped by Ctrl-C or SIGTERM; the text says how to resume.

    Attributes:
        signal: the number of the signal.
    """

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text)
        self.signal = number


class L0pruneWarning(UserWarning):
    """Category of all warnings of l0prune; their text begins with ``l0prune:``."""


def warn(text: str) -> None:
    """Warn at the user's line: the innermost one outside l0prune and the packages that call it.

    Args:
        text: without ``l0prune:``, which is put before it.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "torch").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"l0prune: {text}", L0pruneWarning, stacklevel=level)


# What a name that is no near spelling of any known one probably means.
_ALIASES = {
    "flops": "macs",
    "flop": "macs",
    "weights": "params",
    "parameters": "params",
    "size": "params",
    "time": "latency",
    "ms": "latency",
    "faster": "speed",
    "speedup": "speed",
    "channels": "width",
    "ce": "cross-entropy",
}


def meant(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'macs'?"`` with the known name that is nearest; else nothing."""
    known = list(known)
    text = str(name).lower().replace("_", "-")
    alias = _ALIASES.get(text)
    near = [alias] if alias in known else difflib.get_close_matches(str(name), known, n=1)
    near = near or difflib.get_close_matches(text, known, n=1)
    near = near or [each for each in known if len(text) > 2 and each.startswith(text)]
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(text: str, name: object, known: Iterable[str], more: str = "") -> UsageError:
    """Return the error for an unknown name: the text, the nearest known name, and all of them."""
    known = list(known)
    near = meant(name, known)
    there = f"{near} There" if near else "; there"
    return UsageError(f"{text}{there} are {', '.join(known)}{more}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for a message; its type if there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def in_a_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"
