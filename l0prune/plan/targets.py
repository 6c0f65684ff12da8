"""Names of the runtimes that a network can be made for."""

from __future__ import annotations

from l0prune.doors import behind, missing
from l0prune.errors import UsageError, meant

TARGET = "onnxruntime"  # where nothing else is said


def targets() -> tuple[str, ...]:
    """Return the names of all runtimes; the usual one needs no feature to be made for."""
    return tuple(dict.fromkeys((TARGET, *(name for name, _ in behind("runtimes")))))


def check_target(name: str) -> str:
    """Return the name of a runtime; raise UsageError if there is none of this name."""
    if name not in (known := targets()):
        no_target = f"target is one of {', '.join(known)}, not {name!r}{meant(name, known)}"
        raise UsageError(missing(name) or no_target)
    return name
