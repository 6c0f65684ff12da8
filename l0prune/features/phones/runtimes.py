"""Runtimes of programs for phones, on this machine's processor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.exporting.programs import FORMATS, Format, Run, check_installed, made
from l0prune.features.latency.eager import Eager
from l0prune.features.latency.runtimes import RUNTIMES, Torch


class Program(Eager):
    """Runtime of mobile programs, on the CPU; operators are timed in PyTorch."""

    def __init__(self, kind: Format, device: str, threads: int) -> None:
        super().__init__(device, threads)
        check_installed(kind)
        self._kind, self.name = kind, kind.name
        if self.device.type != "cpu":
            raise UsageError(f"{kind.name} is timed on the processor (cpu), not on {device!r}")

    @property
    def version(self) -> str:
        """Versions of the runtime and of PyTorch, whose networks are converted."""
        return f"{self._kind.version()}, torch {torch.__version__}"

    def prepared(self, network: nn.Module) -> Callable[..., Any]:
        """Return the run of a network's program, converted at the first call for its sizes."""
        loaded: list[Run] = []

        def call(*args: Any, **kwargs: Any) -> list[Tensor]:
            if not loaded:
                content = made(self._kind, network, args, kwargs)
                loaded.append(self._kind.loaded(content, self.threads))
            return loaded[0]((args, kwargs))

        return call


for kind in (FORMATS[".pte"], FORMATS[".tflite"]):
    RUNTIMES[kind.name] = partial(Torch, partial(Program, kind))
