"""Times the networks of a folder with ONNX Runtime. Needs numpy and onnxruntime, nothing else.

    python run.py [--threads 1] [--provider NAME] [--out results.json]

Each network is timed beside the dense one, in many short turns, so that a machine that is slower
for a while does no harm. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FORMAT = 2
NAME = "onnxruntime"
CPU = "CPUExecutionProvider"
TURN = 0.03  # seconds of a turn, about
SECONDS = 0.15  # of all turns of one network, about
TURNS, MOST_TURNS = 4, 200
FEWEST, MOST = 1, 100  # runs of a turn
RUNS = 2  # for the times of nodes, at least
MOST_RUNS = 2000  # at most: profiles of tiny networks would be millions of lines
NODE = re.compile(r"n(\d{5})_")
OF_SAMPLES = ("samples", "widths", "id")  # keys of a description that vary with the samples
BEFORE = "before"  # key for time before the first node of the file
RUN = "run"  # key, beside the nodes, for the whole run in which they were timed


class FellBack(Exception):
    """ONNX Runtime does not use the execution provider that was asked for."""


class Network:
    """One ONNX file, loaded into ONNX Runtime."""

    def __init__(self, path: Path, threads: int, provider: str, profile: str = "") -> None:
        import onnxruntime  # here, since it takes a while to load

        self.is_alone = threads == 1 and provider == CPU
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        self.session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
        taken = self.session.get_providers()[0]
        if taken != provider:
            raise FellBack(
                f"{provider} was asked for, but ONNX Runtime fell back to {taken}: install the "
                "onnxruntime package for it, with the driver that it needs"
            )

    def median(self, inputs: dict[str, Any], times: int) -> float:
        """Return the median time of a run in milliseconds.

        For a single thread on the CPU it is CPU time: waiting while the system runs other
        processes is no property of the network. On an idle machine both are the same.
        """
        run = partial(self.session.run, None, inputs)
        return statistics.median(milliseconds(run, self.is_alone) for _ in range(times))


def milliseconds(run: Callable[[], Any], is_alone: bool) -> float:
    """Return the milliseconds of a run; for a single thread, CPU time where that is less.

    Where the system counts CPU time in coarse steps, a short run may seem to take none.
    """
    start, busy = time.perf_counter(), time.thread_time()
    run()
    busy = time.thread_time() - busy
    wall = time.perf_counter() - start
    return 1e3 * (min(wall, busy) if is_alone and busy > 0 else wall)


def node_times(events: list[dict[str, Any]], runs: int) -> dict[str, float]:
    """Return the milliseconds per run of each node, over the last ``runs`` runs.

    Nodes that the runtime adds, such as a change of memory layout, are charged to the node before.
    """
    nodes = [event for event in events if event.get("cat") == "Node"]
    if len(nodes) % runs:
        nodes = nodes[len(nodes) % runs :]
    each = len(nodes) // runs
    by_run = []
    for number in range(runs):
        total: dict[str, float] = defaultdict(float)
        last = BEFORE
        for event in nodes[number * each : (number + 1) * each]:
            name = NODE.search(event["name"])
            last = name[1] if name else last
            total[last] += event["dur"] / 1e3
        by_run.append(total)
    names = {name for total in by_run for name in total}
    return {name: typical([total[name] for total in by_run]) for name in sorted(names)}


def typical(times: Sequence[float]) -> float:
    """Return the lower quartile: other load makes some times too long, and none too short."""
    return sorted(times)[len(times) // 4]


def share(own: Sequence[float], dense: Sequence[float]) -> float:
    """Return the median over turns of a network's time divided by the dense one's.

    A machine may change its speed between two turns; the two of one pair follow each other.
    """
    return statistics.median(mine / its for mine, its in zip(own, dense, strict=True))


def spread(own: Sequence[float], dense: Sequence[float]) -> float:
    """Return the interquartile range of the turns' shares, relative to their median."""
    low, middle, high = np.quantile(np.divide(own, dense), (0.25, 0.5, 0.75))
    return float((high - low) / middle)


def runs(ms: float) -> int:
    """Return the number of runs in a turn, for a network that takes ``ms`` milliseconds."""
    return min(MOST, max(FEWEST, round(TURN * 1e3 / max(ms, 1e-3))))


Median = Callable[[int], float]
"""Function from a number of runs of a network to their median in milliseconds."""


def turns(own: Median, dense: Median, seconds: float) -> dict[str, list[float]]:
    """Return the medians of a network and of the dense one, timed in turns.

    A machine that is slower for seconds may slow only one of the two networks: so turns are short
    and many. What the other one left in the caches matters to networks of several runs a turn:
    their first run is not counted.
    """
    ms = own(1)
    if runs(ms) > 1:  # the first run takes longer
        ms = own(1)
    times = runs(ms)
    found: dict[str, list[float]] = {"dense": [], "own": []}
    for _ in range(min(MOST_TURNS, max(TURNS, round(seconds * 1e3 / (ms * times))))):
        for name, each in (("dense", dense), ("own", own)):
            if times > 1:
                each(1)
            found[name].append(each(times))
    return found


class Loaded(Protocol):
    """Network file that is loaded into a runtime."""

    def median(self, inputs: dict[str, Any], times: int) -> float:
        """Return the median in milliseconds of ``times`` calls."""


Load = Callable[[Path, int, str], Loaded]
"""Function that loads a file, by its path, the number of threads and the provider."""

Nodes = Callable[[Path, dict[str, Any], int, int, str], dict[str, float]]
"""Function like ``profiled``: milliseconds of each node, and of the ``RUN``."""


Until = Callable[[dict[str, Any]], int]
"""Function from the results so far to the number of networks that are to be timed."""


def networks_turns(
    own: Loaded, dense: Loaded, inputs: dict[str, Any], seconds: float
) -> dict[str, list[float]]:
    """Return ``turns`` of two files."""
    return turns(partial(own.median, inputs), partial(dense.median, inputs), seconds)


def profiled(
    path: Path, inputs: dict[str, Any], times: int, threads: int, provider: str
) -> dict[str, float]:
    """Return the milliseconds of each node and of the ``RUN``, by ONNX Runtime's profile."""
    with tempfile.TemporaryDirectory() as folder:
        network = Network(path, threads, provider, profile=str(Path(folder) / "profile"))
        whole = network.median(inputs, times + 1)
        events = json.loads(Path(network.session.end_profiling()).read_text(encoding="utf-8"))
    return {**node_times(events, times + 1), RUN: whole}


def version() -> str:
    """Return the version of ONNX Runtime."""
    import onnxruntime

    return str(onnxruntime.__version__)


def machine() -> dict[str, Any]:
    """Return processor, cores and system of the machine."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def processor() -> str:
    """Return the name of the processor."""
    try:
        names = _cpuinfo("model name")
    except OSError:
        return platform.processor() or platform.machine()
    return names[0] if names else platform.machine()


def processor_flags() -> list[str]:
    """Return the processor's flags from /proc/cpuinfo; none where the system has no such file."""
    try:
        return next(iter(_cpuinfo("flags")), "").split()
    except OSError:
        return []


def _cpuinfo(name: str) -> list[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]


def digest(results: dict[str, Any]) -> str:
    """Return a checksum of the results without their entry ``digest``."""
    rest = {key: value for key, value in results.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def settings_of(runtime: str, version: str, provider: str, threads: int) -> dict[str, Any]:
    """Return the settings that results store beside their times."""
    return {
        "format": FORMAT,
        "runtime": runtime,
        "version": version,
        "provider": provider,
        "threads": threads,
        "machine": machine(),
    }


def known(out: Path, settings: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier run's results of these networks, or of some; empty without any."""
    try:
        old: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        before, found = old["about"], old["samples"]
        rest = {key: value for key, value in about.items() if key not in OF_SAMPLES}
        is_same = old | settings == old and before | rest == before
        if not is_same or old["digest"] != digest(old):
            return {}
        widths = dict(zip(before["samples"], before["widths"], strict=True))
        asked = zip(about["samples"], about["widths"], strict=True)
        names = [name for name, wanted in asked if widths.get(name) == wanted and name in found]
        samples = {name: found[name] for name in names}
        return {**old, "about": before | about, "samples": samples}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def keep(results: dict[str, Any], out: Path) -> None:
    """Write the results atomically."""
    results["digest"] = digest(results)
    unfinished = out.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results), encoding="utf-8")
    unfinished.replace(out)


def collect(
    folder: Path,
    out: Path,
    threads: int = 1,
    provider: str = CPU,
    say: Any = None,
    *,
    load: Load = Network,
    nodes: Nodes = profiled,
    its_version: str = "",
    until: Until | None = None,
) -> dict[str, Any]:
    """Time all networks of the folder that have no results in ``out`` yet, or as many as asked.

    For another runtime than ONNX Runtime, give its ``load``, ``nodes`` and ``its_version``.
    """
    about = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    inputs = dict(np.load(folder / "inputs.npz").items())
    settings = settings_of(about["runtime"], its_version or version(), provider, threads)
    results = known(out, settings, about) or {**settings, "about": about, "samples": {}}
    dense = load(folder / about["dense"], threads, provider)
    dense.median(inputs, 3)

    def timed(name: str) -> dict[str, Any]:
        path = folder / name
        found = networks_turns(load(path, threads, provider), dense, inputs, SECONDS)
        times = min(MOST_RUNS, max(RUNS, round(SECONDS * 1e3 / typical(found["own"]))))
        return {**found, "nodes": nodes(path, inputs, times, threads, provider)}

    return each_timed(results, out, timed, say, until)


def each_timed(
    results: dict[str, Any],
    out: Path,
    timed: Callable[[str], dict[str, Any]],
    say: Any = None,
    until: Until | None = None,
) -> dict[str, Any]:
    """Time networks of the results by name, those that are not timed yet; return the results.

    They are kept after each network. Those that are not asked for (``until``) are left out.
    """
    about = results["about"]
    names, number = about["samples"], 0
    wanted = len(names) if until is None else until(results)
    while number < wanted:
        name = names[number]
        number += 1
        if name not in results["samples"]:
            results["samples"][name] = timed(name)
            keep(results, out)
        if say is not None:
            say(number, wanted)
        if number == wanted and until is not None:
            wanted = until(results)
    if number < len(names):
        about |= {key: about[key][:number] for key in ("samples", "widths")}
        keep(results, out)
    return results


def main() -> None:
    """Time the networks in the folder of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--provider", default=CPU)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    options = parser.parse_args()

    def say(number: int, of: int) -> None:
        print(f"\r{number} of {of} networks timed", end="", file=sys.stderr, flush=True)

    folder = Path(__file__).parent
    try:
        collect(folder, options.out, options.threads, options.provider, say)
    except FellBack as error:
        sys.exit(str(error))
    print(f"\n{options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
