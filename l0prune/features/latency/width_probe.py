"""Times of small networks over their width on one target: a probe of seconds, kept on this machine.

Where the target cannot be run here, what is usual for it stands in: a staircase of whole blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn

from l0prune.errors import FileError, L0pruneError, UsageError
from l0prune.exporting.onnx import collect
from l0prune.features.latency.eager import Eager
from l0prune.features.latency.onnx_files import OnnxFiles
from l0prune.features.latency.runtimes import Torch, runtime_of
from l0prune.files.atomic import write_whole
from l0prune.files.checked_json import check_seal, parsed, read_json, sealed
from l0prune.plan.width_times import (
    CONV,
    DEPTHWISE,
    LARGEST,
    LINEAR,
    OTHER_CONV,
    POINTWISE,
    WidthTimes,
)
from l0prune.progress.stages import stage

_FORMAT = 1
_OUTER = 64  # channels before and behind the hidden layer
_ODD = (5, 7, 11, 18, 27, 35, 43, 59, 75, 93, 109, 125)
_EVEN = (*range(4, 65, 4), *range(72, LARGEST + 1, 8))
WIDTHS = tuple(sorted({*_ODD, *_EVEN}))
_ROUNDS, _RUNS = 3, 5  # each network is run in rounds: a machine may be busy for a while
_MEMORY = 1 << 20  # values of the network whose time is that of memory
_BYTES = 2 * 4 * _MEMORY  # that it reads and writes


class _Kind(NamedTuple):
    """Small network of one kind of layer with a hidden width: its modules, input and MACs."""

    build: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    macs: Callable[[int], int]


def _convolutions(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(_OUTER, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, _OUTER, 3, padding=1)
    )


def _pointwise(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(_OUTER, width, 1), nn.ReLU(), nn.Conv2d(width, _OUTER, 1))


def _depthwise(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(_OUTER, width, 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, groups=width),
        nn.ReLU(),
        nn.Conv2d(width, _OUTER, 1),
    )


def _other_convolutions(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(_OUTER, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, _OUTER, 3, padding=1)
    )


def _linears(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4 * _OUTER, width), nn.ReLU(), nn.Linear(width, 4 * _OUTER))


_SIDE, _WIDE_SIDE, _LENGTH, _TOKENS = 14, 28, 256, 64
KINDS = {
    CONV: _Kind(_convolutions, (1, _OUTER, _SIDE, _SIDE), lambda w: 2 * 9 * _OUTER * w * _SIDE**2),
    POINTWISE: _Kind(
        _pointwise, (1, _OUTER, _WIDE_SIDE, _WIDE_SIDE), lambda w: 2 * _OUTER * w * _WIDE_SIDE**2
    ),
    DEPTHWISE: _Kind(
        _depthwise,
        (1, _OUTER, _WIDE_SIDE, _WIDE_SIDE),
        lambda w: (2 * _OUTER + 9) * w * _WIDE_SIDE**2,
    ),
    OTHER_CONV: _Kind(
        _other_convolutions, (1, _OUTER, _LENGTH), lambda w: 2 * 3 * _OUTER * w * _LENGTH
    ),
    LINEAR: _Kind(_linears, (1, _TOKENS, 4 * _OUTER), lambda w: 8 * _OUTER * w * _TOKENS),
}
Run = Callable[[int], float]
"""Function from a number of runs of a network to their median in milliseconds."""


@cache
def width_times(target: str) -> WidthTimes:
    """Return the times over widths on a target: kept ones, else probed, else the usual ones.

    A file that the environment variable ``L0PRUNE_WIDTHS`` names comes first: the times that were
    kept on another machine, where the network will run.

    Raises:
        FileError: that file cannot be read.
    """
    if named := os.environ.get("L0PRUNE_WIDTHS"):
        return _read(Path(named))
    try:
        runtime = runtime_of(target)
        key = f"{target} {runtime.version}, {collect.processor()}"
    except (UsageError, ImportError):  # it is another machine that has this runtime
        return usual(target)
    if (kept := _kept(key)) is not None:
        return kept
    try:
        with stage(f"timing some widths on {target}, once for this machine"):
            found = probed(target, runtime, key)
    except (L0pruneError, ImportError, RuntimeError, OSError, AttributeError) as error:
        return _but(usual(target), error)
    _keep(key, found)
    return found


def probed(target: str, runtime: Any, key: str) -> WidthTimes:
    """Time the small networks of all kinds at all widths on a runtime.

    Rounds over all networks take turns, and the least time of each counts: a machine that is busy
    for a while slows some rounds only.
    """
    names = [(kind, width) for kind in KINDS for width in WIDTHS]
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        prepare = _preparer(runtime, Path(folder))
        runs = [prepare(KINDS[kind].build(width), KINDS[kind].shape) for kind, width in names]
        runs.append(prepare(nn.Sequential(nn.Sigmoid(), nn.Hardswish()), (1, _MEMORY)))
        least = np.min([[run(_RUNS) for run in runs] for _ in range(_ROUNDS)], 0)
    times: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for (kind, width), ms in zip(names, least, strict=False):
        times[kind][width] = float(ms)
    macs = {kind: of.macs(LARGEST) / times[kind][LARGEST] for kind, of in KINDS.items()}
    return WidthTimes(target, f"timed here, {key}", times, macs, 2 * _BYTES / float(least[-1]))


Prepare = Callable[[nn.Module, tuple[int, ...]], Run]
"""Function that makes a network of an input of this shape ready to be timed."""


def _preparer(runtime: Any, folder: Path) -> Prepare:
    if isinstance(runtime, OnnxFiles):
        return partial(_file, runtime, folder, iter(range(10**6)))
    if isinstance(runtime, Torch):
        eager = runtime.kind(runtime.provider, 1)
        if type(eager) is Eager or eager.device.type == "cuda":
            return partial(_module, eager)
    raise UsageError("a network of this runtime takes seconds to prepare")


def _file(
    runtime: OnnxFiles, folder: Path, numbers: Iterator[int], network: nn.Module, shape: Any
) -> Run:
    import onnx

    path = folder / f"{next(numbers)}.onnx"
    inputs = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    model = _as_onnx(network, shape)
    if runtime.convert is not None:
        model = runtime.convert(model, inputs)
    onnx.save(model, str(path))
    loaded = runtime.load(path, 1, runtime.provider)
    loaded.median(inputs, 1)
    return partial(loaded.median, inputs)


def _module(runtime: Eager, network: nn.Module, shape: tuple[int, ...]) -> Run:
    value = torch.randn(shape, device=runtime.device, dtype=runtime.dtype)
    with runtime.running():
        call = runtime.prepared(network.to(value).eval())
        call(value)

    def median(times: int) -> float:
        with runtime.running():
            return runtime.median(lambda: call(value), times)

    return median


def _as_onnx(network: nn.Module, shape: tuple[int, ...]) -> Any:
    """Return a chain of layers as an ONNX model, without an exporter: in a millisecond."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, weights, last = [], [], "x"

    def weight(name: str, value: Any) -> str:
        weights.append(numpy_helper.from_array(value.detach().numpy().copy(), name))
        return name

    for number, layer in enumerate(network.children()):
        read, last = last, f"v{number}"
        if isinstance(layer, nn.Linear):
            product = f"m{number}"
            its = [read, weight(f"w{number}", layer.weight.t().contiguous())]
            nodes.append(helper.make_node("MatMul", its, [product]))
            its = [product, weight(f"b{number}", layer.bias)]
            nodes.append(helper.make_node("Add", its, [last]))
        elif isinstance(layer, nn.Conv1d | nn.Conv2d):
            its = [read, weight(f"w{number}", layer.weight), weight(f"b{number}", layer.bias)]
            pads = [*map(int, layer.padding)] * 2
            nodes.append(helper.make_node("Conv", its, [last], pads=pads, group=layer.groups))
        else:
            kind = {nn.Sigmoid: "Sigmoid", nn.Hardswish: "HardSwish"}.get(type(layer), "Relu")
            nodes.append(helper.make_node(kind, [read], [last]))
    value = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    made = [helper.make_tensor_value_info(last, TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "widths", value, made, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    return model


class Stairs(NamedTuple):
    """Staircase of times: widths count as whole blocks, and others than multiples are slower."""

    block: int
    multiple: int
    slow: float

    def time(self, width: int) -> float:
        """Return the time of a width, in those of one slot."""
        filled = ceil(width / self.block) * self.block
        return _FIXED + filled * (self.slow if width % self.multiple else 1.0)


_FIXED = 16.0  # slots whose time a layer takes at any width
_FLAT = Stairs(1, 1, 1.0)
_WIDE, _NARROW = (16, 8)  # floats of a block of ONNX Runtime with AVX-512, and without it


def _usual_stairs(target: str) -> dict[str, Stairs]:
    """Return the staircase of each kind of layer that is usual for a target.

    From NCHWc blocks of ONNX Runtime, dot products of four bytes, and tensor cores, whose tiles are
    8 wide in 16 bits (as NVIDIA's guide to matrix multiplication has it).
    """
    flags = collect.processor_flags()
    block = _WIDE if not flags or "avx512f" in flags else _NARROW
    if target == "onnxruntime" or target.startswith("openvino"):
        conv = Stairs(block, 4, 1.5)
        return {CONV: conv, POINTWISE: conv, DEPTHWISE: Stairs(block, 4, 2.0), OTHER_CONV: _FLAT,
                LINEAR: Stairs(block // 2, 1, 1.0)}  # fmt: skip
    if target.endswith("int8"):
        return {kind: Stairs(block, 4, 1.5) for kind in KINDS}
    if target in ("cuda-graph", "torch-cuda-bf16"):
        return {kind: Stairs(8, 8, 1.5) for kind in KINDS}
    return {kind: Stairs(8, 1, 1.0) for kind in KINDS}


def usual(target: str) -> WidthTimes:
    """Return what is usual for a target where it cannot be run."""
    times = {
        kind: {width: stairs.time(width) for width in WIDTHS}
        for kind, stairs in _usual_stairs(target).items()
    }
    rate = {
        CONV: 3e7,
        POINTWISE: 2e7,
        DEPTHWISE: 1e7,
        OTHER_CONV: 1.5e7,
        LINEAR: 3e7,
    }  # of a core at 3 GHz
    return WidthTimes(target, "usual for it; it was not timed here", times, rate, 1e7)


def _but(found: WidthTimes, error: Exception) -> WidthTimes:
    reason = f"usual for it; timing it here failed: {error}"
    return WidthTimes(found.target, reason, found.times, found.macs, found.memory)


_TIMES = TypeAdapter(WidthTimes)


def place(key: str) -> Path:
    """Return the file in the user's state folder that holds the times of a runtime's version."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    digest = hashlib.sha256(f"{_FORMAT} {key}".encode()).hexdigest()[:16]
    return Path(state) / "l0prune" / "widths" / f"{digest}.json"


def _kept(key: str) -> WidthTimes | None:
    try:
        return _read(place(key))
    except (FileError, OSError, RuntimeError):
        return None  # there are none, or they are of no use: they are timed again


def _read(path: Path) -> WidthTimes:
    """Read kept times.

    Raises:
        FileError: the file is missing, or holds something else.
    """
    data = read_json(path, "The state folder of the machine that timed them has one.")
    try:
        check_seal(data, path)
        return parsed(_TIMES, {name: of for name, of in data.items() if name != "digest"})
    except (ValueError, AttributeError) as error:
        raise FileError(f"{path} holds no times over widths: {error}") from error


def _keep(key: str, found: WidthTimes) -> None:
    try:
        path = place(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(sealed(json.loads(_TIMES.dump_json(found)))))
    except (FileError, OSError, RuntimeError):
        return  # a folder that cannot be written: the next process times them again
