"""What starting costs beside ``import torch``: medians of runs that take turns, CPU seconds.

    python -m benchmarks.startup

A first use of ``survey`` is ``l0prune.survey`` itself: its modules are loaded, nothing is captured.
Another version of l0prune is measured with its folder in ``PYTHONPATH``, and this file as a script.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

HELP = "import sys; sys.argv = ['l0prune', '--help']; from l0prune.cli.app import main; main()"
STARTS = {
    "import torch": "import torch",
    "import torch, l0prune": "import torch, l0prune",
    "import torch; l0prune.survey": "import torch, l0prune; l0prune.survey",
    "import torch; all names": "import torch, l0prune as l; [getattr(l, n) for n in l.__all__]",
    "l0prune --help": HELP,
}  # fmt: skip


def cost(code: str) -> float:
    """CPU seconds of a process that runs the code: others on the machine do not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(times: int) -> dict[str, float]:
    """The median of each start; one round beforehand fills the caches."""
    rounds = [{name: cost(code) for name, code in STARTS.items()} for _ in range(times + 1)]
    return {name: median(each[name] for each in rounds[1:]) for name in STARTS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=7, help="runs of each")
    os.environ["OMP_NUM_THREADS"] = "1"
    found = measured(parser.parse_args(arguments).times)
    print("| start | CPU s | × `import torch` |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| `{name}` | {seconds:.2f} | {seconds / found['import torch']:.2f} |")


if __name__ == "__main__":
    main()
