"""One network of ``benchmarks.reports``: cut, proven, written and loaded again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import nn

import l0prune
from benchmarks.isolation import Row
from benchmarks.reloading import answer, loaded_again
from benchmarks.reports import REPORTS, Report
from benchmarks.scramble import randomise, scramble
from benchmarks.thread_models import Built, Example
from benchmarks.thread_steps import figures, numbers
from l0prune.exporting.certify.difference import difference


def steps(name: str) -> Iterator[Row]:
    """One report's network, step by step."""
    of = REPORTS[name]
    with tempfile.TemporaryDirectory() as folder:
        how = fewer_experts if of.run == "fewer_experts" else cut
        yield from how(of, Path(folder))


def built(of: Report, folder: Path) -> Built:
    """The network with the same weights each time, in eval mode."""
    torch.manual_seed(0)
    model, example = of.build(folder)
    return model.eval(), example


def cut(of: Report, folder: Path) -> Iterator[Row]:
    """Gates closed, exported, written and read again."""
    model, example = built(of, folder)
    yield {"step": "cut"}
    model = PREPARE[of.run](of, model, example)
    small = l0prune.export(model)
    before = numbers(built(of, folder)[0])
    yield {"params_before": before, **figures(small), "step": "onnx"}
    small.save_onnx(folder / "small.onnx", time=False)
    errors = [small.certificate.worst("onnx", each) for each in ("float32", "float16")]
    yield {"onnx": max(e for e in errors if e is not None), "step": "reload"}
    how, error, loaded = loaded_again(partial(built, of, folder), small, folder, example)
    yield {"loaded_by": how, "loaded_error": error, "step": "also"}
    if of.also:
        yield {"also": ALSO[of.also](model, small, loaded, folder)}


def fewer_experts(of: Report, folder: Path) -> Iterator[Row]:
    """Experts chosen by REAP, the folder read by transformers alone."""
    model, (_, inputs) = built(of, folder)
    yield {"step": "cut"}
    result = l0prune.shrink_experts(model, inputs["input_ids"], score="reap", **of.options)
    exact = [check.error for check in result.checks if check.dtype == "float64"]
    yield {
        "params_before": result.params_before,
        "params_after": result.params,
        "float64": max(exact),
        "class": "yes",
        "step": "reload",
    }
    result.save(folder / "small")
    loaded = type(model).from_pretrained(folder / "small").eval()  # type: ignore[attr-defined]
    found, expected = (answer(each, ((), inputs)) for each in (loaded, result.model))
    yield {"loaded_by": "transformers", "loaded_error": difference(expected, found)}


def scrambled(of: Report, model: nn.Module, example: Example) -> nn.Module:
    """Half of the gates closed at random, the others between 0 and 1."""
    free = getattr(model, "free", None)
    return scramble(model, example, **({"dynamic_shapes": free} if free else {}), **of.options)


GIVEN = {"hidden_size": 48, "intermediate_size": 88, "num_attention_heads": 6}
GIVEN |= {"num_key_value_heads": 6, "head_dim": 8}


def sized(of: Report, model: nn.Module, example: Example) -> nn.Module:
    """The widths that are given, by budgets."""
    randomise(model)
    l0prune.gate(model, *example, loadable_by="transformers", branches=False)
    budget = ["heads=6"]
    for axis in l0prune.gates(model).axes:
        kinds = {"head": None, "head_dim": "100%", "branch": None}
        width = kinds.get(axis.kind, {64: 48, 128: 88}.get(axis.size))
        budget += [f"{axis.name}: width={width}"] if width else []
    l0prune.fit(model, budget, l0prune.score(model, "magnitude"), round_to=1)
    return model.eval()


def in_rounds(of: Report, model: nn.Module, example: Example, rounds: int = 5) -> nn.Module:
    """Five cuts; the result of each is trained, gated and cut again."""
    randomise(model)
    for number in range(rounds):
        l0prune.gate(model, *example, branches=False)
        l0prune.fit(model, "macs=0.8", l0prune.score(model, "magnitude"), round_to=1)
        if number < rounds - 1:
            model = l0prune.export(model.eval()).module.train()
            optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
            model(*example[0], **example[1]).logits.square().mean().backward()
            optimizer.step()
            model.eval()
    return model.eval()


Prepare = Callable[[Report, nn.Module, Example], nn.Module]
PREPARE: dict[str, Prepare] = {"scrambled": scrambled, "sized": sized, "in_rounds": in_rounds}


def stream(model: nn.Module, small: l0prune.Export, loaded: nn.Module, folder: Path) -> str:
    """The file, given what it kept at the call before, beside the smaller network."""
    session = onnxruntime.InferenceSession(folder / "small.onnx")
    names = [each.name for each in session.get_inputs()]
    state = [small.module.get_buffer(name).clone().numpy() for name in names[1:]]
    errors = []
    for _ in range(4):
        x = torch.randn(1, 4, 10)
        found, *state = session.run(None, dict(zip(names, [x.numpy(), *state], strict=True)))
        with torch.no_grad():
            errors.append(difference([small.module(x)], [torch.tensor(found)]))
    return f"four calls of the file, one after the other: {max(errors):.0e}"


def stored(model: nn.Module, small: l0prune.Export, loaded: nn.Module, folder: Path) -> str:
    """The numbers that the two files hold, and those that were counted."""
    counts = []
    for name in ("net.onnx", "small.onnx"):
        arrays = onnx.load(folder / name).graph.initializer
        counts.append(sum(torch.Size(each.dims).numel() for each in arrays if each.data_type == 1))
    said = f"counted {small.params_before:,} and {small.params:,}"
    return f"the files hold {counts[0]:,} and {counts[1]:,} numbers, {said}"


def tower(model: nn.Module, small: l0prune.Export, loaded: nn.Module, folder: Path) -> str:
    """Parameters of the vision tower and the hidden size, before and after."""
    both = [
        sum(p.numel() for name, p in each.named_parameters() if "vision_tower" in name)
        for each in (model, small.module)
    ]
    hidden = small.module.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    return f"vision tower {both[0]:,} and {both[1]:,} parameters, hidden size 32 and {hidden}"


def sizes(model: nn.Module, small: l0prune.Export, loaded: nn.Module, folder: Path) -> str:
    """The sizes in the configuration that transformers has read."""
    config: Any = loaded.config
    right = {name: getattr(config, name) for name in GIVEN}
    return f"as given: {right == GIVEN} ({', '.join(f'{n} {v}' for n, v in right.items())})"


def counted(model: nn.Module, small: l0prune.Export, loaded: nn.Module, folder: Path) -> str:
    """Counted parameters of a frozen network, and those of the smaller one that learn."""
    free = sum(p.requires_grad for p in small.module.parameters())
    return f"{small.params_before:,} parameters counted, {free} of the smaller network's learn"


def adapter(model: nn.Module, small: l0prune.Export, loaded: nn.Module, folder: Path) -> str:
    """LoRA trained on the smaller network and put on the one that was loaded."""
    import peft

    wanted = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    ids = torch.randint(2, 60, (4, 12))
    with torch.no_grad():
        plain = loaded(input_ids=ids).logits
    adapted = peft.get_peft_model(small.module.train(), wanted)  # type: ignore[arg-type]
    learn = [each for each in adapted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learn, lr=0.02)
    for _ in range(10):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval().save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(loaded, folder / "adapter").eval()  # type: ignore[arg-type]
    with torch.no_grad():
        expected, found = (each(input_ids=ids).logits for each in (adapted, again))
        merged = again.merge_and_unload()(input_ids=ids).logits
    effect, off, apart = (difference([expected], [y]) for y in (plain, found, merged))
    return f"the adapter moves outputs by {effect:.0e}; loaded {off:.0e} apart, merged {apart:.0e}"


Measure = Callable[[nn.Module, l0prune.Export, nn.Module, Path], str]
ALSO: dict[str, Measure] = {
    each.__name__: each for each in (stream, stored, tower, sizes, counted, adapter)
}
