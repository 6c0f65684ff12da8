"""Data sources by name: what they hold and what is refused."""

from __future__ import annotations

import io
import os
import sys

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import l0prune
from l0prune.errors import DataError, FileError, UsageError
from l0prune.running.sources import load_data

needs_data = pytest.mark.skipif(
    "L0PRUNE_DATA" not in os.environ, reason="L0PRUNE_DATA names no data folder"
)


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_digits_need_no_download():
    data = load_data("digits")
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    assert data.train.example(2).shape == (2, 1, 8, 8)
    assert float(data.train.inputs.min()) == -1
    assert float(data.train.inputs.max()) == 1
    whole = torch.cat([data.train.inputs, data.test.inputs]).flatten(1)
    assert len(torch.unique(whole, dim=0)) == 1797  # no example is in both parts


@needs_data
def test_mnist_is_what_torchvision_transforms():
    from torchvision import transforms as T

    transform = T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))])
    reference = torchvision.datasets.MNIST(os.environ["L0PRUNE_DATA"], False, transform)
    data = load_data("mnist")
    assert (len(data.train), len(data.test)) == (60000, 10000)
    split = data.test
    for index in (0, 17, 9999):
        image, label = reference[index]
        assert torch.allclose(split.inputs[index], image, rtol=0, atol=1e-6)
        assert split.targets[index] == label


def packed(folder, count=6):
    """Images of one colour each, packed as in cifar10-jpeg; returns the colours."""
    folder.mkdir()
    colours = {}
    for part in ("train", "test"):
        files = []
        colours[part] = [(40 * i, 255 - 40 * i, 7) for i in range(count)]
        for colour in colours[part]:
            buffer = io.BytesIO()
            Image.new("RGB", (32, 32), colour).save(buffer, "JPEG", quality=100, subsampling=0)
            files.append(np.frombuffer(buffer.getvalue(), dtype=np.uint8))
        np.savez(
            folder / f"{part}.npz",
            jpeg=np.concatenate(files),
            length=np.array([len(file) for file in files]),
            label=np.arange(count),
        )
    return colours


def test_cifar_from_packed_jpegs(tmp_path):
    colours = packed(tmp_path / "cifar10-jpeg")
    data = load_data("cifar10", tmp_path)
    assert data.train.inputs.shape == (6, 3, 32, 32)
    assert data.test.targets.tolist() == list(range(6))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (torch.tensor(colours["train"]) / 255 - mean) / std
    middle = data.train.inputs[:, :, 16, 16]
    assert torch.allclose(middle, expected, atol=3 / 255 / 0.2)
    batch, _ = next(data.train.batches(6, generator=torch.Generator(), augment=True))
    assert batch.shape == (6, 3, 32, 32)


def test_packed_jpegs_that_are_damaged(tmp_path):
    packed(tmp_path / "cifar10-jpeg")
    path = tmp_path / "cifar10-jpeg" / "train.npz"
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez(path, **{**content, "jpeg": content["jpeg"][50:]})
    with pytest.raises(DataError, match=r"train\.npz is missing or damaged"):
        load_data("cifar10", tmp_path)
    np.savez(path, label=content["label"])
    with pytest.raises(DataError, match=r"train\.npz is missing or damaged"):
        load_data("cifar10", tmp_path)
    path.write_bytes(b"PK\x03\x04 no")
    with pytest.raises(DataError, match=r"train\.npz is missing or damaged"):
        load_data("cifar10", tmp_path)


@pytest.mark.slow
@needs_data
def test_real_packed_jpegs():
    data = load_data("cifar10")
    assert (len(data.train), len(data.test), data.classes) == (50000, 10000, 10)
    assert data.test.targets.bincount().tolist() == [1000] * 10


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_of_torchvision(name, monkeypatch, tmp_path):
    class Fake:
        def __init__(self, root, train, download):
            print("Files already downloaded")
            assert not download
            count = 3 if train else 2
            self.data = np.full((count, 32, 32, 3), 255, dtype=np.uint8)
            self.targets = list(range(count))

    monkeypatch.setattr(torchvision.datasets, name.upper(), Fake)
    data = load_data(name, tmp_path)
    assert (len(data.train), len(data.test)) == (3, 2)
    assert data.classes == (100 if name == "cifar100" else 10)
    expected = (1 - 0.485) / 0.229
    assert data.train.inputs[0, 0].unique().item() == pytest.approx(expected)


def test_downloading_says_nothing_on_stdout_and_only_what_is_not_there(
    monkeypatch, tmp_path, capsys
):
    calls = []

    def fake(root, train, download):
        calls.append((train, download))
        print("Downloading")
        if not download:
            raise RuntimeError("Dataset not found")
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", fake)
    with pytest.raises(DataError, match=r"fashion-mnist can neither.*no route.*--data-root DIR"):
        load_data("fashion-mnist", tmp_path)
    assert calls == [(True, False), (True, True)]
    assert capsys.readouterr().out == ""


def test_where_the_data_lies(monkeypatch, tmp_path):
    roots = []

    def fake(root, train, download):
        roots.append(root)
        raise OSError("nothing here")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fake)
    monkeypatch.setenv("L0PRUNE_DATA", "from-environment")
    monkeypatch.setenv("HOME", str(tmp_path))
    for root in ("given", None):
        with pytest.raises(DataError):
            load_data("mnist", root)
    monkeypatch.delenv("L0PRUNE_DATA")
    with pytest.raises(DataError):
        load_data("mnist")
    assert list(dict.fromkeys(roots)) == [
        "given", "from-environment", str(tmp_path / ".cache" / "l0prune"),
    ]  # fmt: skip


def test_data_from_a_file(tmp_path):
    (tmp_path / "d.py").write_text(
        "import torch\n"
        "def load():\n"
        "    part = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])\n"
        "    return part, part\n"
    )
    assert l0prune.load_data(f"{tmp_path}/d.py:load").classes == 3


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("imagenet-of-dreams", UsageError, "no data source.*imagefolder:DIR"),
        ("mnist:", UsageError, "no data source"),
        ("imagefolder:", UsageError, "no data source"),
        ("imagefolder:nowhere", DataError, "the folder nowhere does not exist"),
        ("nowhere.py:load", FileError, "does not exist"),
    ],
)
def test_names_that_mean_nothing(spec, error, message):
    with pytest.raises(error, match=message):
        load_data(spec)
