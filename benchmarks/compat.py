"""Tests of private names of torch, on the oldest and the newest torch that l0prune supports.

    python -m benchmarks.compat [--torch 2.11.* newest] [--folder DIR]

Makes a virtual environment for each, with this checkout in it, and runs the tests that name what
of torch has changed. It downloads each torch once: about a gigabyte.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TESTS = "tests/capture/test_compat.py"
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="+", default=["2.11.*", "newest"], metavar="VERSION")
    parser.add_argument("--folder", type=Path, help="of the environments; kept (default: none is)")
    parser.add_argument("--here", action="store_true", help="with this Python's torch alone")
    options = parser.parse_args()
    if options.here:
        sys.exit(passes(sys.executable))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        sys.exit(max(passes(environment(folder, version)) for version in options.torch))


def environment(folder: Path, version: str) -> str:
    """Return the Python of an environment with this torch and l0prune, made if it is not there."""
    place = folder / f"torch-{version.rstrip('.*')}"
    python = str(place / "bin" / "python")
    if not place.exists():
        venv.create(place, with_pip=True)
        torch = "torch" if version == "newest" else f"torch=={version}"
        install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, torch, "-e", f"{ROOT}[test]"], check=True)
    return python


def passes(python: str) -> int:
    """Run the tests with this Python; return their exit status."""
    command = [python, "-m", "pytest", "-n0", "-q", TESTS]
    print(
        subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"]).decode()
    )
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    main()
