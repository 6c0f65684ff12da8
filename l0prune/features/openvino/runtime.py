"""OpenVINO on the CPU: a runtime of ONNX files, in float32 or in eight bits."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from l0prune.doors import provided
from l0prune.errors import UsageError
from l0prune.exporting.onnx import collect
from l0prune.features.latency.onnx_files import OnnxFiles
from l0prune.features.latency.runtimes import RUNTIMES


class OpenVino(OnnxFiles):
    """OpenVINO on one of its devices."""

    def __init__(self, providers: Sequence[str], name: str, convert: Any = None) -> None:
        try:
            import openvino
        except ImportError as error:
            raise UsageError("OpenVINO is not installed: pip install openvino") from error
        self.name, self.convert, self.version = name, convert, str(openvino.__version__)
        self.provider = providers[0] if providers else "CPU"
        self._core = openvino.Core()
        if self.provider not in (devices := self._core.available_devices):
            raise UsageError(f"OpenVINO has no {self.provider} here, but {', '.join(devices)}")

    def load(self, path: Path, threads: int, provider: str) -> collect.Loaded:
        """See ``OnnxFiles``."""
        return _Network(self._core, path, threads, provider)

    def nodes(
        self, path: Path, inputs: dict[str, Any], times: int, threads: int, provider: str
    ) -> dict[str, float]:
        """See ``OnnxFiles``."""
        network = _Network(self._core, path, threads, provider, {"PERF_COUNT": True})
        network.median(inputs, 1)
        calls: dict[str, list[float]] = defaultdict(list)
        for _ in range(times):
            found: dict[str, float] = defaultdict(float, {collect.RUN: network.median(inputs, 1)})
            last = collect.BEFORE
            for each in network.request.profiling_info:
                number = collect.NODE.search(each.node_name)
                last = number[1] if number else last
                if each.status == each.Status.EXECUTED:
                    found[last] += each.real_time.total_seconds() * 1e3
            for node, ms in found.items():
                calls[node].append(ms)
        return {node: collect.typical(ms) for node, ms in calls.items()}


class _Network:
    """ONNX file compiled by OpenVINO, in the file's precision."""

    def __init__(
        self, core: Any, path: Path, threads: int, device: str, more: dict[str, Any] | None = None
    ) -> None:
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        settings = {**options, "INFERENCE_NUM_THREADS": threads, **(more or {})}
        self.request = core.compile_model(str(path), device, settings).create_infer_request()

    def median(self, inputs: dict[str, Any], times: int) -> float:
        """Return the median in milliseconds, by wall clock: OpenVINO works in separate threads."""
        run = partial(self.request.infer, inputs)
        return statistics.median(collect.milliseconds(run, False) for _ in range(times))


RUNTIMES["openvino"] = lambda providers: OpenVino(providers, "openvino")
RUNTIMES["openvino-int8"] = lambda providers: OpenVino(
    providers, "openvino-int8", provided("int8_for_times")(is_standard=True)
)
