"""The command line as processes."""

import os
import subprocess
import sys

import pytest
from processes import LONGEST

from l0prune.cli.app import main

COMMAND = [sys.executable, "-c", "from l0prune.cli.app import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}


def run(*arguments, cwd):
    """A command as a process: exit code, stdout, stderr."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    return done.returncode, done.stdout, done.stderr


def in_process(capfd, *arguments):
    """A command in this process, in the current folder: exit code, stdout, stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["l0prune", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
    written = capfd.readouterr()
    return stop.value.code, written.out, written.err
