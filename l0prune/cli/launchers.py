"""Launchers of the runs of a sweep: processes of this machine, submitit or Ray, by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from l0prune.data.image_folder import usable_cpus
from l0prune.errors import UsageError, first_line, unknown

_GRACE = 30.0  # seconds in which a stopped run may write its checkpoint


@dataclass(frozen=True)
class CommandLine:
    """Command line, run in the sweep's working directory; the output is appended to ``log``."""

    words: tuple[str, ...]
    log: str
    folder: str = field(default_factory=os.getcwd)

    def __call__(self) -> int:
        """Run the command until it ends or this process is interrupted; return the exit code."""
        process = self.begin()
        try:
            return process.wait()
        except BaseException:
            stop(process)
            raise

    def begin(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the command in a new session, so that Ctrl-C stops it only through the sweep."""
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.words,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a command, which may write its checkpoint; kill it after ``_GRACE`` seconds."""
    process.terminate()  # background processes of a shell may ignore SIGINT
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Job(Protocol):
    """Started command."""

    def poll(self) -> int | str | None:
        """Return the command's exit code, None while it runs, or how it was lost, in words.

        A command is lost if it was killed or its machine failed.
        """

    def stop(self) -> None:
        """Stop the command, or request that it stops."""


class Launcher(Protocol):
    """Launcher of commands.

    Attributes:
        name: value of ``--on`` for the launcher.
        jobs: largest number of commands at a time.
    """

    name: ClassVar[str]
    jobs: int

    def __init__(self, folder: Path, jobs: int | None, options: Mapping[str, Any]) -> None:
        """Take a ``folder`` for the launcher's files; without ``jobs`` it chooses their number."""

    def start(self, command: CommandLine) -> Job:
        """Start a command, which may wait in a queue."""


LAUNCHERS: dict[str, type[Launcher]] = {}


def register(kind: type[Launcher]) -> type[Launcher]:
    """Register a launcher for ``--on`` by its name."""
    LAUNCHERS[kind.name] = kind
    return kind


def launcher(name: str, folder: Path, jobs: int | None, options: Mapping[str, Any]) -> Launcher:
    """Return the launcher of this name.

    Raises:
        UsageError: there is none, its package is not installed, or ``jobs`` are too many for it.
    """
    if name not in LAUNCHERS:
        raise unknown(f"there is no {name!r} to run on", name, LAUNCHERS)
    return LAUNCHERS[name](folder, jobs, options)


def _killed(number: int) -> str:
    name = signal.Signals(number).name
    cause = ", which usually means that memory ran out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{cause}"


def _outcome(result: Callable[[], int]) -> int | str:
    """Return the exit code that is the result of a scheduler's job, or how the job was lost."""
    try:
        code = result()
    except Exception as error:  # of the scheduler, of pickle, or of the machine
        return first_line(error)
    return _killed(-code) if code < 0 else code


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"--on {name} needs the package {name} (pip install {name}): {first_line(error)}. "
            "Without --on the runs are processes of this machine"
        ) from error


@dataclass
class _Process:
    process: subprocess.Popen[bytes]

    def poll(self) -> int | str | None:
        code = self.process.poll()
        return _killed(-code) if code is not None and code < 0 else code

    def stop(self) -> None:
        stop(self.process)


@register
class Processes:
    """Launcher of processes on this machine, each with a share of the cores, and a GPU if any.

    By default one runs per GPU, or without GPUs one per core.
    """

    name: ClassVar[str] = "processes"

    def __init__(self, folder: Path, jobs: int | None, options: Mapping[str, Any]) -> None:
        import torch

        if options:
            raise UsageError(
                f"{', '.join(options)}: processes of this machine have no parameters; --job is for "
                "--on submitit and --on ray"
            )
        cores, self._gpus = usable_cpus(), torch.cuda.device_count()
        self.jobs = jobs or min(self._gpus or cores, cores)
        if self.jobs > cores:
            raise UsageError(
                f"--jobs {self.jobs} is more than the {cores} cores that there are: runs would "
                "only wait for each other"
            )
        self._threads = cores // self.jobs
        self._slots: list[_Process | None] = [None] * self.jobs

    def start(self, command: CommandLine) -> Job:
        """Start the command on cores, and a GPU if any, of a free slot."""
        slot = next(
            number
            for number, job in enumerate(self._slots)
            if job is None or job.process.returncode is not None
        )
        environment = {"OMP_NUM_THREADS": str(self._threads)}
        if self._gpus:
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = named.split(",") if named else [*map(str, range(self._gpus))]
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % self._gpus]
        job = _Process(self._started(command, environment, slot))
        self._slots[slot] = job
        return job

    def _started(
        self, command: CommandLine, environment: Mapping[str, str], slot: int
    ) -> subprocess.Popen[bytes]:
        """Start the command bound to its slot's cores, which all threads of libraries inherit."""
        if not hasattr(os, "sched_setaffinity"):
            return command.begin(environment)
        cores = os.sched_getaffinity(0)
        own = sorted(cores)[slot * self._threads : (slot + 1) * self._threads]
        os.sched_setaffinity(0, own)
        try:
            return command.begin(environment)
        finally:
            os.sched_setaffinity(0, cores)


@dataclass
class _Submitted:
    job: Any

    def poll(self) -> int | str | None:
        return _outcome(self.job.result) if self.job.done() else None

    def stop(self) -> None:
        self.job.cancel()


@register
class Submitit:
    """Launcher of jobs by submitit: on Slurm if there is one, else on this machine."""

    name: ClassVar[str] = "submitit"

    def __init__(self, folder: Path, jobs: int | None, options: Mapping[str, Any]) -> None:
        package = _package(self.name)
        options = {"timeout_min": 24 * 60, **options}
        cluster = options.pop("cluster", None)
        logs = folder / "submitit"
        try:
            self._executor = package.AutoExecutor(folder=str(logs), cluster=cluster)
            self._executor.update_parameters(**options)
        except Exception as error:  # submitit's own, of wrong parameters
            raise UsageError(f"submitit does not take this: {first_line(error)}") from error
        is_here = self._executor.cluster == "local"
        self.jobs = jobs or (usable_cpus() if is_here else sys.maxsize)

    def start(self, command: CommandLine) -> Job:
        """Submit the command."""
        return _Submitted(self._executor.submit(command))


@dataclass
class _Task:
    ray: Any
    reference: Any

    def poll(self) -> int | str | None:
        ended, _ = self.ray.wait([self.reference], timeout=0)
        return _outcome(lambda: self.ray.get(self.reference)) if ended else None

    def stop(self) -> None:
        self.ray.cancel(self.reference)


@register
class Ray:
    """Launcher of tasks in a Ray cluster (``RAY_ADDRESS``), else in a Ray on this machine."""

    name: ClassVar[str] = "ray"

    def __init__(self, folder: Path, jobs: int | None, options: Mapping[str, Any]) -> None:
        self._ray = _package(self.name)
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False)
        self._options = {"num_cpus": 1, "max_retries": 0, **options}
        self.jobs = jobs or sys.maxsize  # Ray lets tasks wait for cores

    def start(self, command: CommandLine) -> Job:
        """Submit the command to Ray."""
        try:
            remote = self._ray.remote(**self._options)(_run)
        except (TypeError, ValueError) as error:
            raise UsageError(f"Ray does not take this: {first_line(error)}") from error
        return _Task(self._ray, remote.remote(command))


def _run(command: CommandLine) -> int:
    return command()
