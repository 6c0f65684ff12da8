"""What a LayerNorm costs after slots of its axis went, beside one that was built as narrow.

A stack of a ViT-B's MLP blocks (LayerNorm, 4 × wide, residual) with 700 of 768 slots of the
stream left, exported by l0prune, against the same stack built 700 wide with plain LayerNorms: both
by ONNX Runtime and by PyTorch, on one CPU thread, alternating. Prints the medians of the ratios.

    python -m benchmarks.layernorm [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import onnxruntime
import torch
from torch import Tensor, nn

import l0prune
from l0prune.exporting.onnx.file import to_onnx

WIDE, LEFT, HIDDEN, BLOCKS, TOKENS = 768, 700, 3072, 4, 197


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(BLOCKS))
        self.up = nn.ModuleList(nn.Linear(width, HIDDEN) for _ in range(BLOCKS))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return self.head(x)


def cut() -> l0prune.Export:
    """The wide stack, cut to ``LEFT`` slots of its stream."""
    x = torch.randn(2, TOKENS, 16)
    model = l0prune.gate(Stack(WIDE).eval(), (x,), exclude=["up.*", "*.in"])
    (axis,) = l0prune.gates(model).axes
    with torch.no_grad():
        l0prune.gates(model).log_alpha[: axis.size - LEFT] = -5.0
    dense = l0prune.export(model)
    assert dense.widths[axis.name] == (LEFT, WIDE)
    return dense


def plain() -> torch.export.ExportedProgram:
    """The stack built narrow from the start."""
    x = torch.randn(2, TOKENS, 16)
    return torch.export.export(
        Stack(LEFT).eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )


def runner(program: torch.export.ExportedProgram) -> Callable[[], float]:
    """Seconds of one run of one example."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        to_onnx(program).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {session.get_inputs()[0].name: torch.randn(1, TOKENS, 16).numpy()}

    def run() -> float:
        start = time.perf_counter()
        session.run(None, feed)
        return time.perf_counter() - start

    return run


def eager(module: nn.Module) -> Callable[[], float]:
    """The same in PyTorch."""
    x = torch.randn(1, TOKENS, 16)

    def run() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            module(x)
        return time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dense = cut()
    ways = {
        "ONNX Runtime": (runner(dense.program), runner(plain())),
        "PyTorch": (eager(dense.module), eager(Stack(LEFT).eval())),
    }
    print(f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}, 1 thread")
    for way, runs in ways.items():
        for run in runs:
            run()
        times = [(runs[0](), runs[1]()) for _ in range(rounds)]
        ours, theirs = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        print(f"{way}: cut LayerNorms {ours:.1f} ms, plain {theirs:.1f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
