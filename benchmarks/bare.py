"""The three commands as one would type them, on networks of torchvision and timm.

    python -m benchmarks.bare
    python -m benchmarks.bare --only resnet18 test_vit
    python -m benchmarks.bare --guesses torchvision timm transformers small

Each network lies in a folder of its own, with a folder of images beside it and nothing else: as a
pickled module (of timm with ``--trust-pickle``, the one option that is given), or by its name.
Weights are random, and the images a few: what counts is whether the commands find all they need.
``--guesses`` takes the networks of ``benchmarks.coverage``, and guesses no more than an input on
which each one runs.
The error is that of the ONNX file beside the tuned model on fresh inputs, over the outputs' scale.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

import l0prune
from benchmarks import zoo
from benchmarks.runner import options, table
from l0prune.errors import UsageError
from l0prune.features.example_guess.guess import guess_example

# By file or by name.
NETWORKS = {
    "torchvision": {
        "resnet18": "file", "squeezenet1_1": "file", "shufflenet_v2_x0_5": "file",
        "efficientnet_b1": "file", "regnet_y_400mf": "file",
        "mobilenet_v3_small": "name",
    },
    "timm": {
        "test_vit": "file", "mobilenetv3_small_050": "file", "convnext_atto": "file",
        "resmlp_12_224": "file", "test_resnet": "name",
    },
}  # fmt: skip
COMMANDS = ("gate", "finetune --lambda 0.1/N", "export --onnx")
IMAGES, SIDE = 8, 200  # of each class; pixels of the longer side
SAID = {
    "input": re.compile(r"the example input is (\S+), from (.*); to give"),
    "data": re.compile(r"it is the images here: --data (\S+)"),
}


def images(folder: Path) -> None:
    """Write parts of the photos that come with scikit-learn, a folder for each photo."""
    draw = np.random.default_rng(0)
    for label, photo in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (folder / label).mkdir(parents=True)
        for index in range(IMAGES):
            top, left = (int(draw.integers(size - SIDE)) for size in photo.shape[:2])
            part = photo[top : top + SIDE, left : left + SIDE * 3 // 4]
            Image.fromarray(part).save(folder / label / f"{index}.png")


def run(package: str, name: str, how: str, folder: Path) -> dict[str, str]:
    """Run the commands in a folder, and return a row of the table."""
    images(folder / "images")
    spec, options = f"{package}:{name}", []
    model = l0prune.load_model(spec)
    if how == "file":
        torch.save(model, folder / "model.pt")
        spec, options = "model.pt", ["--trust-pickle"] * (package == "timm")
    begun, said = time.perf_counter(), ""
    for command in COMMANDS:
        action, *given = command.split()
        typed = [action, *([spec] if action == "gate" else ()), *given, *options]
        done = subprocess.run(
            [sys.executable, "-m", "l0prune", *typed], cwd=folder, capture_output=True, text=True
        )
        said += done.stderr
        if done.returncode:
            return _row(said, f"{action}: {done.stderr.splitlines()[-1]}")
    seconds = time.perf_counter() - begun
    (file,) = folder.glob("*.onnx")
    tuned = l0prune.load(next(folder.glob("*.tuned.pt")), trust_pickle=True)
    return _row(said, f"{difference(tuned, file):.0e}", f"{seconds:.0f} s")


def _row(said: str, outcome: str, seconds: str = "") -> dict[str, str]:
    found = {name: pattern.search(said) for name, pattern in SAID.items()}
    text, origin = found["input"].groups() if found["input"] else ("", "")
    data = found["data"][1] if found["data"] else ""
    return {"input": text, "from": origin, "data": data, "error": outcome, "took": seconds}


def difference(model: torch.nn.Module, file: Path) -> float:
    """Return the largest difference of the file's outputs, over the scale of the model's."""
    session = onnxruntime.InferenceSession(file)
    (given,) = session.get_inputs()
    x = torch.randn(3, *given.shape[1:], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.eval()(x)
    (found,) = session.run(None, {given.name: x.numpy()})
    return float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max())


def rows(only: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a row for each network."""
    for package, networks in NETWORKS.items():
        for name, how in networks.items():
            if not only or name in only:
                with tempfile.TemporaryDirectory() as folder:
                    yield f"{package} `{name}`, by {how}", run(package, name, how, Path(folder))


def guesses(zoo_name: str) -> tuple[str, ...]:
    """Return a row: of how many networks an example input is guessed, and of which not."""
    names, failed = zoo.names(zoo_name), []
    for name in names:
        model, *_ = zoo.build(zoo_name, name)
        try:
            guess_example(model)
        except UsageError:
            failed.append(f"`{name}`")
    return zoo_name, f"{len(names) - len(failed)} of {len(names)}", ", ".join(failed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    zoos = ([str], "guess inputs alone, of zoos")
    given = options(
        __doc__, arguments, threads=None, only=([str], "networks by name"), guesses=zoos
    )
    if given.guesses:
        return table("networks | input guessed | not of", map(guesses, given.guesses))
    found: list[tuple[str, ...]] = []

    def cells() -> Iterator[tuple[str, ...]]:
        for name, row in rows(given.only):
            found.append((name, *row.values()))
            yield found[-1]

    head = "network | example input | from | data | error of the ONNX file | three commands"
    table(head, cells())
    print(f"\n{sum(bool(row[-1]) for row in found)} of {len(found)}")


if __name__ == "__main__":
    main()
