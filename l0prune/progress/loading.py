"""Line on stderr while torch is loaded, which takes long on a busy machine; without torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from l0prune.progress.display import EVERY, LONG, console_of, duration
from l0prune.progress.launched import is_first_process
from l0prune.progress.stages import now

_LOOK = 0.5  # seconds


@contextmanager
def loading_shown() -> Iterator[None]:
    """Say within the context that torch is being loaded, after two seconds and then each ten."""
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(over,), name="l0prune-loading", daemon=True)
    if "torch" not in sys.modules and is_first_process():
        thread.start()
    try:
        yield
    finally:
        over.set()


def _tell(over: threading.Event) -> None:
    began, said = now(), 0.0
    while not over.wait(_LOOK) and is_loading("torch"):
        passed = now() - began
        if passed >= (said + EVERY if said else LONG):
            console_of(quiet=False).print(f"loading PyTorch: {duration(passed)} so far")
            said = passed


def is_loading(name: str) -> bool:
    """Return whether a module is not loaded yet, or only in part."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is None or bool(getattr(spec, "_initializing", False))
