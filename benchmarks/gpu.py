"""All that only a GPU shows, in one run: steps, whole runs, compiling, exports, milliseconds.

Rows run in the order of their worth as long as the minutes last, each in a process of its own, and
print a line of JSON each; what there was no time for is named. ``--tiny`` runs every row on small
networks wherever it is, so that all of it can be tried on a CPU.

    python -m benchmarks.gpu --minutes 9 [--rows step run] [--tiny]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import l0prune

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
Facts = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        minutes: that it takes on a recent GPU, at most; it begins only while so many are left.
    """

    run: Callable[[bool], Iterator[Facts]]
    minutes: float


ROWS: dict[str, Row] = {}


def row(minutes: float) -> Callable[[Callable[[bool], Iterator[Facts]]], None]:
    """Register a row under the function's name."""

    def put(run: Callable[[bool], Iterator[Facts]]) -> None:
        ROWS[run.__name__] = Row(run, minutes)

    return put


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def clock(facts: Facts, name: str) -> Iterator[None]:
    """Note the seconds of a block, with all that it has started on the device, and its peak."""
    synchronize()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    yield
    synchronize()
    facts[f"{name}_s"] = round(time.perf_counter() - begin, 3)
    if DEVICE.type == "cuda":
        facts[f"{name}_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    print(f"  {name}: {facts[f'{name}_s']} s", file=sys.stderr, flush=True)


def image_model(name: str, tiny: bool) -> nn.Module:
    """A torchvision model on the device, in channels_last."""
    torch.manual_seed(0)
    if tiny:
        name = {"resnet50": "resnet18", "vit_b_16": "mobilenet_v2"}.get(name, name)
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=100)
    return model.to(DEVICE, memory_format=torch.channels_last).train()


def images(count: int, size: int) -> tuple[Tensor, Tensor]:
    found = torch.randn(count, 3, size, size, device=DEVICE)
    labels = torch.randint(0, 100, (count,), device=DEVICE)
    return found.contiguous(memory_format=torch.channels_last), labels


def stepper(model: nn.Module, data: tuple[Tensor, Tensor], *, compiled: str = "") -> Any:
    """A training step under autocast, with SGD; of a gated model with the penalty."""
    is_gated = any("l0prune_gates" in name for name, _ in model.named_modules())
    groups = l0prune.param_groups(model) if is_gated else model.parameters()
    optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
    forward = torch.compile(model, mode=compiled) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, DTYPE):
            loss = nn.functional.cross_entropy(forward(data[0]), data[1])
        if is_gated:
            loss = loss + l0prune.penalty(model, 0.1 / 50_000)
        loss.backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None], repeats: int) -> float:
    synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3


def side_by_side(
    steps: dict[str, Callable[[], None]], *, rounds: int, repeats: int, warmup: int
) -> dict[str, float]:
    """Medians of rounds in which the steps alternate, ms."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, repeats))
    return {name: statistics.median(found) for name, found in times.items()}


@row(minutes=1.0)
def step(tiny: bool) -> Iterator[Facts]:
    """A gated step beside a plain one: eager, with gates that learn and that stand."""
    for name, batch, size in (
        ("resnet50", 128, 224),
        ("resnet50", 32, 128),
        ("vit_b_16", 128, 224),
    ):
        plain = image_model(name, tiny)
        data = images(2 if tiny else batch, 32 if tiny else size)
        gated, fixed = (l0prune.gate(copy.deepcopy(plain), (data[0][:2],)) for _ in range(2))
        l0prune.gates(fixed).fixed = True
        models = {"plain": plain, "gated": gated, "fixed": fixed}
        steps = {kind: stepper(model, data) for kind, model in models.items()}
        rounds, repeats = (1, 1) if tiny else (5, 10)
        times = side_by_side(steps, rounds=rounds, repeats=repeats, warmup=3)
        facts: Facts = {"model": name, "batch": batch, "size": size}
        facts |= {f"{kind}_ms": round(ms, 3) for kind, ms in times.items()}
        facts["gated/plain"] = round(times["gated"] / times["plain"], 4)
        facts["fixed/plain"] = round(times["fixed"] / times["plain"], 4)
        peaks: dict[str, Any] = {}
        for kind in ("plain", "gated"):
            with clock(peaks, kind):
                steps[kind]()
        if DEVICE.type == "cuda":
            facts["peak_gated/plain"] = round(peaks["gated_peak_gb"] / peaks["plain_peak_gb"], 4)
        yield facts


@row(minutes=2.5)
def llama(tiny: bool) -> Iterator[Facts]:
    """A decoder of 1.1 billion random weights: gate, score, fit, export."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads, groups = (4, 2) if tiny else (32, 4)
    config = LlamaConfig(
        **sizes, num_attention_heads=heads, num_key_value_heads=groups,
        vocab_size=320 if tiny else 32_000, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(DTYPE).eval()
    facts: Facts = {"params": sum(p.numel() for p in model.parameters())}
    facts["weights_gb"] = round(facts["params"] * 2 / 1e9, 3)
    ids = torch.randint(0, config.vocab_size, (4, 64 if tiny else 512), device=DEVICE)
    batches = [{"input_ids": ids, "labels": ids}]
    with clock(facts, "gate"):
        l0prune.gate(model, (), {"input_ids": ids[:1, :32]})
    with clock(facts, "score"):
        scores = l0prune.score(model, "taylor", batches)
    with clock(facts, "fit"):
        l0prune.fit(model, "params=0.7", scores)
    with clock(facts, "export"):
        dense = l0prune.export(model)
    facts["exact"] = worst(dense)
    facts["left"] = round(dense.params / facts["params"], 4)
    facts["device"] = str(next(dense.module.parameters()).device)
    yield facts


@row(minutes=2.0)
def run(tiny: bool) -> Iterator[Facts]:
    """Whole fine-tuning runs under a budget beside dense training of as many steps."""
    batch, size = (4, 32) if tiny else (64, 160)
    count, epochs = (16, 3) if tiny else (batch * 50, 20)
    data = torch.utils.data.TensorDataset(*(each.cpu() for each in images(count, size)))
    loader = OnDevice(data, batch)
    facts: Facts = {
        "model": "resnet50",
        "batch": batch,
        "size": size,
        "steps": loader.steps * epochs,
    }
    dense = image_model("resnet50", tiny)
    plain = stepper(dense, next(iter(loader)))
    plain()
    with clock(facts, "dense"):
        for _ in range(loader.steps * epochs):
            plain()
    options: Facts = {"epochs": epochs, "autocast": "bf16", "device": DEVICE.type}
    for budget in ("macs=0.25", "macs=0.5"):
        model = l0prune.gate(image_model("resnet50", tiny), (next(iter(loader))[0][:2],))
        with clock(facts, budget):
            l0prune.finetune(model, loader, budget=budget, channels_last=True, **options)
        facts[f"{budget}/dense"] = round(facts[f"{budget}_s"] / facts["dense_s"], 3)
        with clock(facts, f"export {budget}"):
            dense_again = l0prune.export(model)
        facts[f"{budget}_error"] = worst(dense_again)
    yield facts


class OnDevice:
    """Batches of a data set that lies on the device."""

    def __init__(self, data: Any, batch: int) -> None:
        self.dataset = data
        self._data = [each.to(DEVICE) for each in data.tensors]
        self._batch = batch
        self.steps = len(self._data[0]) // batch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for at in range(0, self.steps * self._batch, self._batch):
            yield tuple(each[at : at + self._batch] for each in self._data)


@row(minutes=2.5)
def compiled(tiny: bool) -> Iterator[Facts]:
    """A gated step beside a plain one, compiled; seconds that compiling takes."""
    for mode in ("default",) if DEVICE.type == "cpu" else ("default", "reduce-overhead"):
        plain = image_model("resnet18" if tiny else "resnet50", tiny)
        data = images(2 if tiny else 128, 32 if tiny else 224)
        gated = l0prune.gate(copy.deepcopy(plain), (data[0][:2],))
        steps = {
            k: stepper(m, data, compiled=mode) for k, m in (("plain", plain), ("gated", gated))
        }
        facts: Facts = {"model": "resnet50", "mode": mode}
        for kind, each in steps.items():
            with clock(facts, f"{kind}_first"):
                each()
                each()
        times = side_by_side(steps, rounds=1 if tiny else 5, repeats=1 if tiny else 10, warmup=3)
        facts |= {f"{kind}_ms": round(ms, 3) for kind, ms in times.items()}
        facts["gated/plain"] = round(times["gated"] / times["plain"], 4)
        yield facts


def worst(dense: Any) -> float:
    """Return the largest error of what was compared for an export."""
    return max(check.error for check in dense.certificate.checks)


def about() -> Facts:
    """The machine and the versions."""
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or "cpu"
    return {"device": card, "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--tiny", action="store_true", help="small networks, to try it anywhere")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:  # one row, in this process
        for facts in ROWS[args.rows[0]].run(args.tiny):
            print(json.dumps({"row": args.rows[0], **facts}), flush=True)
        return
    print(json.dumps(about()), flush=True)
    end = time.monotonic() + args.minutes * 60
    for name in args.rows:
        left = end - time.monotonic()
        if left < ROWS[name].minutes * 60:
            print(json.dumps({"row": name, "left_out": f"{left:.0f} s are left"}), flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.gpu", "--rows", name, "--here"]
        command += ["--tiny"] if args.tiny else []
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print(json.dumps({"row": name, "failed": "no time was left"}), flush=True)
            continue
        if done.returncode:
            print(json.dumps({"row": name, "failed": f"exit {done.returncode}"}), flush=True)


if __name__ == "__main__":
    main()
