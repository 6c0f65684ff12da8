"""One network of ``benchmarks.threads``: cut, proven, written, loaded again and timed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

import l0prune
from benchmarks import thread_models, threads
from benchmarks.by_turns import Run, in_runtime, in_torch, seconds
from benchmarks.coverage import kept_class
from benchmarks.isolation import Row
from benchmarks.reloading import answer, reloaded
from benchmarks.thread_runs import PREPARE
from l0prune.exporting.certify.certificate import MODEL
from l0prune.exporting.certify.difference import difference

# Rounds of a comparison of times, the seconds after which no other begins, and how long each of the
# two runs in a round: a process' own time is counted in steps of milliseconds on some machines.
_ROUNDS, _SECONDS, _ROUND_MS = 25, 40, 250


def steps(name: str) -> Iterator[Row]:
    """One network, step by step."""
    of = threads.MODELS[name]
    model, example = built(of)
    yield {"step": "survey"}
    start = time.perf_counter()
    survey = l0prune.survey(model, *example, own_class=False)
    yield {
        "survey_s": round(time.perf_counter() - start, 2),
        "params_share": round(survey.reachable("params"), 4),
        "macs_share": round(survey.reachable("macs"), 4),
        "step": "prepare",
    }
    model, facts = PREPARE[of.prepare](of, model, example)
    yield {**facts, "step": "export"}
    dense = l0prune.export(model)
    yield {
        "params_before": dense.params_before,
        "params_after": dense.params,
        "macs_before": dense.macs_before,
        "macs_after": dense.macs,
        "float64": dense.certificate.worst(MODEL, "float64"),
        "class": kept_class(dense),
        "parts": len({piece.path for piece in dense.pieces}),
        "note": dense.note,
        "step": "onnx",
    }
    with tempfile.TemporaryDirectory() as folder:
        small = dense.save_onnx(Path(folder) / "small.onnx", time=False)
        yield {"onnx": dense.certificate.worst("onnx", "float32"), "step": "reload"}
        how, loaded = reloaded(partial(built, of), dense, Path(folder))
        found, expected = (answer(each, example) for each in (loaded, dense.module))
        yield {
            "reloaded": how,
            "reloaded_error": difference(expected, found),
            "params_exported": numbers(dense.module),
            "params_loaded": numbers(loaded),
            "step": "time",
        }
        before, _ = built(of)
        args, kwargs = example
        yield times("eager", *(in_torch(each, *args, **kwargs) for each in (before, dense.module)))
        if not dense.in_parts:
            l0prune.gate(before, *example)
            large = l0prune.export(before).save_onnx(Path(folder) / "large.onnx", time=False)
            yield times("ort", *(in_runtime(files[0], example) for files in (large, small)))


def built(of: threads.Model) -> thread_models.Built:
    """The network with the same weights each time, in eval mode."""
    torch.manual_seed(0)
    model, example = of.build()
    return model.eval(), example


def numbers(model: nn.Module) -> int:
    """How many its parameters hold, also those that eval mode does not use."""
    return sum(parameter.numel() for parameter in model.parameters())


def times(what: str, before: Run, after: Run) -> Row:
    """Milliseconds of CPU time, the two by turns: medians, and the median of their ratios."""
    counts = []
    for run in (before, after):
        run()
        counts.append(max(1, round(_ROUND_MS / 1e3 / seconds(run))))
    taken, begin = [], time.perf_counter()
    while len(taken) < _ROUNDS and time.perf_counter() - begin < _SECONDS:
        taken.append([cpu_ms(*each) for each in zip((before, after), counts, strict=True)])
    first, second = (median(column) for column in zip(*taken, strict=True))
    return {
        f"{what}_before_ms": round(first, 3),
        f"{what}_after_ms": round(second, 3),
        f"{what}_times": round(median(a / b for a, b in taken), 2),
    }


def cpu_ms(run: Run, count: int) -> float:
    """Of one run. What others do on the machine counts little: it is the process' own time."""
    start = time.process_time()
    for _ in range(count):
        run()
    return 1e3 * (time.process_time() - start) / count
