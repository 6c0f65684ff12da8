"""One model per process, so that none can harm another and its peak memory is its own.

A measurement is a generator of dicts that are merged into the model's row. The row is printed
after each of them, so that of a process that is killed its last is known. Rows are JSON lines;
a run that was stopped goes on with the models that have none yet.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from l0prune.errors import L0pruneError

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]


def parser_of(text: str) -> argparse.ArgumentParser:
    """A command line whose help is a docstring as it is written."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measure(name: str, steps: Iterable[Row]) -> None:
    """In the model's own process: print its row after each step, with what failed and where."""
    warnings.simplefilter("ignore")
    row: Row = {"model": name, "step": "build"}
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere
        try:
            for done in steps:
                row |= done
                _print(row, stdout)
        except L0pruneError as error:
            row["refused"] = str(error)
        except Exception as error:
            row["crash"] = f"{type(error).__name__}: {error}"[:2000]
        else:
            row["step"] = "done"
        _print(row, stdout)
        sys.stdout = stdout


def _print(row: Row, file: Any) -> None:
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(row), file=file, flush=True)


def run(
    module: str,
    path: Path,
    zoo: str,
    names: Iterable[str],
    limit: int,
    summary: Callable[[Row], str],
    options: Sequence[str] = (),
) -> None:
    """Measure each model by ``python -m module --one zoo:name``, and append its row to ``path``.

    ``limit`` is of CPU seconds, so that a busy machine changes nothing.
    """
    for name in names:
        command = [sys.executable, "-m", module, "--one", f"{zoo}:{name}", *options]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = subprocess.run(
                ["bash", "-c", f'ulimit -c 0 -S -t {limit} && exec "$@"', "bash", *command],
                cwd=ROOT,
                stdout=out,
                stderr=err,
                check=False,
            ).returncode
            is_late = code == -signal.SIGXCPU
            failure = f"not done after {limit} s" if is_late else f"exit {code}" if code else None
            out.seek(0)
            err.seek(0)
            lines = out.read().splitlines()
            row = json.loads(lines[-1]) if lines else {"model": name, "step": "build"}
            if failure:
                last = err.read()[-500:].decode(errors="replace")
                row["crash"] = failure if lines else f"{failure}: {last}"
        append(path, row)
        print(summary(row), flush=True)


class Late(BaseException):
    """The end of a limit in time; no Exception, which a capture would take for its own."""


@contextmanager
def within(limit: float) -> Iterator[None]:
    """Raise ``Late`` where the context takes more CPU seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Late(f"not done after {limit:g} s of the CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def resident(field: str) -> float:
    """MiB of memory that this process holds now (``VmRSS``), or held at most (``VmHWM``)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def failure(row: Row) -> str:
    """One line of what went wrong with a model, and at which step; empty where all is well."""
    if "crash" not in row and "refused" not in row:
        return ""
    what, said = ("CRASH", row["crash"]) if "crash" in row else ("refused", row["refused"])
    return f"{row['model']:36} {what} at {row.get('step', '?')}: {said.splitlines()[0][:160]}"


def append(path: Path, row: Row) -> None:
    """One more result; the folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def rows(path: Path, key: Sequence[str] = ("model",)) -> list[Row]:
    """The results so far; of what was measured twice, the last. ``key`` tells it apart.

    A row from before there was one of its fields is as if that were None, its default.
    """
    if not path.exists():
        return []
    lines = [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    return list({tuple(map(row.get, key)): row for row in lines}.values())


def missing(path: Path, names: Iterable[str]) -> list[str]:
    """Those of the models that have no result yet."""
    known = {row["model"] for row in rows(path)}
    return [name for name in names if name not in known]
