"""Environment of a run: command, versions and machine."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from l0prune import __version__

_PACKAGES = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "numpy")


def environment() -> dict[str, Any]:
    """The command that was given, the versions of packages, and the machine; plain data."""
    return {
        "command": command(sys.argv),
        "versions": {
            "l0prune": __version__,
            "python": platform.python_version(),
            **{name: found for name in _PACKAGES if (found := _version(name))},
        },
        "machine": platform.platform(),
    }


def command(arguments: list[str]) -> str:
    """A command line as one would type it; empty where the process was not started by one."""
    name = Path(arguments[0]).name if arguments else ""
    if name in ("l0prune", "__main__.py"):
        return shlex.join(["l0prune", *arguments[1:]])
    return shlex.join(["python", name, *arguments[1:]]) if name.endswith(".py") else ""


def device_name(device: torch.device) -> str:
    """Return a device's name by its maker, or its kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
