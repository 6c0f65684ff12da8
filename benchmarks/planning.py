"""Planning without a big machine: time against the size of the graph, and a model of 70 billion.

    python -m benchmarks.planning [--layers 80]
    python -m benchmarks.planning --beside resnet50 vit_b_16 densenet121 llama [--repeats 5]

First the survey of plain networks of 10², 10³ and 10⁴ graph nodes, with the seconds that the
inference of axes takes on top of torch.export, in all and per node. Then the survey of a
Llama-shaped transformer on the meta device (8192 wide, 64 heads in groups of 8, 28672 in the MLP),
with its parameters, graph nodes, seconds and the process' peak memory.

With ``--beside`` time and peak memory of ``gate`` (which surveys, and tries its plan) beside
torch.export itself: both alternate in one process, and their medians are compared; peak memory is
that of a process of its own for each (Linux, VmHWM). ``llama`` is of 12 layers and 768 wide.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import l0prune
from benchmarks.by_turns import Run, seconds
from benchmarks.isolation import resident
from benchmarks.runner import HIDDEN, machine, options, table
from l0prune.capture.capture import capture
from l0prune.infer.build import analyse

SIDES = ("capture", "gate")
SIZES = (100, 1_000, 10_000)


class Block(nn.Module):
    """One residual block of a Llama: grouped-query attention and a gated MLP, RMSNorm before."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        head = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * head, bias=False)
        self.v = nn.Linear(width, groups * head, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        h = self.norm1(x)
        q = _rotated(_heads(self.q(h), self.heads), cos, sin)
        k = _rotated(_heads(self.k(h), self.groups), cos, sin)
        v = _heads(self.v(h), self.groups)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    """A Llama-shaped language model."""

    def __init__(self, layers: int, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(128_256, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 128_256, bias=False)
        half = width // heads // 2
        self.register_buffer("frequency", 500_000.0 ** (-torch.arange(half) / half))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, time) to logits (batch, time, vocabulary)."""
        frequency = torch.cat([self.frequency, self.frequency])
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angle.cos(), angle.sin())
        return self.head(self.norm(x))


def chain(nodes: int) -> nn.Module:
    """Residual convolution blocks that make about as many graph nodes."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), *(_Residual() for _ in range(nodes // 7)))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """One block with a skip connection: three operators, four parameters."""
        return x + self.b(self.a(x))


def sides(name: str) -> dict[str, Run]:
    """Both sides of a network with random weights."""
    torch.manual_seed(0)
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=4, vocab_size=8_000, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        model, args = LlamaForCausalLM(config).eval(), (torch.randint(0, 8_000, (2, 32)),)
    else:
        model, args = torchvision.models.get_model(name).eval(), (torch.randn(2, 3, 224, 224),)

    def gate() -> None:
        l0prune.gate(model, args)
        l0prune.ungate(model)

    return {"capture": lambda: torch.export.export(model, args, strict=False), "gate": gate}


def compare(name: str, repeats: int) -> dict[str, object]:
    """Seconds and peak MiB of both sides, and the ratios that count."""
    both = sides(name)
    for run in both.values():
        run()
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side, run in both.items():
            gc.collect()  # what the other side left behind is not this one's work
            taken[side].append(seconds(run))
    command = [sys.executable, "-m", "benchmarks.planning", "--beside", name, "--memory-of"]
    memory = [int(subprocess.check_output([*command, side])) for side in SIDES]
    medians = [statistics.median(taken[side]) for side in SIDES]
    return {
        "model": name,
        **{f"{side}_s": round(time, 3) for side, time in zip(SIDES, medians, strict=True)},
        "time_ratio": round(medians[1] / medians[0], 3),
        **{f"{side}_peak_mib": peak for side, peak in zip(SIDES, memory, strict=True)},
        "memory_ratio": round(memory[1] / memory[0], 3),
    }


def row(size: int) -> tuple[object, ...]:
    """Time the inference of a chain's axes."""
    model = chain(size).eval()
    start = time.perf_counter()
    captured = capture(model, (torch.randn(2, 3, 16, 16),))
    between = time.perf_counter()
    analyse(captured)
    took, nodes = time.perf_counter() - between, len(captured.graph.nodes)
    return nodes, f"{between - start:.2f}", f"{took:.2f}", f"{1e3 * took / nodes:.3f}"


def main() -> None:
    """Print both tables."""
    given = options(__doc__, layers=80, beside=([str], "models"), repeats=5, memory_of=HIDDEN)
    if given.memory_of:
        sides(given.beside[0])[given.memory_of]()
        # Not getrusage: its maximum includes what the parent held when it started this process.
        return print(round(resident("VmHWM")))
    if given.beside:
        print(machine())
        for name in given.beside:
            print(json.dumps(compare(name, given.repeats)))
        return
    table("graph nodes | torch.export, s | axes, s | axes, ms a node", map(row, SIZES))
    with torch.device("meta"):
        llama = Llama(given.layers, 8192, 64, 8, 28_672).eval()
        tokens = torch.zeros(2, 64, dtype=torch.int64)
    start = time.perf_counter()
    found = l0prune.survey(llama, (tokens,), own_class=False)
    took = time.perf_counter() - start
    peak = resident("VmHWM") / 1024
    print(
        f"Llama of {found.params:,} parameters on the meta device: {len(found.axes)} axes, "
        f"{found.plan.size:,} gates reach {found.reachable('params'):.1%} of the parameters; "
        f"survey {took:.1f} s, peak memory of the process {peak:.2f} GiB"
    )


if __name__ == "__main__":
    main()
