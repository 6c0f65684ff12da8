"""Two networks of the same sizes, run by turns on one CPU thread: what is left after a cut costs.

    python -m benchmarks.by_turns [--cases layernorm subnormal] [--rounds 30]

In ONNX Runtime and in PyTorch; printed are medians of milliseconds and of ratios.

- ``layernorm``: a stack of a ViT-B's MLP blocks (LayerNorm, 4 × wide, residual) with 700 of 768
  slots of the stream left, beside the same stack built 700 wide with plain LayerNorms;
- ``subnormal``: a ResNet-18 in which two thirds of the weights have decayed to 1e-39, as weight
  decay leaves them that no gradient reaches any more, beside ours with all gates open, which has
  zeros in their place.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torchvision
from torch import Tensor, nn

import l0prune
from benchmarks.runner import Some, machine, options, table
from l0prune.capture.example_inputs import tensors_in
from l0prune.exporting.onnx.file import to_onnx

Run = Callable[[], object]
Pairs = dict[str, tuple[Run, Run]]
WIDE, LEFT, HIDDEN, BLOCKS, TOKENS = 768, 700, 3072, 4, 197


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


def layernorm() -> Pairs:
    """The wide stack, cut to ``LEFT`` slots of its stream, and one built narrow from the start."""
    x = torch.randn(2, TOKENS, 16)
    model = l0prune.gate(Stack(WIDE).eval(), (x,), exclude=["up.*", "*.in"], branches=False)
    (axis,) = l0prune.gates(model).axes
    with torch.no_grad():
        l0prune.gates(model).log_alpha[: axis.size - LEFT] = -5.0
    small = l0prune.export(model)
    assert small.widths[axis.name] == (LEFT, WIDE)
    batch = ({0: torch.export.Dim("batch")},)
    plain = torch.export.export(Stack(LEFT).eval(), (x,), dynamic_shapes=batch)
    files = [to_onnx(each).SerializeToString() for each in (small.program, plain)]
    x = torch.randn(1, TOKENS, 16)
    cut, built = (in_runtime(file, x) for file in files)
    return {
        "ONNX Runtime": (cut, built),
        "PyTorch": (in_torch(small.module, x), in_torch(Stack(LEFT).eval(), x)),
    }


def subnormal() -> Pairs:
    """A network of whose weights in more than one dim two thirds are subnormal, and flushed."""
    torch.set_flush_denormal(False)
    model, x = torchvision.models.resnet18().eval(), torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                is_left = torch.arange(parameter.numel()) % 3 == 0
                parameter.mul_(torch.where(is_left, 1.0, 1e-38).view_as(parameter))
    with tempfile.TemporaryDirectory() as folder:
        plain, ours = Path(folder) / "plain.onnx", Path(folder) / "ours.onnx"
        torch.onnx.export(model, (x,), plain, verbose=False, external_data=False)
        l0prune.gate(model, (x,))
        l0prune.gates(model).log_alpha.data.fill_(5.0)
        small = l0prune.export(model)
        small.save_onnx(ours, time=False)
        l0prune.ungate(model)
        return {
            "ONNX Runtime": (in_runtime(plain, x), in_runtime(ours, x)),
            "PyTorch": (in_torch(model, x), in_torch(small.module, x)),
        }


CASES = {"layernorm": (layernorm, 30), "subnormal": (subnormal, 20)}
"""The pairs of each, and the rounds by default."""


def main() -> None:
    given = options(__doc__, cases=Some(CASES), rounds=int)
    print(machine())
    for name in given.cases:
        torch.manual_seed(0)
        make, rounds = CASES[name]
        found = ((way, *compared(*pair, given.rounds or rounds)) for way, pair in make().items())
        rows = ((way, f"{a:.1f}", f"{b:.1f}", f"{ratio:.3f}") for way, a, b, ratio in found)
        table(f"{name} | first, ms | beside it, ms | ratio", rows)


if __name__ == "__main__":
    main()
