"""The command line as processes."""

import os
import subprocess
import sys

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
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr
