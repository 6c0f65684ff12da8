"""Memory and time from gates to a folder that transformers loads, of a Llama with random weights.

    python -m benchmarks.held [--width 2048] [--layers 22] [--dtype bfloat16] [--budget params=0.5]

2048 wide and of 22 layers it has 1.1 billion parameters, 1024 wide and of 12 layers 158 million.
Printed for each step: its CPU seconds, and the most memory that the process held meanwhile beside
the weights and what it held before there was a model, as a multiple of the weights (Linux).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import l0prune
from benchmarks.export import measured, settle
from benchmarks.isolation import resident


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--budget", default="params=0.5")
    asked = parser.parse_args()
    run_all(asked.width, asked.layers, getattr(torch, asked.dtype), asked.budget)


def run_all(width: int, layers: int, dtype: torch.dtype, budget: str) -> None:
    """Run and print all steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = LlamaForCausalLM(_config(LlamaConfig, 64, 1)).eval()  # loads what is loaded once
    l0prune.export(l0prune.gate(tiny, torch.zeros(2, 8, dtype=torch.long)))
    settle()
    floor = resident("VmRSS")
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(_config(LlamaConfig, width, layers)).eval()
    torch.set_default_dtype(torch.float32)
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {weights:,.0f} MiB")
    ids = torch.randint(256, (2, 8))

    def step(name: str, work: Callable[[], Any]) -> Any:
        result, seconds, peak = measured(work)
        print(f"{name:<16} {seconds:8.1f} s {(peak - floor) / weights - 1:6.2f}", flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        step("gate", lambda: l0prune.gate(model, ids, loadable_by="transformers"))
        scores = step("score", lambda: l0prune.score(model, "magnitude"))
        step("fit", lambda: l0prune.fit(model, budget, scores))
        small = step("export", lambda: l0prune.export(model))
        step("save_pretrained", lambda: small.save_pretrained(f"{folder}/small"))
    print(f"{small.params:,} parameters left")


def _config(kind: Any, width: int, layers: int) -> Any:
    return kind(
        vocab_size=2 * width, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=width // 32,
        num_key_value_heads=width // 64, max_position_embeddings=64,
    )  # fmt: skip


if __name__ == "__main__":
    main()
