"""What an export costs beside torch.onnx.export itself: CPU seconds and peak memory.

    python -m benchmarks.export [resnet50 vit_b_16 …] [--repeats 3] [--input 2x3x224x224]
    python -m benchmarks.export bert-base qwen3.5
    python -m benchmarks.export unrolled@500 unrolled@2000 unrolled@8000 --repeats 1 --alone

Each network has a process of its own; half of its gates are closed at random. Beside models of
torchvision there are ``bert-base`` with 64 tokens, ``qwen3.5``: four narrow layers of its linear
attention, and ``unrolled@N``: an MLP and a delta rule whose loop over tokens makes about N graph
nodes. With ``--alone`` torch.onnx.export is not run. Printed for each, with the medians of CPU
seconds (a busy machine changes those little):

    nodes                   of torch.export's graph
    survey_s, gate_s        l0prune.survey alone, and l0prune.gate, which surveys, too
    export_s, save_onnx_s   l0prune.export, and its ONNX file
    onnx_s                  torch.onnx.export of the dense original, with a free batch size
    ratio                   (export_s + save_onnx_s) / onnx_s
    gate_ratio              gate_s / capture_s, the seconds of torch.export alone
    weights_mib             the original's weights in float32
    export_peak, save_onnx_peak, onnx_peak, capture_peak
                            most memory held at once, the original's own weights included, as a
                            multiple of them; the last one is torch.export alone (Linux)
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.export import Dim

import l0prune
from benchmarks import isolation
from benchmarks.isolation import ROOT, Row, resident

MODELS = ("resnet50", "vit_b_16", "densenet121")
SIZE = (2, 3, 224, 224)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without torch.onnx.export")
    parser.add_argument("--input", default="x".join(map(str, SIZE)))
    parser.add_argument("--limit", type=int, default=3600, help="CPU seconds for one model")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "export.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        repeats, size, alone, name = options.one.split(":")
        shape = tuple(map(int, size.split("x")))
        isolation.measure(name, steps(name, shape, int(repeats), alone=bool(alone)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    how = f"{options.repeats}:{options.input}:{'alone' if options.alone else ''}"
    isolation.run("benchmarks.export", options.out, how, options.models, options.limit, str)


class Unrolled(nn.Module):
    """An MLP and a delta rule over tokens in a loop of Python, ten operators a token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        keys, values = self.keys(x), self.values(x)
        state = torch.zeros_like(keys[:, 0, :, None] * values[:, 0, None])
        out = torch.zeros_like(values)
        for t in range(x.shape[1]):
            key = keys[:, t]
            change = values[:, t] - (state * key[..., None]).sum(1)
            state = state + key[..., None] * change[:, None]
            out[:, t] = change
        return x + self.mlp(out)


def _language(config: Any) -> tuple[nn.Module, Tensor]:
    from transformers import AutoModel

    config.use_cache = False
    return AutoModel.from_config(config).eval(), torch.randint(5, config.vocab_size, (2, 64))


def _bert_base() -> tuple[nn.Module, Tensor]:
    from transformers import BertConfig

    return _language(BertConfig())


def _qwen() -> tuple[nn.Module, Tensor]:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    return _language(config)


NETWORKS = {"bert-base": _bert_base, "qwen3.5": _qwen}


def build(name: str, size: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    """Return a network with random weights, in eval mode, and its example."""
    torch.manual_seed(0)
    if name.startswith("unrolled@"):
        return Unrolled().eval(), torch.randn(2, int(name.partition("@")[2]) // 12, 16)
    if name in NETWORKS:
        return NETWORKS[name]()
    return torchvision.models.get_model(name).eval(), torch.randn(size)


def steps(name: str, size: tuple[int, ...], repeats: int, *, alone: bool) -> Iterator[Row]:
    """The rounds of one model, after one of a tiny one that loads what is loaded once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        small = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        for _ in one_round(small, torch.randn(2, 4), file):
            pass
        settle()
        floor = resident("VmRSS")
        model, x = build(name, size)
        weights = sum(p.numel() * 4 for p in model.parameters()) / 2**20
        nodes = len(torch.export.export(model, (x,), strict=False).graph.nodes)
        seconds: dict[str, list[float]] = {}
        yield {"step": "rounds", "nodes": nodes, "weights_mib": round(weights, 2)}
        for _ in range(repeats):
            peaks: Row = {}
            for side, used, peak in one_round(model, x, file, alone=alone):
                seconds.setdefault(f"{side}_s", []).append(used)
                peaks[f"{side}_peak"] = round((peak - floor) / weights, 2)
            found = {each: round(statistics.median(of), 2) for each, of in seconds.items()}
            ours = found["export_s"] + found["save_onnx_s"]
            if not alone:
                found |= {"ratio": round(ours / found["onnx_s"], 2)}
            found |= {"gate_ratio": round(found["gate_s"] / found["capture_s"], 2)}
            yield found | peaks


def one_round(
    model: nn.Module, x: Tensor, file: Path, *, alone: bool = False
) -> Iterator[tuple[str, float, float]]:
    """CPU seconds and the most memory (MiB) of each side; the model is as it was afterwards."""
    yield ("capture", *measured(lambda: torch.export.export(model, (x,), strict=False))[1:])
    if not alone:
        yield ("onnx", *measured(lambda: plain_onnx(model, x, file))[1:])
    yield ("survey", *measured(lambda: l0prune.survey(model, (x,)))[1:])
    yield ("gate", *measured(lambda: l0prune.gate(model, (x,)))[1:])
    close_half(model)
    dense, *spent = measured(lambda: l0prune.export(model))
    yield ("export", *spent)
    yield ("save_onnx", *measured(lambda: dense.save_onnx(file, time=False))[1:])
    l0prune.ungate(model)


def plain_onnx(model: nn.Module, x: Tensor, file: Path) -> None:
    torch.onnx.export(
        model, (x,), file, dynamo=True, verbose=False, dynamic_shapes=({0: Dim("batch")},),
        external_data=False,
    )  # fmt: skip


@torch.no_grad()
def close_half(model: nn.Module) -> None:
    """Half of the gates, but never an axis whole; the open ones take fractional values."""
    bank = l0prune.gates(model)
    generator = torch.Generator().manual_seed(0)
    is_closed = torch.rand(bank.plan.size, generator=generator) < 0.5
    for axis in bank.plan.axes:
        is_closed[axis.start] = False
    values = torch.rand(bank.plan.size, generator=generator) * 4 - 1.5
    bank.log_alpha.copy_(torch.where(is_closed, -5.0, values))


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gives, its CPU seconds, and the most memory that was held meanwhile, in MiB."""
    settle()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    start = time.process_time()
    result = work()
    return result, time.process_time() - start, resident("VmHWM")


def settle() -> None:
    """Give back to the system what nobody holds any more, so that it counts for no later step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
