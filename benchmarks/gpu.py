"""All that only a GPU shows, in one run: steps, whole runs, compiling, exports, milliseconds.

Rows run in the order of ``ROWS`` as long as the minutes last, each in a process of its own, and
print a line of JSON each; what there was no time for is named. ``--tiny`` runs every row on small
networks wherever it is, so that all of it can be tried on a CPU.

    python -m benchmarks.gpu --minutes 9 [--rows step run] [--tiny]
"""

from __future__ import annotations

import copy
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import l0prune
from benchmarks.isolation import ROOT
from benchmarks.runner import Some, options
from benchmarks.step import stepper as any_stepper
from l0prune.exporting.onnx import collect
from l0prune.features.latency.eager import Eager

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
Facts = dict[str, Any]


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
    return any_stepper(
        model,
        *data,
        0.1 / 50_000,
        make=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        context=partial(torch.autocast, DEVICE.type, DTYPE),
        run=torch.compile(model, mode=compiled) if compiled else None,
    )


def milliseconds(step: Callable[[], None], repeats: int) -> float:
    synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3


def side_by_side(steps: dict[str, Callable[[], None]], tiny: bool) -> dict[str, float]:
    """Medians of rounds in which the steps alternate, ms."""
    rounds, repeats = (1, 1) if tiny else (5, 10)
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, repeats))
    return {name: statistics.median(found) for name, found in times.items()}


def step(tiny: bool) -> Iterator[Facts]:
    """A gated step beside a plain one: eager, with gates that learn and that stand."""
    cases = ("resnet50", 128, 224), ("resnet50", 32, 128), ("vit_b_16", 128, 224)
    for name, batch, size in cases:
        plain = image_model(name, tiny)
        data = images(2 if tiny else batch, 32 if tiny else size)
        gated, fixed = (l0prune.gate(copy.deepcopy(plain), (data[0][:2],)) for _ in range(2))
        l0prune.gates(fixed).fixed = True
        models = {"plain": plain, "gated": gated, "fixed": fixed}
        steps = {kind: stepper(model, data) for kind, model in models.items()}
        times = side_by_side(steps, tiny)
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


def llama(tiny: bool) -> Iterator[Facts]:
    """A decoder of 1.1 billion random weights: gate, score, fit, export."""
    yield _cut_decoder(tiny, hidden=2048, inner=5632, layers=22, heads=32, groups=4)


def seven(tiny: bool) -> Iterator[Facts]:
    """The same of 6.7 billion, shaped like Llama 2."""
    yield _cut_decoder(tiny, hidden=4096, inner=11008, layers=32, heads=32, groups=32)


def _decoder(tiny: bool, hidden: int, inner: int, layers: int, heads: int, groups: int) -> Any:
    """A decoder of random weights in bfloat16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    if tiny:
        hidden, inner, layers, heads, groups = 64, 176, 2, 4, 2
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, vocab_size=320 if tiny else 32_000,
        use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()


def _cut_decoder(tiny: bool, **sizes: int) -> Facts:
    model = _decoder(tiny, **sizes)
    facts: Facts = {"params": sum(p.numel() for p in model.parameters())}
    facts["weights_gb"] = round(facts["params"] * 2 / 1e9, 3)
    ids = torch.randint(0, model.config.vocab_size, (4, 64 if tiny else 512), device=DEVICE)
    batches = [{"input_ids": ids, "labels": ids}]
    with clock(facts, "gate"):
        l0prune.gate(model, (), {"input_ids": ids[:1, :32]})
    with clock(facts, "score"):
        scores = l0prune.score(model, "taylor", batches)
    with clock(facts, "fit"):
        l0prune.fit(model, "params=0.7", scores)
    with clock(facts, "export"):
        small = l0prune.export(model)
    facts["exact"] = worst(small)
    facts["left"] = round(small.params / facts["params"], 4)
    facts["device"] = str(next(small.module.parameters()).device)
    return facts


def shrink(tiny: bool) -> Iterator[Facts]:
    """The decoder of 1.1 billion weights shrunk by ids alone: divided and compensated."""
    model = _decoder(tiny, hidden=2048, inner=5632, layers=22, heads=32, groups=4)
    facts: Facts = {"params": sum(p.numel() for p in model.parameters())}
    windows, length = (4, 64) if tiny else (64, 1024)
    ids = torch.randint(0, model.config.vocab_size, (windows, length), device=DEVICE)
    with clock(facts, "shrink"):
        dense = l0prune.shrink(model, [{"input_ids": each[None]} for each in ids], "params=0.7")
    facts["left"] = round(dense.params / facts["params"], 4)
    facts["exact"] = worst(dense)
    yield facts


def times(tiny: bool) -> Iterator[Facts]:
    """Milliseconds of inference: the host's part of them, and a budget in those of the device."""
    batch, size = (2, 32) if tiny else (64, 224)
    model = image_model("resnet50", tiny).to(DTYPE).eval()
    example = images(batch, size)[0].to(DTYPE)
    runtime = Eager(DEVICE.type, 1)
    for examples in (example[:1], example):
        with torch.no_grad():
            part = runtime.host_part(lambda given=examples: model(given))
        yield {"batch": len(examples), "host_part": round(part, 3)}
    name, samples = ("cuda-graph", 24) if DEVICE.type == "cuda" else ("eager", 12)
    facts: Facts = {"model": "resnet50", "batch": batch, "size": size, "runtime": name}
    l0prune.gate(model, (example,))
    with clock(facts, "measure"):
        table = l0prune.measure(model, 1, batch, name, DEVICE.type, samples=samples)
    facts |= {"dense_ms": round(table.dense, 3), "median_error": round(table.quality.median, 4)}
    facts |= {"noise": round(table.quality.noise, 4)}
    scores = l0prune.score(model, "magnitude")
    for budget in ("latency=0.7", "latency=0.5"):
        l0prune.fit(model, budget, scores, latency=table)
        observed = table.of(l0prune.gates(model).plan).observed(model)
        facts[f"{budget}_ms"] = round(observed, 3)
    yield facts


def run(tiny: bool) -> Iterator[Facts]:
    """A whole fine-tuning run under a budget beside dense training of as many steps."""
    batch, size = (4, 32) if tiny else (256, 160)  # as large that no step waits for the host
    count, epochs = (16, 3) if tiny else (batch * 50, 20)
    data = TensorDataset(*(each.cpu() for each in images(count, size)))
    loader = OnDevice(data, batch)
    facts: Facts = {"model": "resnet50", "batch": batch, "size": size}
    facts["steps"] = loader.steps * epochs
    dense = image_model("resnet50", tiny)
    plain = stepper(dense, next(iter(loader)))
    plain()
    with clock(facts, "dense"):
        for _ in range(loader.steps * epochs):
            plain()
    how: Facts = {"epochs": epochs, "autocast": "bf16", "device": DEVICE.type}
    budget, (images_of_one, _) = "macs=0.3", next(iter(loader))
    model = l0prune.gate(image_model("resnet50", tiny), (images_of_one[:2],))
    with clock(facts, budget):
        l0prune.finetune(model, loader, budget=budget, channels_last=True, **how)
    facts[f"{budget}/dense"] = round(facts[f"{budget}_s"] / facts["dense_s"], 3)
    with clock(facts, f"export {budget}"):
        small = l0prune.export(model)
    yield facts | {f"{budget}_error": worst(small)}


def speed(tiny: bool) -> Iterator[Facts]:
    """Twice as fast on the card in bfloat16, by one-shot scores: asked, and what was got."""
    batch, size = (2, 32) if tiny else (64, 224)
    target = "torch-cuda-bf16" if DEVICE.type == "cuda" else "onnxruntime"
    for name in ("resnet50", "mobilenet_v2"):
        model = image_model(name, tiny).float().eval()
        example = images(batch, size)[0]
        l0prune.gate(model, (example,))
        facts: Facts = {"model": name, "batch": batch, "size": size, "target": target}
        runtime = {"runtime": target, "providers": DEVICE.type} if DEVICE.type == "cuda" else {}
        with clock(facts, "measure"):
            table = l0prune.measure(model, 1, batch, **runtime)
        scores = l0prune.score(model, "group-magnitude")
        l0prune.fit(model, "speed=2", scores, latency=table, target=target)
        observed = table.of(l0prune.gates(model).plan).observed(model)
        facts |= {"dense_ms": round(table.dense, 3), "cut_ms": round(observed, 3)}
        facts["times_as_fast"] = round(table.dense / observed, 3)
        small = l0prune.export(model)
        yield facts | {"macs": round(small.macs / small.macs_before, 3)}


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


def compiled(tiny: bool) -> Iterator[Facts]:
    """A gated step beside a plain one, compiled; seconds that compiling takes."""
    modes = ("default",) if DEVICE.type == "cpu" else ("default", "reduce-overhead")
    for name, mode in ((name, mode) for mode in modes for name in ("resnet50", "vit_b_16")):
        plain = image_model(name, tiny)
        data = images(2 if tiny else 128, 32 if tiny else 224)
        gated = l0prune.gate(copy.deepcopy(plain), (data[0][:2],))
        models = {"plain": plain, "gated": gated}
        steps = {kind: stepper(each, data, compiled=mode) for kind, each in models.items()}
        facts: Facts = {"model": name, "mode": mode}
        for kind, each in steps.items():
            with clock(facts, f"{kind}_first"):
                each()
                each()
        times = side_by_side(steps, tiny)
        facts |= {f"{kind}_ms": round(ms, 3) for kind, ms in times.items()}
        facts["gated/plain"] = round(times["gated"] / times["plain"], 4)
        facts |= {f"{kind}_kernels": kernels_of(each) for kind, each in steps.items()}
        yield facts


def kernels_of(step: Callable[[], None]) -> Facts:
    """Profile a step: launches and milliseconds of all kernels, the eight that take most, and
    those that multiply gated weights.
    """
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        step()
        synchronize()
    on_device = [each for each in found.key_averages() if each.self_device_time_total]
    on_device.sort(key=lambda each: -each.self_device_time_total)
    rows = [(e.key[:60], e.count, round(e.self_device_time_total / 1e3, 3)) for e in on_device]
    return {
        "launches": sum(count for _, count, _ in rows),
        "ms": round(sum(ms for _, _, ms in rows), 3),
        "most": rows[:8],
        "gates": [row for row in rows if row[0] in ("_multiply", "_differentiate", "_add_up")],
    }


# Tests of what failed on a card once: a table on a GPU, equality to the bit, a resumed run,
# penalties of a model that was moved, one operator for all products.
ONCE_FAILED = (
    "tests/features/latency/test_measure.py", "tests/features/latency/test_preferred.py",
    "tests/training/test_pruner.py", "tests/training/test_resume.py",
    "tests/training/test_penalty.py", "tests/training/test_finetune_device.py",
    "tests/gating/test_products.py", "tests/gating/test_compiled_products.py",
)  # fmt: skip


def failed(tiny: bool) -> Iterator[Facts]:
    """The tests that failed on a card once."""
    yield from _tests(ONCE_FAILED[-1:] if tiny else ONCE_FAILED)


def suite(tiny: bool) -> Iterator[Facts]:
    """The test suite where a GPU is."""
    yield from _tests(["tests/gating/test_multiplying.py"] if tiny else ["tests"])


def _tests(paths: Iterable[str]) -> Iterator[Facts]:
    """Name what fails as soon as it does, and count the rest."""
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-n", "12", *paths]
    counts: Counter[str] = Counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            said = re.search(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+)", line)
            if said is None:
                continue
            counts[said[1]] += 1
            if said[1] in ("FAILED", "ERROR"):
                yield {"failed": said[2]}
    yield dict(counts)


class Varied(OnDevice):
    """Images that are shifted by up to four pixels, mirrored and shuffled, on their device."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        inputs, targets = self._data
        height, width = inputs.shape[2:]
        padded = nn.functional.pad(inputs, (4, 4, 4, 4))
        for which in torch.randperm(len(inputs), device=DEVICE).split(self._batch)[: self.steps]:
            down, right = (torch.randint(9, (len(which), 1), device=DEVICE) for _ in range(2))
            rows = down + torch.arange(height, device=DEVICE)
            columns = right + torch.arange(width, device=DEVICE)
            is_mirrored = torch.rand(len(which), 1, device=DEVICE) < 0.5
            columns = torch.where(is_mirrored, columns.flip(1), columns)
            at = (which[:, None, None], slice(None), rows[:, :, None], columns[:, None])
            yield padded[at].permute(0, 3, 1, 2), targets[which]


def one_cycle(done: float) -> float:
    """Factor of the rate: up to 1 in the first fifth of the steps, then down to 0."""
    return done / 0.2 if done < 0.2 else (1 - done) / 0.8


def wide(tiny: bool) -> Iterator[Facts]:
    """The paper's Table 2 in few epochs: Wide ResNet 28-10 with dropout, and with gates.

    One cycle of the rate, batches of 500 that lie on the device. Gates are where dropout is, on
    what the second convolution of a block reads (``recipes/cifar-wrn.toml``).
    """
    if "L0PRUNE_DATA" not in os.environ:
        yield {"left_out": "$L0PRUNE_DATA names no folder with cifar10-jpeg"}
        return
    data = l0prune.load_data("cifar10")
    train, test = ([part.inputs, part.targets] for part in (data.train, data.test))
    examples, batch, epochs = (64, 16, 3) if tiny else (50_000, 500, 10)
    settings: Facts = {
        "epochs": epochs, "optimizer": "sgd", "lr": 0.2, "schedule": one_cycle,
        "weight_decay": 5e-4, "autocast": "bf16", "channels_last": True, "device": DEVICE.type,
    }  # fmt: skip
    for lam in (None, 0.001, 0.002):
        torch.manual_seed(0)
        model = l0prune.load_model(f"{ROOT / 'recipes' / 'vision.py'}:wrn28_10").to(DEVICE)
        if tiny:
            for stage in ("layer1", "layer2", "layer3"):
                setattr(model, stage, getattr(model, stage)[:1])
        loader = Varied(TensorDataset(*(each[:examples] for each in train)), batch)
        held_out = OnDevice(TensorDataset(*(each[: examples // 5] for each in test)), batch // 2)
        both = (loader, held_out)
        facts: Facts = {"lam": f"{lam}/N", "epochs": epochs, "examples": examples, "batch": batch}
        if lam is None:
            for block in (*model.layer1, *model.layer2, *model.layer3):
                block.conv2 = nn.Sequential(nn.Dropout(0.3), block.conv2)
            with clock(facts, "training"):
                l0prune.train_dense(model, both, **settings)
        else:
            l0prune.gate(
                model, (train[0][:2].to(DEVICE),), include=["layer*.conv1"],
                open_probability=0.92026, branches=False,
            )  # fmt: skip
            with clock(facts, "training"):
                history = l0prune.finetune(
                    model, both, lam=lam / examples, counting="groups", warmup=0, settle=2,
                    **settings,
                )  # fmt: skip
            facts["expected_macs"] = [
                round(each["expected_macs"] / each["dense_macs"], 4) for each in history.records
            ]
            facts["training_macs"] = round(history.records[-1]["training_macs"], 4)
            model = l0prune.export(model).module
        facts["macs"] = round(l0prune.survey(model, (train[0][:2],)).macs / 1e9, 4)
        facts["error"] = l0prune.evaluate(model, both, device=DEVICE.type)["error"]
        yield facts


ROWS: dict[Callable[[bool], Iterator[Facts]], float] = {
    compiled: 2.0, failed: 1.5, run: 1.5, speed: 2.0, llama: 1.5, shrink: 2.0, wide: 4.0, step: 1.0,
    times: 2.0, seven: 1.5, suite: 2.5,
}  # fmt: skip
"""Minutes that a row takes on a recent GPU, at most; it begins only while so many are left.

What no card has shown yet comes first.
"""
ORDER = {row.__name__: row for row in ROWS}


def worst(dense: Any) -> float:
    """Return the largest error of what was compared for an export."""
    return max(check.error for check in dense.certificate.checks)


def main() -> None:
    args = options(
        __doc__, threads=None, minutes=9.0, rows=Some(ORDER), here=(False, SUPPRESS),
        tiny=(False, "small networks, to try it anywhere"),
    )  # fmt: skip
    if args.here:  # one row, in this process
        for facts in ORDER[args.rows[0]](args.tiny):
            print(json.dumps({"row": args.rows[0], **facts}), flush=True)
        return
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else collect.processor()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"device": card, **versions}), flush=True)
    end = time.monotonic() + args.minutes * 60
    for name in args.rows:
        left = end - time.monotonic()
        if left < ROWS[ORDER[name]] * 60:
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
