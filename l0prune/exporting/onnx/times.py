"""Times of ONNX files beside the dense network's, taken in turns by ONNX Runtime."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l0prune.capture.copying import copied
from l0prune.errors import L0pruneError
from l0prune.exporting.certify.dtypes import CPU, cast, placed
from l0prune.exporting.network import Network
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.file import write_runnable
from l0prune.exporting.own_class.replacement import class_programs
from l0prune.exporting.pieces import ExportedPart
from l0prune.plan.cost import cost_of
from l0prune.progress.stages import stage, steps

_SECONDS = 1.5  # of all turns, about
_FEWEST = 3  # turns, of networks that take long
_MOST = 100  # turns, of more runs where these are short: all are kept in the file
_SLOW = 100  # milliseconds of a call, from which on a turn is one call
_LARGEST = 2 << 30  # bytes of a dense network's weights in float32, if it is to be written again
_NOISE = 0.01  # of biases and factors around 1
_DENSE, _DATA = "dense.onnx", "dense.onnx.data"

Given = Sequence[np.ndarray[Any, Any]]
"""Inputs of one call of a file, in order."""

Feed = dict[str, np.ndarray[Any, Any]]
"""The same by name."""


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
    def setting(self) -> str:
        """Threads, batch, runtime and processor of the timing."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{threads}, batch {self.batch}, {self.runtime}, {self.processor}"

    @property
    def pace(self) -> str:
        """Milliseconds before and after, the ratio, and the spread of the turns."""
        return (
            f"{self.before:.3g} → {self.after:.3g} ms ({1 / self.share:.2f} times as fast; "
            f"median of {len(self.small)} alternating runs, interquartile range {self.spread:.0%})"
        )

    def __str__(self) -> str:
        return f"{self.pace}, {self.setting}"

    def to_dict(self) -> dict[str, Any]:
        """Return the times as plain data."""
        return asdict(self)


class DenseNetwork:
    """Dense network whose file others are timed beside; without the values of its weights.

    Time does not depend on values, so that it costs no memory while nothing is timed.

    Attributes:
        macs: multiply-accumulates of one example.
        bytes: of its weights in float32.
    """

    def __init__(self, network: Network) -> None:
        parameters = [p for p in network.plain.parameters() if type(p) is nn.Parameter]
        self.macs = cost_of(network.plan).dense("macs")
        self.bytes = 4 * sum(p.numel() for p in parameters)
        self._dtypes, self._free = network.dtypes, network.free
        self._example = cast(network.example, None)
        hollow = {id(p): _parameter(torch.empty_like(p, device="meta"), p) for p in parameters}
        self._module = copied(network.plain, hollow)
        self._folder: Path | None = None
        self._written: tuple[Any, ...] = ()

    def check_size(self) -> None:
        """Raise L0pruneError for a network that is too large to be written a second time.

        Raises:
            L0pruneError: its weights are larger than 2 GB.
        """
        if self.bytes > _LARGEST:
            raise L0pruneError(
                f"the dense network has {self.bytes / 2**30:.1f} GB of weights in float32, which "
                "are not written a second time for that: give the gated model (beside=model) if "
                "they may be"
            )

    def file(self, sizes: Sequence[Mapping[int, str]], opset: int | None) -> Path:
        """Return the path of its file, which is written once and deleted with this object.

        Args:
            sizes: for each input the names of its free dims.
            opset: of the file; None for the exporter's own choice.

        Raises:
            L0pruneError: it cannot be written.
        """
        asked = opset, list(map(dict, sizes))
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="l0prune-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / _DENSE
        if self._written != asked:
            with stage("writing the dense network, to time it"):
                seeded = torch.Generator().manual_seed(0)
                hollow = [p for p in self._module.parameters() if p.is_meta]
                self._written = ()
                filled = {id(p): _filled(p, seeded) for p in hollow}
                module = placed(copied(self._module, filled), CPU)
                _, single = class_programs(module, self._dtypes, self._example, self._free)
                write_runnable(single, path, self._folder / _DATA, sizes, opset)
            self._written = asked
        return path


def _parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    result = nn.Parameter(values, like.requires_grad)
    vars(result).update(vars(like))
    return result


def _filled(hollow: nn.Parameter, seeded: torch.Generator) -> nn.Parameter:
    """Return a parameter with numbers that keep activations about as large as they are.

    Subnormal numbers would be slow, and the exporter writes equal weights once.
    """
    values = torch.randn(hollow.shape, generator=seeded)
    if hollow.dim() > 1:
        values /= max(1, hollow.numel() // max(1, len(hollow))) ** 0.5
    else:
        values = values * _NOISE + 1
    return _parameter(values.to(hollow.dtype), hollow)


def in_turns(
    networks: Mapping[str, Callable[[int], float]], seconds: float
) -> dict[str, list[float]]:
    """Return medians in milliseconds of networks that take turns for about ``seconds``.

    Args:
        networks: by name a function from a number of runs to their median.
        seconds: of all turns of all networks; there are three to a hundred turns.
    """
    ms = {name: each(1) for name, each in networks.items()}
    ms |= {name: networks[name](1) for name, first in ms.items() if first < _SLOW}
    calls = {name: 1 if each >= _SLOW else collect.runs(each) for name, each in ms.items()}
    turn = sum(ms[name] * (count + 1) for name, count in calls.items())
    number = max(_FEWEST, round(seconds * 1e3 / turn))
    calls = {name: count * max(1, number // _MOST) for name, count in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in networks}
    for _ in steps(range(min(number, _MOST))):
        for name, each in networks.items():
            if ms[name] < _SLOW:
                each(1)  # the caches were another network's
            found[name].append(each(calls[name]))
    return found


def as_text(times: Times | None, beside_dense: Times | None) -> str:
    """Return the times of a file of fewer bits beside the one in float32; empty if unknown."""
    if times is None:
        return ""
    dense = f"; beside the dense network in float32 {beside_dense.pace}" if beside_dense else ""
    return f"{times}{dense}"


def feed_of(network: collect.Network, given: Given) -> Feed:
    """Return the inputs of one call by the names of a file, and in 16 bits where it takes these."""
    of_file = network.session.get_inputs()
    return {
        each.name: array.astype(np.float16) if each.type == "tensor(float16)" else array
        for each, array in zip(of_file, given, strict=True)
    }


def turns_of(networks: Mapping[str, collect.Network], given: Given) -> dict[str, list[float]]:
    """Return the times of files that take turns on the same inputs; see ``in_turns``."""
    medians = {name: partial(each.median, feed_of(each, given)) for name, each in networks.items()}
    return in_turns(medians, _SECONDS)


def times_of(path: Path, dense: Path, given: Given, threads: int, batch: int) -> Times:
    """Time a file beside that of the dense network.

    Args:
        path: of the file.
        dense: of the dense network's file.
        given: inputs of a call, in order.
        threads: that a call may use.
        batch: examples in the call.
    """
    files = {"dense": dense, "own": path}
    with stage("timing the file beside the dense one"):
        networks = {
            name: collect.Network(each, threads, collect.CPU) for name, each in files.items()
        }
        turns = turns_of(networks, given)
    size = sum(file.stat().st_size for file in dense.parent.iterdir())
    return Times.of(turns, threads, batch, size)


def times_beside(
    path: Path, single: Path, dense: Path | None, piece: ExportedPart, threads: int
) -> tuple[Times, Times | None]:
    """Time a file of fewer bits beside the one in float32, and beside the dense network's.

    Args:
        path: of the file.
        single: of the one in float32 that it was made from.
        dense: of the dense network's in float32; None if there is none.
        piece: that the files were made from.
        threads: that a call may use.
    """
    files = {"own": path, "single": single} | ({} if dense is None else {"dense": dense})
    networks = {name: collect.Network(each, threads, collect.CPU) for name, each in files.items()}
    given, batch = one_example(piece)
    turns = turns_of(networks, given)
    own = turns["own"]
    of_single = Times.of({"dense": turns["single"], "own": own}, threads, batch)
    return of_single, None if dense is None else Times.of(turns, threads, batch)


def one_example(piece: ExportedPart) -> tuple[Given, int]:
    """Return inputs of a piece's file, of one example where the batch is free, and how many."""
    given, batch = [], 1
    takes_one = piece.dynamic and 1 in piece.batches
    for leaf, free in zip(piece.read(piece.answers[0].inputs), piece.sizes, strict=True):
        value = torch.as_tensor(leaf)
        value = value.float() if value.is_floating_point() else value
        if takes_one and free.get(0) == "batch":
            value = value[:1]
        elif isinstance(leaf, Tensor) and leaf.ndim:
            batch = max(batch, len(leaf))
        given.append(np.ascontiguousarray(value.numpy()))
    return given, batch
