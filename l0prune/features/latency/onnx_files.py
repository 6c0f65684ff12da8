"""Runtimes of ONNX files: their base class, and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect
from l0prune.features.latency.latency import Observe
from l0prune.progress.stages import counting, now, stage

if TYPE_CHECKING:
    from l0prune.features.latency.network_files import NetworkFiles


@dataclass(frozen=True)
class Job:
    """Networks to time, and the settings of the timing.

    Attributes:
        folder: folder of files and results.
        progress: called with the number of networks timed so far, and of all.
        until: function from the results so far to the number of networks to time, up to
            ``samples``; None for all.
    """

    model: nn.Module
    folder: Path
    threads: int
    batch: int
    samples: int = 0
    seed: int = 0
    progress: Callable[[int, int], None] | None = None
    until: collect.Until | None = None

    @property
    def out(self) -> Path:
        """Folder of the results."""
        return self.folder / "results.json"

    @contextmanager
    def counted(self) -> Iterator[Callable[[int, int], None]]:
        """Yield the function to call with the number of networks timed so far, and of all."""
        known, last = 0, now()
        with stage("timing networks of other widths"), counting(self.samples) as counter:

            def tell(done: int, of: int) -> None:
                nonlocal known, last
                known += now() - last < _KNOWN
                last = now()
                counter.at(done - known, of - known)
                if self.progress is not None:
                    self.progress(done, of)

            yield tell


_KNOWN = 0.01  # seconds: a network found in earlier results takes less, a timed one more
SECONDS = 1.0  # of all turns together, when a single network is timed


class Runtime(Protocol):
    """Runtime, of some version, that can run and time networks."""

    version: str

    def results(self, job: Job) -> dict[str, Any]:
        """Time networks of random widths; those already timed are read from the folder."""

    def bench(self, job: Job) -> Observe:
        """Return the function that times single networks, with files in the job's folder."""


class OnnxFiles:
    """Base class of runtimes of ONNX files; subclasses define ``load`` and ``nodes``.

    Attributes:
        name: name of the runtime, in tables and on the command line.
        version: version of the runtime.
        provider: provider or device that runs the files.
        convert: conversion of each file before timing, such as ``in_int8``; None for none.
    """

    _files: NetworkFiles | None = None  # of the last job

    name: str
    version: str
    provider: str
    convert: Callable[[Any, dict[str, Any]], Any] | None = None

    def load(self, path: Path, threads: int, provider: str) -> collect.Loaded:
        """Load a file."""
        raise NotImplementedError

    def nodes(
        self, path: Path, inputs: dict[str, Any], times: int, threads: int, provider: str
    ) -> dict[str, float]:
        """Return milliseconds of each node, by the number in its name (``collect.NODE``)."""
        raise NotImplementedError

    def results(self, job: Job) -> dict[str, Any]:
        """See ``Runtime``."""
        self.write(job)
        try:
            with job.counted() as tell:
                return collect.collect(
                    job.folder,
                    job.out,
                    job.threads,
                    self.provider,
                    tell,
                    load=self.load,
                    nodes=self.nodes,
                    its_version=self.version,
                    until=job.until,
                )
        except collect.FellBack as error:
            raise UsageError(str(error)) from error

    def write(self, job: Job) -> None:
        """Write the networks of a job into its folder, with a script that times them."""
        from l0prune.features.latency.network_files import write_bundle  # which loads onnx

        self._files = write_bundle(
            job.model,
            job.folder,
            batch=job.batch,
            samples=job.samples,
            seed=job.seed,
            runtime=self.name,
            convert=self.convert,
        )

    def bench(self, job: Job) -> Observe:
        """See ``Runtime``."""
        from l0prune.features.latency.network_files import (  # which load onnx
            DENSE,
            INPUTS,
            NetworkFiles,
        )

        files = self._files
        if files is None or files.folder != job.folder:
            files = NetworkFiles(job.model, job.batch, job.folder, self.convert)
        inputs = dict(np.load(job.folder / INPUTS).items())
        dense = self.load(job.folder / DENSE, job.threads, self.provider)

        def ratio(kept: Tensor) -> float:
            path = files.write("chosen.onnx", kept)
            network = self.load(path, job.threads, self.provider)
            return collect.share(**collect.networks_turns(network, dense, inputs, SECONDS))

        return ratio


class OnnxRuntime(OnnxFiles):
    """ONNX Runtime with one of its providers."""

    def __init__(
        self, providers: Sequence[str], name: str = collect.NAME, convert: Any = None
    ) -> None:
        import onnxruntime

        self.name, self.convert = name, convert
        self.version = collect.version()
        self.provider = providers[0] if providers else collect.CPU
        available = onnxruntime.get_available_providers()
        if self.provider not in available:
            raise UsageError(
                f"this ONNX Runtime has no {self.provider}, but {', '.join(available)}: install "
                "the onnxruntime package that has it, such as onnxruntime-gpu for CUDA"
            )

    def load(self, path: Path, threads: int, provider: str) -> collect.Loaded:
        """See ``OnnxFiles``."""
        return collect.Network(path, threads, provider)

    def nodes(
        self, path: Path, inputs: dict[str, Any], times: int, threads: int, provider: str
    ) -> dict[str, float]:
        """See ``OnnxFiles``."""
        return collect.profiled(path, inputs, times, threads, provider)
