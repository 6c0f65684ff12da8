"""The public ``measure``: milliseconds of a gated model at any widths, on a runtime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from l0prune.errors import UsageError
from l0prune.files.atomic import claimed
from l0prune.gating.attaching import gates_of
from l0prune.plan.numbers import NETWORKS, SEEDS, THREADS, check_whole
from l0prune.timing.bundle import Job
from l0prune.timing.results import FEWEST, table_of
from l0prune.timing.runtimes import runtime_of
from l0prune.timing.table import LatencyTable

SAMPLES = 48
Progress = Callable[[int, int], None]


def measure(
    model: nn.Module,
    threads: int = 1,
    batch: int = 1,
    runtime: str = "onnxruntime",
    providers: str | list[str] | None = None,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> LatencyTable:
    """Time a gated model at many widths, and learn what it takes at any.

    Some exports show which number in its ONNX file is the size of what. Then networks of random
    widths are written and timed, each in turns with the dense one; ONNX Runtime's profile says
    what each node took. The model stays as it is, and its gates do not matter.

    Give the table to ``finetune``, ``fit`` or ``Pruner`` as ``latency=``, with a budget such as
    ``"latency=12ms"`` or ``"latency=0.5"``.

    Args:
        model: a gated model.
        threads: that one call may use.
        batch: examples in a call.
        runtime: ``"onnxruntime"``, ``"eager"`` or ``"compile"``, which are PyTorch's.
        providers: of ONNX Runtime, such as ``"CUDAExecutionProvider"``, or a device of PyTorch's,
            such as ``"cuda"``; by default the CPU.
        samples: how many networks are timed.
        seed: of their widths.
        folder: where they are written and results are kept, so that a call that was stopped goes
            on where it was; by default a temporary one.
        progress: called with how many networks are timed, and of how many.

    Raises:
        FileError: another process is at the same in this folder.
        NotGated: the model carries no gates.
        UsageError: the runtime or provider is not there, the model becomes several ONNX files, or
            takes no such batch.
    """
    check_whole("threads", threads, most=THREADS)
    check_whole("batch", batch)
    check_whole("samples", samples, most=NETWORKS)
    check_whole("seed", seed, 0, SEEDS)
    if samples < FEWEST:
        raise UsageError(
            f"{samples} networks are too few for a latency table: time {FEWEST} or more"
        )
    chosen = runtime_of(runtime, providers)
    plan = gates_of(model).plan
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(claimed(place))
        job = Job(model, place, threads, batch, samples, seed, progress)
        return table_of(plan, chosen.results(job))
