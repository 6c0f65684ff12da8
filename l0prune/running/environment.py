"""Environment of a run: command, versions, machine, launcher, and display in notebooks."""

from __future__ import annotations

import io
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from l0prune import __version__

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "numpy")


def environment() -> dict[str, Any]:
    """Return the command, the versions of packages, and the machine, as plain data."""
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
    """Return a command line as typed in a shell; empty if no command started the process."""
    name = Path(arguments[0]).name if arguments else ""
    if name in ("l0prune", "__main__.py"):
        return shlex.join(["l0prune", *arguments[1:]])
    return shlex.join(["python", name, *arguments[1:]]) if name.endswith(".py") else ""


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, or a device's type."""
    import torch  # takes seconds, and the command line's help needs this file

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


_WIDTH = 120
_FORM = '<pre style="line-height:1.2;overflow-x:auto;white-space:pre">{code}</pre>'


def as_html(shown: RenderableType) -> str:
    """Return rich's output as one HTML element without a style sheet; text is escaped."""
    console = Console(
        record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False, highlight=False
    )
    console.print(shown)
    return console.export_html(inline_styles=True, code_format=_FORM)
