"""Differences that a file in Q8_0 makes, by cause: its weights, and what llama.cpp rounds besides.

llama.cpp multiplies by a weight in Q8_0 with inputs that it has rounded to eight bits, too, each 32
numbers by their largest. In torch both can be done apart, and with other roundings of the inputs,
up or down at random: what these move is not the file's doing but the network's own sensitivity. One
file is also read by llama.cpp in two ways, each text token by token and at once.

    python -m benchmarks.llama_cpp --tokens 4096 --texts 2 --length 32 --why

prints this, beside the largest error of a weight that is read back from the file in units of half a
step of its block, which is 1 where the writer is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from l0prune.features.gguf.content import content_of

_BLOCK, _MOST = 32, 127
Rounding = Callable[[Tensor], Tensor]


def as_in_the_file(weight: Tensor) -> Tensor:
    """A matrix as the package gguf rounds it: rows of other lengths than blocks are in F16."""
    types = gguf.GGMLQuantizationType
    kind = types.F16 if weight.shape[-1] % _BLOCK else types.Q8_0
    rounded = gguf.quants.quantize(weight.float().contiguous().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(rounded, kind)).view(weight.shape)


def to_nearest(x: Tensor) -> Tensor:
    """Inputs of a product as llama.cpp rounds them."""
    return _in_blocks(x, lambda steps: steps.round())


def at_random(seed: int) -> Rounding:
    """The same, but each number up or down by chance."""
    generator = torch.Generator().manual_seed(seed)

    def rounded(steps: Tensor) -> Tensor:
        return (steps + torch.rand(steps.shape, generator=generator)).floor()

    return lambda x: _in_blocks(x, rounded)


def _in_blocks(x: Tensor, rounded: Rounding) -> Tensor:
    if x.shape[-1] % _BLOCK:
        return x.half().float()
    blocks = x.unflatten(-1, (-1, _BLOCK))
    step = blocks.abs().amax(-1, keepdim=True) / _MOST
    return (rounded(blocks / step.clamp_min(1e-30)) * step.half().float()).flatten(-2)


@torch.no_grad()
def in_eight_bits(module: nn.Module, inputs: Rounding | None) -> nn.Module:
    """A copy with the weights of a file, whose products round their inputs."""
    result = copy.deepcopy(module)
    for parameter in result.parameters():  # each once, tied ones too
        if parameter.ndim == 2:
            parameter.copy_(as_in_the_file(parameter))
    for layer in result.modules():
        if isinstance(layer, nn.Linear) and inputs is not None:
            layer.register_forward_pre_hook(lambda _, given: (inputs(given[0]),))
    return result


@torch.no_grad()
def distributions(model: nn.Module, rows: Tensor) -> Tensor:
    """Logarithms of the probabilities of all tokens, after each token but the last."""
    found: Tensor = model(rows).logits[:, :-1].log_softmax(-1)
    return found


def worst_weight(module: nn.Module, path: Path) -> float:
    """Largest error of a weight in the file, in units of half a step of its block."""
    read = {each.name: each for each in gguf.GGUFReader(path).tensors}
    found = 0.0
    for name, tensor in content_of(module).tensors.items():
        if read[name].tensor_type != gguf.GGMLQuantizationType.Q8_0:
            continue
        stored = gguf.quants.dequantize(read[name].data, read[name].tensor_type)
        exact = tensor.detach().float().unflatten(-1, (-1, _BLOCK))
        error = (torch.from_numpy(stored).view(exact.shape) - exact).abs().amax(-1)
        step = exact.abs().amax(-1) / _MOST
        found = max(found, float((error / (step / 2).clamp_min(1e-30)).max()))
    return found


def print_causes(
    name: str, module: nn.Module, rows: Tensor, path: Path, run: Callable[..., Any], seeds: int = 6
) -> None:
    """Print a row for each cause, and the logarithms of the token that moves most."""
    exact, following = distributions(module, rows), rows[:, 1:, None]
    said = {
        "weights": in_eight_bits(module, None),
        "inputs, too": in_eight_bits(module, to_nearest),
    }
    logs = {which: distributions(model, rows) for which, model in said.items()}
    for seed in range(seeds):
        logs[f"by chance {seed}"] = distributions(in_eight_bits(module, at_random(seed)), rows)
    true = exact.gather(-1, following)[..., 0]
    moved = {which: each.gather(-1, following)[..., 0] for which, each in logs.items()}
    for how, whole in (("token by token", False), ("at once", True)):
        moved[f"llama.cpp, {how}"] = run(path, rows, 0, at_once=whole)[0]
    print(f"{name}: the worst weight in the file is off by {worst_weight(module, path):.3f}")
    print("| Q8_0 | log p: largest, median difference | divergence, nats |\n|---|---|---|")
    for which, each in moved.items():
        apart = (each - true).abs()
        nats = ""
        if which in logs:
            nats = f"{float((exact.exp() * (exact - logs[which])).sum(-1).mean()):.4f}"
        print(f"| {which} | {float(apart.max()):.2f}, {float(apart.median()):.3f} | {nats} |")
    last = moved["llama.cpp, token by token"]
    at = divmod(int((last - true).abs().argmax()), true.shape[1])
    print(f"token {at}: exact {float(true[at]):.2f}; " + "; ".join(
        f"{which} {float(each[at]):.2f}" for which, each in moved.items()
    ), flush=True)  # fmt: skip
