"""Times of an ONNX file and of the dense network's, taken in turns by ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.exporting.network import copies_of
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.file import write_runnable
from l0prune.exporting.own_class.replacement import class_programs
from l0prune.gating.attaching import holder
from l0prune.running.stages import stage

_SECONDS = 1.0  # of all turns
_DENSE, _DATA = "dense.onnx", "dense.onnx.data"


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call of the dense network's file and of the small one's.

    Attributes:
        dense, small: medians of the turns that the two took one after the other.
        threads: that a call may use.
        batch: examples in a call.
        runtime: with its version.
        processor: that they ran on.
        dense_bytes: size of the dense network's file with its weights; None if unknown.
    """

    dense: tuple[float, ...]
    small: tuple[float, ...]
    threads: int
    batch: int
    runtime: str
    processor: str
    dense_bytes: int | None = None

    @classmethod
    def of(
        cls,
        turns: Mapping[str, Sequence[float]],
        threads: int,
        batch: int,
        dense_bytes: int | None = None,
    ) -> Times:
        """Return the times of turns that ONNX Runtime took on this machine."""
        runtime = f"onnxruntime {collect.version()}"
        both = tuple(turns["dense"]), tuple(turns["own"])
        return cls(*both, threads, batch, runtime, collect.processor(), dense_bytes)

    @property
    def share(self) -> float:
        """Time of the small network over that of the dense one."""
        return collect.share(self.small, self.dense)

    @property
    def before(self) -> float:
        """Milliseconds of the dense network."""
        return collect.typical(self.dense)

    @property
    def after(self) -> float:
        """Milliseconds of the small network, while the dense one takes ``before``."""
        return self.before * self.share

    @property
    def spread(self) -> float:
        """Interquartile range of the turns' shares, relative to their median."""
        return collect.spread(self.small, self.dense)

    @property
    def warning(self) -> str:
        """Warning that no time was gained; empty where some was."""
        if self.share < 1:
            return ""
        return (
            f"the file is not faster than the dense network's: {self}. The usual cause is widths "
            "that the runtime has no fast path for: give a budget in latency (`l0prune measure` "
            "makes the table for it), or widths in multiples of 16 (round_to)"
        )

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return (
            f"{self.before:.3g} → {self.after:.3g} ms ({1 / self.share:.2f} times as fast; half of "
            f"the turns within {self.spread:.0%}), {threads}, batch {self.batch}, {self.runtime}, "
            f"{self.processor}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the times as plain data."""
        return asdict(self)


def times_of(
    model: nn.Module,
    path: Path,
    inputs: Sequence[Any],
    sizes: Sequence[Mapping[int, str]],
    threads: int,
    opset: int | None = None,
) -> Times:
    """Time a file beside that of the dense network, which is written temporarily.

    Args:
        model: gated; with all gates open it is the dense network.
        path: of the file.
        inputs: an example of what it reads, in order.
        sizes: for each of these the names of its free dims.
        threads: that a call may use.
        opset: of the file of the dense network; None for the exporter's own choice.
    """
    gated, _ = holder(model)
    with tempfile.TemporaryDirectory() as folder, stage("timing the file beside the dense one"):
        dense = Path(folder) / _DENSE
        network = copies_of(gated)
        _, single = class_programs(network.plain, network.dtypes, network.example, network.free)
        write_runnable(single, dense, Path(folder) / _DATA, sizes, opset)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        networks = [collect.Network(each, threads, collect.CPU) for each in (path, dense)]
        given, batch = _one(inputs, sizes)
        names = [each.name for each in networks[0].session.get_inputs()]
        turns = collect.networks_turns(
            networks[0], networks[1], dict(zip(names, given, strict=True)), _SECONDS
        )
    return Times.of(turns, threads, batch, size)


def _one(
    inputs: Sequence[Any], sizes: Sequence[Mapping[int, str]]
) -> tuple[list[np.ndarray[Any, Any]], int]:
    """Return the inputs, of one example where the batch is free, and the number of examples."""
    given, batch = [], 1
    for leaf, free in zip(inputs, sizes, strict=True):
        value = torch.as_tensor(leaf)
        value = value.float() if value.is_floating_point() else value
        if free.get(0) == "batch":
            value = value[:1]
        elif isinstance(leaf, Tensor) and leaf.ndim:
            batch = max(batch, len(leaf))
        given.append(np.ascontiguousarray(value.numpy()))
    return given, batch
