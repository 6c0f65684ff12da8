"""A network of timm under Lightning: gated, trained, cut, saved, loaded.

The network is small and random, the images are made up: what matters is which corner is bright.
Run it with a folder to work in: python examples/timm_lightning.py runs/timm
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import onnxruntime
import timm
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import l0prune
from l0prune.integrations.lightning import L0Callback

STEPS, STOP, SIZE = 60, 30, 32


def images(count: int, seed: int) -> TensorDataset:
    """Noise with one bright corner, and the number of the corner."""
    draw = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 4, (count,), generator=draw)
    pixels = torch.randn(count, 3, SIZE, SIZE, generator=draw)
    half = SIZE // 2
    for image, number in zip(pixels, corner.tolist(), strict=True):
        top, left = half * (number // 2), half * (number % 2)
        image[:, top : top + half, left : left + half] += 2
    return TensorDataset(pixels, corner)


class Classifier(lightning.LightningModule):
    """What anybody has: a network, a loss, an optimizer of timm's."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Norms and biases undecayed."""
        return create_optimizer_v2(self.network, opt="adamw", lr=3e-3, weight_decay=0.05)


class Outage(lightning.Callback):
    """What may happen to any run."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        """Stop without a word."""
        if trainer.global_step == STOP + 5:
            raise RuntimeError("no power")


def train(folder: Path, *others: lightning.Callback, resume: Path | None = None) -> nn.Module:
    """Train weights and gates, accumulated. A run that was stopped goes on."""
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=4)
    l0prune.gate(network, torch.randn(2, 3, SIZE, SIZE))
    pruner = l0prune.Pruner(network, budget="macs=0.5", steps=STEPS, gate_lr=0.2, say=print)
    batches = DataLoader(images(1024, seed=1), batch_size=16, shuffle=True)
    pruner.start_from(batches)
    kept = ModelCheckpoint(folder, filename="last", every_n_train_steps=STOP)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=2, gradient_clip_val=1.0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=20,
        default_root_dir=folder, callbacks=[L0Callback(pruner), kept, *others],
    )  # fmt: skip
    trainer.fit(Classifier(network), batches, ckpt_path=resume)
    return network


def main(folder: Path) -> float:
    """All of it; the share of new images that the loaded model gets right."""
    try:
        train(folder / "run", Outage())
    except RuntimeError:
        network = train(folder / "run", resume=folder / "run" / "last.ckpt")

    small = l0prune.export(network)
    print(small)
    print(small.save_pretrained(folder / "small"))

    # Its name is not all that built it: there are fewer classes. So the code builds it again.
    fresh = timm.create_model("test_resnet", num_classes=4)
    loaded = l0prune.resize(fresh, folder / "small").eval()
    inputs, targets = images(200, seed=2).tensors
    with torch.no_grad():
        outputs = loaded(inputs)

    (file,) = small.save_onnx(folder / "small.onnx")
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    print(f"ONNX: {float((torch.from_numpy(found) - outputs).abs().max()):.0e} apart")
    return float((outputs.argmax(1) == targets).float().mean())


if __name__ == "__main__":
    print(f"{main(Path(sys.argv[1] if len(sys.argv) > 1 else 'runs/timm')):.0%} right")
