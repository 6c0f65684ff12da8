"""Time and peak memory of ``gate`` beside torch.export itself, in one run.

    python -m benchmarks.capture [--models resnet50 vit_b_16 densenet121 llama] [--repeats 5]

``llama`` is one of 12 layers and 768 wide. Times alternate between torch.export and ``gate`` (which
surveys, and tries its plan) in one process and are compared by their
medians. Peak memory is that of a process of its own for each side (Linux, VmHWM).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torchvision

import l0prune
from benchmarks.isolation import resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["resnet50", "vit_b_16", "llama", "densenet121"]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-of", choices=["capture", "gate"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(peak_memory(options.models[0], options.memory_of))
        return
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, medians of {options.repeats}")
    for name in options.models:
        print(json.dumps(compare(name, options.repeats)))


def build(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=4, vocab_size=8_000, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval(), (torch.randint(0, 8_000, (2, 32)),)
    return torchvision.models.get_model(name).eval(), (torch.randn(2, 3, 224, 224),)


def plain(model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    torch.export.export(model, args, strict=False)


def gate(model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    l0prune.gate(model, args)
    l0prune.ungate(model)


def compare(name: str, repeats: int) -> dict[str, object]:
    """Seconds and peak MiB of both sides, and the ratios that count."""
    model, args = build(name)
    seconds: dict[str, list[float]] = {"capture": [], "gate": []}
    plain(model, args)
    gate(model, args)
    for _ in range(repeats):
        seconds["capture"].append(timed(lambda: plain(model, args)))
        seconds["gate"].append(timed(lambda: gate(model, args)))
    memory = {side: measured_memory(name, side) for side in seconds}
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {
        "model": name,
        "capture_s": round(medians["capture"], 3),
        "gate_s": round(medians["gate"], 3),
        "time_ratio": round(medians["gate"] / medians["capture"], 3),
        "capture_peak_mib": memory["capture"],
        "gate_peak_mib": memory["gate"],
        "memory_ratio": round(memory["gate"] / memory["capture"], 3),
    }


def timed(function: Callable[[], None]) -> float:
    gc.collect()  # what the other side left behind is not this one's work
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measured_memory(name: str, side: str) -> int:
    command = [sys.executable, "-m", "benchmarks.capture", "--models", name, "--memory-of", side]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_memory(name: str, side: str) -> int:
    model, args = build(name)
    (plain if side == "capture" else gate)(model, args)
    # Not getrusage: its maximum includes what the parent held when it started this process.
    return round(resident("VmHWM"))


if __name__ == "__main__":
    main()
