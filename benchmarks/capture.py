"""Time and peak memory of ``gate`` beside torch.export itself, in one run.

    python -m benchmarks.capture [--models resnet50 vit_b_16 densenet121 llama] [--repeats 5]

``llama`` is one of 12 layers and 768 wide. Times alternate between torch.export and ``gate`` (which
surveys, and tries its plan) in one process and are compared by their
medians. Peak memory is that of a process of its own for each side (Linux, VmHWM).
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
from argparse import SUPPRESS

import torch
import torchvision

import l0prune
from benchmarks.by_turns import Run, seconds
from benchmarks.isolation import resident
from benchmarks.runner import options

SIDES = ("capture", "gate")


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
    command = [sys.executable, "-m", "benchmarks.capture", "--models", name, "--memory-of"]
    memory = [int(subprocess.check_output([*command, side])) for side in SIDES]
    medians = [statistics.median(taken[side]) for side in SIDES]
    return {
        "model": name,
        **{f"{side}_s": round(time, 3) for side, time in zip(SIDES, medians, strict=True)},
        "time_ratio": round(medians[1] / medians[0], 3),
        **{f"{side}_peak_mib": peak for side, peak in zip(SIDES, memory, strict=True)},
        "memory_ratio": round(memory[1] / memory[0], 3),
    }


def main() -> None:
    models = ["resnet50", "vit_b_16", "llama", "densenet121"]
    given = options(__doc__, threads=None, models=models, repeats=5, memory_of=(str, SUPPRESS))
    if given.memory_of:
        sides(given.models[0])[given.memory_of]()
        # Not getrusage: its maximum includes what the parent held when it started this process.
        return print(round(resident("VmHWM")))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.repeats} repeats")
    for name in given.models:
        print(json.dumps(compare(name, given.repeats)))


if __name__ == "__main__":
    main()
