"""Runs of two networks by turns, on one thread: in ONNX Runtime, or in PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import nn

from l0prune.capture.example_inputs import tensors_in

Run = Callable[[], object]


def in_runtime(model: Path | bytes, example: Any) -> Run:
    """Runs a file, or its bytes, once."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    values = (tensor.numpy() for tensor in tensors_in(example))
    feed = dict(zip((given.name for given in session.get_inputs()), values, strict=True))
    return lambda: session.run(None, feed)


def in_torch(module: nn.Module, *args: Any, **kwargs: Any) -> Run:
    """Runs a module once, without gradients."""

    def run() -> object:
        with torch.inference_mode():
            return module(*args, **kwargs)

    return run


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compared(first: Run, second: Run, rounds: int) -> tuple[float, float, float]:
    """Medians of the milliseconds of each, and of the ratios, first over second."""
    times = [(seconds(first), seconds(second)) for _ in range(rounds + 1)][1:]
    mine, others = (statistics.median(each) * 1e3 for each in zip(*times, strict=True))
    return mine, others, statistics.median(a / b for a, b in times)
