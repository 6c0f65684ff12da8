"""Five reports as pages: a CNN, a ViT, a decoder, a detector, and a CNN under a budget in time.

python -m benchmarks.gallery build/docs/gallery

The networks are small and random, and the data come with packages, so that all of it takes some
minutes on two cores. The site of the documentation makes these pages when it is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

import l0prune

Batches = list[Any]


class Work(NamedTuple):
    """A network, its data, and what is asked of it."""

    title: str
    model: nn.Module
    data: tuple[Batches, Batches]
    example: tuple[Any, ...]
    budget: str
    epochs: int
    settings: Mapping[str, Any] = MappingProxyType({})  # of both trainings
    round_to: int | str = "auto"
    samples: int = 0  # networks that are timed


def digits(size: int) -> tuple[Batches, Batches]:
    """Handwritten digits in batches, enlarged to this many pixels a side."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    images = nn.functional.interpolate(images, size=(size, size))
    order = torch.randperm(len(images)).split(50)
    batches = [(images[part], torch.tensor(found.target)[part]) for part in order]
    return batches[:28], batches[28:]


class Residual(nn.Module):
    """Three stages of two residual blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(self._block(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def _block(self, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.stem(x).relu()
        for number, block in enumerate(self.blocks):
            x = (x + block(x)).relu()
            if number % 2:
                x = nn.functional.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


def cnn() -> Work:
    """A residual network under a budget in MACs."""
    data = digits(8)
    return Work("A CNN", Residual(32), data, (data[0][0][0],), "macs=0.4", 6, round_to=8)


def milliseconds() -> Work:
    """The same network on larger images, to be twice as fast in ONNX Runtime."""
    data = digits(12)
    example = (data[0][0][0],)
    return Work("A CNN in milliseconds", Residual(32), data, example, "latency=0.5", 2, samples=12)


def vit() -> Work:
    """A vision transformer of torchvision's; heads, neurons and whole blocks may go."""
    data = digits(8)
    model = VisionTransformer(8, 2, 3, 4, 64, 128, num_classes=10)
    model.conv_proj = nn.Conv2d(1, 64, 2, 2)
    return Work("A vision transformer", model, data, (data[0][0][0],), "params=0.4", 8)


def decoder() -> Work:
    """A Llama that continues the docstrings of Python's own types, letter by letter."""
    kinds = (str, bytes, list, dict, set, int, float, tuple, frozenset, bytearray)
    text = "\n".join(str(getattr(kind, name).__doc__) for kind in kinds for name in dir(kind))
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    rows = ids[: len(ids) // 64 * 64].reshape(-1, 64)
    batches = [{"input_ids": part, "labels": part} for part in rows.split(32)]
    config = transformers.LlamaConfig(
        vocab_size=len(letters), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=192, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    data = batches[:-2], batches[-2:]
    return Work("A decoder", model, data, ((), {"input_ids": rows[:2]}), "params=0.6", 8)


def detector() -> Work:
    """A detector of torchvision's that looks for bright squares; it is captured in parts."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
    )
    body.out_channels = 32
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    model = FCOS(body, num_classes=2, anchor_generator=anchors, min_size=32, max_size=32)
    batches = [_squares() for _ in range(40)]
    settings = {"metric": missed, "lr": 3e-3}
    example = (batches[0][0][:2],)
    return Work(
        "A detector", model, (batches[4:], batches[:4]), (example,), "params=0.5", 6, settings
    )


def _squares() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Eight images, each with a bright square of 12 pixels, and its box."""
    images, targets = [], []
    for left, top in torch.randint(0, 20, (8, 2)).tolist():
        image = torch.rand(3, 32, 32) / 2
        image[:, top : top + 12, left : left + 12] += 0.5
        box = torch.tensor([[left, top, left + 12, top + 12]], dtype=torch.float32)
        images.append(image)
        targets.append({"boxes": box, "labels": torch.tensor([1])})
    return images, targets


def missed(found: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> Tensor:
    """Of each image whether no box of the best three is within four pixels of the square's."""
    return torch.tensor(
        [
            float(not ((each["boxes"][:3] - target["boxes"]).abs().amax(1) < 4).any())
            for each, target in zip(found, targets, strict=True)
        ]
    )


WORKS: dict[str, Callable[[], Work]] = {
    work.__name__: work for work in (cnn, vit, decoder, detector, milliseconds)
}


def write(name: str, folder: Path) -> None:
    """Train, gate, fine-tune and export; write the report as a page."""
    torch.manual_seed(0)
    work = WORKS[name]()
    model, settings = work.model, {"lr": 2e-3, **work.settings}
    first = l0prune.train_dense(model, work.data, epochs=work.epochs, **settings)
    l0prune.gate(model.eval(), *work.example)
    table = l0prune.measure(model, samples=work.samples) if work.samples else None
    settings |= {"budget": work.budget, "round_to": work.round_to, "latency": table}
    history = l0prune.finetune(model, work.data, epochs=2 * work.epochs, **settings)
    small = l0prune.export(model)
    with TemporaryDirectory() as there:
        small.save_onnx(Path(there) / f"{name}.onnx")
        report = l0prune.Report.of(small, [first, history], model=model, latency=table)
        report.titled(work.title).save(folder / f"{name}.html")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pages go")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(WORKS)}; by default all")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or WORKS:
        write(name, given.folder)


if __name__ == "__main__":
    main()
