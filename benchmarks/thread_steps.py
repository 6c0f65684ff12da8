"""One network of ``benchmarks.threads``: cut, proven, written, loaded again and timed.

Its gates come to stand as they do in one of the ways of ``PREPARE``: drawn, learned, or learned in
two processes.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import l0prune
from benchmarks import thread_models, threads
from benchmarks.by_turns import Run, in_runtime, in_torch, seconds
from benchmarks.isolation import Row
from benchmarks.reloading import kept_class, loaded_again
from benchmarks.scramble import scramble
from benchmarks.thread_models import Example
from l0prune.exporting.certify.certificate import MODEL
from l0prune.exporting.certify.difference import difference

# Rounds of a comparison of times, the seconds after which no other begins, and how long each of the
# two runs in a round: a process' own time is counted in steps of milliseconds on some machines.
_ROUNDS, _SECONDS, _ROUND_MS = 25, 40, 250


Prepared = tuple[nn.Module, Row]

WORDS, TEXT, TEXTS = 64, 32, 2048


def steps(name: str) -> Iterator[Row]:
    """One network, step by step."""
    of = threads.MODELS[name]
    model, example = built(of)
    yield {"step": "survey"}
    start = time.perf_counter()
    survey = l0prune.survey(model, *example, own_class=False)
    yield {
        "survey_s": round(time.perf_counter() - start, 2),
        "params_share": round(survey.reachable("params"), 4),
        "macs_share": round(survey.reachable("macs"), 4),
        "step": "prepare",
    }
    model, facts = PREPARE[of.prepare](of, model, example)
    yield {**facts, "step": "export"}
    dense = l0prune.export(model)
    yield {
        **figures(dense),
        "params_before": dense.params_before,
        "macs_before": dense.macs_before,
        "macs_after": dense.macs,
        "parts": len({piece.path for piece in dense.pieces}),
        "note": dense.note,
        "step": "onnx",
    }
    with tempfile.TemporaryDirectory() as folder:
        small = dense.save_onnx(Path(folder) / "small.onnx", time=False)
        yield {"onnx": dense.certificate.worst("onnx", "float32"), "step": "reload"}
        how, error, loaded = loaded_again(partial(built, of), dense, Path(folder), example)
        yield {
            "reloaded": how,
            "reloaded_error": error,
            "params_exported": numbers(dense.module),
            "params_loaded": numbers(loaded),
            "step": "time",
        }
        before, _ = built(of)
        args, kwargs = example
        yield times("eager", *(in_torch(each, *args, **kwargs) for each in (before, dense.module)))
        if not dense.in_parts:
            l0prune.gate(before, *example)
            large = l0prune.export(before).save_onnx(Path(folder) / "large.onnx", time=False)
            yield times("ort", *(in_runtime(files[0], example) for files in (large, small)))


def figures(dense: l0prune.Export) -> Row:
    """What is left, its error, and whether it is of its own class."""
    error, kept = dense.certificate.worst(MODEL, "float64"), kept_class(dense)
    return {"params_after": dense.params, "float64": error, "class": kept}


def built(of: threads.Model) -> thread_models.Built:
    """The network with the same weights each time, in eval mode."""
    torch.manual_seed(0)
    model, example = of.build()
    return model.eval(), example


def numbers(model: nn.Module) -> int:
    """How many its parameters hold, also those that eval mode does not use."""
    return sum(parameter.numel() for parameter in model.parameters())


def times(what: str, before: Run, after: Run) -> Row:
    """Milliseconds of CPU time, the two by turns: medians, and the median of their ratios."""
    counts = []
    for run in (before, after):
        run()
        counts.append(max(1, round(_ROUND_MS / 1e3 / seconds(run))))
    taken, begin = [], time.perf_counter()
    while len(taken) < _ROUNDS and time.perf_counter() - begin < _SECONDS:
        taken.append([cpu_ms(*each) for each in zip((before, after), counts, strict=True)])
    first, second = (median(column) for column in zip(*taken, strict=True))
    return {
        f"{what}_before_ms": round(first, 3),
        f"{what}_after_ms": round(second, 3),
        f"{what}_times": round(median(a / b for a, b in taken), 2),
    }


def cpu_ms(run: Run, count: int) -> float:
    """Of one run. What others do on the machine counts little: it is the process' own time."""
    start = time.process_time()
    for _ in range(count):
        run()
    return 1e3 * (time.process_time() - start) / count


def scrambled(of: threads.Model, model: nn.Module, example: Example) -> Prepared:
    """Gates closed at random, widths rounded."""
    scramble(
        model, example, closed=of.closed, round_to=of.round_to, evenly=of.evenly, exclude=of.exclude
    )
    return model, {}


def beside_8b(of: threads.Model, model: nn.Module, example: Example) -> Prepared:
    """The same, and how long the survey of Qwen3-8B takes, of whose weights it needs none."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(config)
        inputs = {"input_ids": torch.zeros(2, 64, dtype=torch.int64)}
    start = time.perf_counter()
    survey = l0prune.survey(large.eval(), (), inputs, own_class=False)
    facts = {
        "large_s": round(time.perf_counter() - start, 1),
        "large_params": survey.params,
        "large_share": survey.reachable("params"),
    }
    return scrambled(of, model, example)[0], facts


@torch.no_grad()
def restored(of: threads.Model, model: nn.Module, example: Example) -> Prepared:
    """The same, and then put into another network from a file, as after a restart."""
    scramble(model, example, closed=of.closed, round_to=of.round_to)
    again, _ = of.build()
    l0prune.gate(again.eval(), *example)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        torch.save(model.state_dict(), file)
        again.load_state_dict(torch.load(file, weights_only=True))
    args, kwargs = example
    return again, {"restored_error": difference(model(*args, **kwargs), again(*args, **kwargs))}


def learned(of: threads.Model, model: nn.Module, example: Example) -> Prepared:
    """A language model, trained, then brought to half its width: at once, and by its gates."""
    texts, unseen = made_up(TEXTS, seed=1), made_up(256, seed=2)
    data = [(batch, batch) for batch in texts.split(32)], [(unseen, unseen)]
    quiet = {"loss": next_word, "metric": next_word, "progress": False, "device": "cpu"}
    l0prune.train_dense(model, data, epochs=6, lr=2e-3, **quiet)
    losses = {"dense": loss_of(model, unseen)}

    l0prune.gate(model, *example)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    budget = {"params": 0.27}  # half the width
    l0prune.fit(model, budget, l0prune.score(model, "magnitude"), round_to=of.round_to)
    losses["cut at once"] = loss_of(model, unseen)
    model.load_state_dict(dense)
    l0prune.finetune(model, data, budget=budget, round_to=of.round_to, epochs=10, lr=2e-3, **quiet)
    losses["learned"] = loss_of(model, unseen)
    return model.eval(), {"losses": {"uniform guess": math.log(WORDS), **losses}}


def made_up(count: int, seed: int) -> Tensor:
    """Texts of a made-up language, where each word allows for four others; ``(count, TEXT)``."""
    rules = torch.Generator().manual_seed(0)
    draw = torch.Generator().manual_seed(seed)
    follow = torch.randint(1, WORDS, (WORDS, 4), generator=rules)
    texts = torch.randint(1, WORDS, (count, 1), generator=draw)
    for _ in range(TEXT - 1):
        picked = torch.multinomial(
            torch.tensor([0.7, 0.2, 0.07, 0.03]), count, True, generator=draw
        )
        texts = torch.cat([texts, follow[texts[:, -1], picked][:, None]], 1)
    return texts


def next_word(outputs: object, texts: Tensor) -> Tensor:
    """Cross-entropy of the word that follows."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits  # type: ignore[attr-defined]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten())


@torch.no_grad()
def loss_of(model: nn.Module, texts: Tensor) -> float:
    """On texts that it has not seen."""
    return round(float(next_word(model.eval()(texts), texts)), 3)


def in_ddp(of: threads.Model, model: nn.Module, example: Example) -> Prepared:
    """Trained by two processes, each by a loop of its own around DistributedDataParallel."""
    l0prune.gate(model, *example)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder) / "gated.pt")
        torch.multiprocessing.spawn(_process, (folder, of.round_to), nprocs=2)
        states = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]
    apart = max(
        float((a.double() - b.double()).abs().max())
        for (name, a), b in zip(states[0].items(), states[1].values(), strict=True)
        if "running" not in name  # each process normalises its own examples
    )
    model.load_state_dict(states[0])
    return model.eval(), {"processes_apart": apart}


def _process(rank: int, folder: str, round_to: int, steps: int = 40) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = torch.load(f"{folder}/gated.pt", weights_only=False).train()
    around = DistributedDataParallel(model)
    pruner = l0prune.Pruner(
        model, budget="macs=0.3", steps=steps, round_to=round_to, gate_lr=0.3, say=lambda _: None
    )
    optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-3))
    torch.manual_seed(rank)
    for _ in range(steps):
        targets = torch.randint(0, 10, (8,))
        images = torch.randn(8, 3, 32, 32) + targets.view(-1, 1, 1, 1) / 10
        F.cross_entropy(around(images), targets).backward()
        pruner.before_step(optimizer)
        optimizer.step()
        pruner.after_step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


PREPARE: dict[str, Callable[[threads.Model, nn.Module, Example], Prepared]] = {
    "scrambled": scrambled,
    "beside_8b": beside_8b,
    "restored": restored,
    "learned": learned,
    "in_ddp": in_ddp,
}
