"""What subnormal weights cost: a file of the network as it was trained beside ours of the same.

A ResNet-18 in which two thirds of the weights have decayed to 1e-39, as weight decay leaves them
that no gradient reaches any more. All gates are open, so that both files have the same sizes; ours
has zeros in their place. ONNX Runtime and PyTorch, one CPU thread, alternating; medians.

    python -m benchmarks.subnormal [--rounds 20]
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path

import onnxruntime
import torch
import torchvision
from torch import nn

import l0prune
from benchmarks.by_turns import compared, in_runtime, in_torch

LEFT = 3  # every third weight is of ordinary size


def decayed() -> nn.Module:
    """The network; of its parameters of more than one dim two thirds are subnormal."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                is_left = torch.arange(parameter.numel()) % LEFT == 0
                parameter.mul_(torch.where(is_left, 1.0, 1e-38).view_as(parameter))
    return model


def processor() -> str:
    """Its name, where Linux tells it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    facts = {
        key.strip(): value.strip() for key, _, value in (each.partition(":") for each in lines)
    }
    numbers = f"family {facts.get('cpu family')}, model {facts.get('model')}"
    return f"{facts.get('model name', platform.processor())} ({numbers})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    model, x = decayed(), torch.randn(2, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder:
        plain, ours = Path(folder) / "plain.onnx", Path(folder) / "ours.onnx"
        torch.onnx.export(model, (x,), plain, verbose=False, external_data=False)
        l0prune.gate(model, (x,))
        l0prune.gates(model).log_alpha.data.fill_(5.0)
        small = l0prune.export(model)
        small.save_onnx(ours, time=False)
        l0prune.ungate(model)
        ways = {
            "ONNX Runtime": (in_runtime(plain, x), in_runtime(ours, x)),
            "PyTorch": (in_torch(model, x), in_torch(small.module, x)),
        }
        print(f"{processor()}; torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}")
        for way, runs in ways.items():
            before, after, ratio = compared(*runs, rounds)
            print(f"{way}: subnormal {before:.1f} ms, flushed {after:.1f} ms: {ratio:.2f}")


if __name__ == "__main__":
    main()
