"""The runtimes that networks can be timed on, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect
from l0prune.timing.eager import Compiled, Eager
from l0prune.timing.job import Job
from l0prune.timing.latency import Observe
from l0prune.timing.torch_results import Turns, torch_results

_SECONDS = 1.0  # of all turns, where a single network is timed


class Runtime(Protocol):
    """A runtime that can run and time networks.

    Attributes:
        version: of it.
    """

    version: str

    def results(self, job: Job) -> dict[str, Any]:
        """The results; what was timed already is taken from the folder.

        Raises:
            UsageError: the model cannot be timed on it.
        """

    def bench(self, job: Job) -> Observe:
        """Times single networks of the model; its files lie in the job's folder."""


class OnnxRuntime:
    """ONNX Runtime with one of its providers.

    Raises:
        UsageError: it has no such provider.
    """

    def __init__(self, providers: Sequence[str]) -> None:
        import onnxruntime

        self.version = collect.version()
        self.provider = providers[0] if providers else collect.CPU
        available = onnxruntime.get_available_providers()
        if self.provider not in available:
            raise UsageError(
                f"this ONNX Runtime has no {self.provider}, but {', '.join(available)}: install "
                "the onnxruntime package that has it, such as onnxruntime-gpu for CUDA"
            )

    def results(self, job: Job) -> dict[str, Any]:
        """See ``Runtime``."""
        from l0prune.timing.bundle import write_bundle  # which loads onnx

        write_bundle(job.model, job.folder, batch=job.batch, samples=job.samples, seed=job.seed)
        try:
            return collect.collect(job.folder, job.out, job.threads, self.provider, job.progress)
        except collect.FellBack as error:
            raise UsageError(str(error)) from error

    def bench(self, job: Job) -> Observe:
        """See ``Runtime``."""
        from l0prune.timing.network_files import DENSE, INPUTS, NetworkFiles  # which load onnx

        files = NetworkFiles(job.model, job.batch, job.folder)
        inputs = dict(np.load(job.folder / INPUTS).items())
        dense = collect.Network(job.folder / DENSE, job.threads, self.provider)

        def ratio(kept: Tensor) -> float:
            path = files.write("chosen.onnx", kept)
            network = collect.Network(path, job.threads, self.provider)
            return collect.share(**collect.networks_turns(network, dense, inputs, _SECONDS))

        return ratio


class Torch:
    """PyTorch, on the device that is its first provider."""

    def __init__(self, kind: type[Eager], providers: Sequence[str]) -> None:
        self._kind, self.provider = kind, providers[0] if providers else "cpu"
        self.version = str(torch.__version__)

    def results(self, job: Job) -> dict[str, Any]:
        """See ``Runtime``."""
        return torch_results(job, self._kind(self.provider, job.threads))

    def bench(self, job: Job) -> Observe:
        """See ``Runtime``."""
        turns = Turns(job.model, self._kind(self.provider, job.threads), job.batch)
        return lambda kept: collect.share(**turns.of_slots(kept, _SECONDS))


RUNTIMES: dict[str, Callable[[Sequence[str]], Runtime]] = {
    "onnxruntime": OnnxRuntime,
    "eager": lambda providers: Torch(Eager, providers),
    "compile": lambda providers: Torch(Compiled, providers),
}


def runtime_of(name: str, providers: str | Sequence[str] | None = None) -> Runtime:
    """Return the runtime of this name.

    Raises:
        UsageError: there is none of this name, or it is not installed, or has no such provider.
    """
    if name not in RUNTIMES:
        raise UsageError(f"runtime is one of {', '.join(RUNTIMES)}, not {name!r}")
    return RUNTIMES[name]([providers] if isinstance(providers, str) else list(providers or ()))
