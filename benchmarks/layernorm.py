"""What a LayerNorm costs after slots of its axis went, beside one that was built as narrow.

A stack of a ViT-B's MLP blocks (LayerNorm, 4 × wide, residual) with 700 of 768 slots of the
stream left, exported by l0prune, against the same stack built 700 wide with plain LayerNorms: both
by ONNX Runtime and by PyTorch, on one CPU thread, alternating. Prints the medians of the ratios.

    python -m benchmarks.layernorm [--rounds 30]
"""

from __future__ import annotations

import argparse

import onnxruntime
import torch
from torch import Tensor, nn

import l0prune
from benchmarks.by_turns import compared, in_runtime, in_torch
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
    model = l0prune.gate(Stack(WIDE).eval(), (x,), exclude=["up.*", "*.in"], branches=False)
    (axis,) = l0prune.gates(model).axes
    with torch.no_grad():
        l0prune.gates(model).log_alpha[: axis.size - LEFT] = -5.0
    small = l0prune.export(model)
    assert small.widths[axis.name] == (LEFT, WIDE)
    return small


def plain() -> torch.export.ExportedProgram:
    """The stack built narrow from the start."""
    x = torch.randn(2, TOKENS, 16)
    return torch.export.export(
        Stack(LEFT).eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dense = cut()
    x = torch.randn(1, TOKENS, 16)
    files = (to_onnx(each).SerializeToString() for each in (dense.program, plain()))
    ways = {
        "ONNX Runtime": [in_runtime(file, x) for file in files],
        "PyTorch": [in_torch(module, x) for module in (dense.module, Stack(LEFT).eval())],
    }
    print(f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}, 1 thread")
    for way, runs in ways.items():
        ours, theirs, ratio = compared(*runs, rounds)
        print(f"{way}: cut LayerNorms {ours:.1f} ms, plain {theirs:.1f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
