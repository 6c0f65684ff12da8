"""What an export costs beside torch.onnx.export itself: CPU seconds and peak memory.

    python -m benchmarks.export [resnet50 vit_b_16 …] [--repeats 3] [--input 2x3x224x224]

Each model of torchvision has a process of its own; half of its gates are closed at random. Printed
for each, with the medians of CPU seconds (a busy machine changes those little):

    export_s, save_onnx_s   l0prune.export, and its ONNX file
    onnx_s                  torch.onnx.export of the dense original, with a free batch size
    ratio                   (export_s + save_onnx_s) / onnx_s
    weights_mib             the original's weights in float32
    export_peak, save_onnx_peak, onnx_peak, capture_peak
                            most memory held at once, the original's own weights included, as a
                            multiple of them; the last one is torch.export alone (Linux)
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.export import Dim

import l0prune
from benchmarks import isolation
from benchmarks.isolation import ROOT, Row, resident

MODELS = ("resnet50", "vit_b_16", "densenet121")
SIZE = (2, 3, 224, 224)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input", default="x".join(map(str, SIZE)))
    parser.add_argument("--limit", type=int, default=3600, help="CPU seconds for one model")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "export.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        repeats, size, name = options.one.split(":")
        shape = tuple(map(int, size.split("x")))
        isolation.measure(name, steps(name, shape, int(repeats)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    how = f"{options.repeats}:{options.input}"
    isolation.run("benchmarks.export", options.out, how, options.models, options.limit, str)


def steps(name: str, size: tuple[int, ...], repeats: int) -> Iterator[Row]:
    """The rounds of one model, after one of a tiny one that loads what is loaded once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        small = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        for _ in one_round(small, torch.randn(2, 4), file):
            pass
        settle()
        floor = resident("VmRSS")
        torch.manual_seed(0)
        model, x = torchvision.models.get_model(name).eval(), torch.randn(size)
        weights = sum(p.numel() * 4 for p in model.parameters()) / 2**20
        seconds: dict[str, list[float]] = {}
        yield {"step": "rounds", "weights_mib": round(weights)}
        for _ in range(repeats):
            peaks: Row = {}
            for side, used, peak in one_round(model, x, file):
                seconds.setdefault(f"{side}_s", []).append(used)
                peaks[f"{side}_peak"] = round((peak - floor) / weights, 2)
            found = {each: round(statistics.median(of), 2) for each, of in seconds.items()}
            ours = found["export_s"] + found["save_onnx_s"]
            yield {**found, "ratio": round(ours / found["onnx_s"], 2), **peaks}


def one_round(model: nn.Module, x: Tensor, file: Path) -> Iterator[tuple[str, float, float]]:
    """CPU seconds and the most memory (MiB) of each side; the model is as it was afterwards."""
    yield ("capture", *measured(lambda: torch.export.export(model, (x,), strict=False))[1:])
    yield ("onnx", *measured(lambda: plain_onnx(model, x, file))[1:])
    l0prune.gate(model, (x,))
    close_half(model)
    dense, *spent = measured(lambda: l0prune.export(model))
    yield ("export", *spent)
    yield ("save_onnx", *measured(lambda: dense.save_onnx(file, time=False))[1:])
    l0prune.ungate(model)


def plain_onnx(model: nn.Module, x: Tensor, file: Path) -> None:
    torch.onnx.export(
        model, (x,), file, dynamo=True, verbose=False, dynamic_shapes=({0: Dim("batch")},),
        external_data=False,
    )  # fmt: skip


@torch.no_grad()
def close_half(model: nn.Module) -> None:
    """Half of the gates, but never an axis whole; the open ones take fractional values."""
    bank = l0prune.gates(model)
    generator = torch.Generator().manual_seed(0)
    is_closed = torch.rand(bank.plan.size, generator=generator) < 0.5
    for axis in bank.plan.axes:
        is_closed[axis.start] = False
    values = torch.rand(bank.plan.size, generator=generator) * 4 - 1.5
    bank.log_alpha.copy_(torch.where(is_closed, -5.0, values))


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gives, its CPU seconds, and the most memory that was held meanwhile, in MiB."""
    settle()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    start = time.process_time()
    result = work()
    return result, time.process_time() - start, resident("VmHWM")


def settle() -> None:
    """Give back to the system what nobody holds any more, so that it counts for no later step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
