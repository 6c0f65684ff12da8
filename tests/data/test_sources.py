"""Data sources: what they hold, their order, and what is refused."""

from __future__ import annotations

import os

import pytest
import torch
from PIL import Image

from l0prune.data import Tensors, load_data
from l0prune.data.augment import shifted_and_mirrored
from l0prune.errors import DataError, FileError, UsageError


def test_digits_need_no_download():
    data = load_data("digits")
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    assert data.train.example(2).shape == (2, 1, 8, 8)


@pytest.mark.skipif("L0PRUNE_DATA" not in os.environ, reason="L0PRUNE_DATA names no data folder")
def test_mnist_is_scaled_as_usual():
    data = load_data("mnist")
    assert (len(data.train), len(data.test)) == (60000, 10000)
    inputs = data.train.inputs
    assert float(inputs.mean()) == pytest.approx(0, abs=1e-3)
    assert float(inputs.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.skipif("L0PRUNE_DATA" not in os.environ, reason="L0PRUNE_DATA names no data folder")
def test_cifar_from_packed_jpegs():
    data = load_data("cifar10")
    assert (len(data.train), len(data.test)) == (50000, 10000)
    assert data.test.example(3).shape == (3, 3, 32, 32)


def numbered(count):
    return Tensors(torch.arange(float(count))[:, None], torch.arange(count))


def test_a_generator_reproduces_the_order():
    split = numbered(10)
    orders = [
        torch.cat([y for _, y in split.batches(3, generator=torch.Generator().manual_seed(4))])
        for _ in range(2)
    ]
    assert torch.equal(*orders)
    assert len(orders[0]) == 9  # the last, smaller batch is left out
    assert sorted(orders[0].tolist()) != orders[0].tolist()


def test_without_a_generator_every_example_comes_once():
    batches = list(numbered(10).batches(4))
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([y for _, y in batches]), torch.arange(10))


def test_augmentation_shifts_and_mirrors():
    image = torch.arange(64.0).view(1, 1, 8, 8).expand(50, -1, -1, -1) + 1
    out = shifted_and_mirrored(image, torch.Generator().manual_seed(0))
    assert out.shape == image.shape
    assert set(out.unique().tolist()) <= {0.0, *(image.unique().tolist())}
    assert len(torch.unique(out.flatten(1), dim=0)) > 30


def test_image_folders(tmp_path):
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            Image.new("RGB", (40, 30)).save(tmp_path / part / label / "1.png")
    data = load_data(f"imagefolder:{tmp_path}")
    assert data.classes == 2
    assert len(data.test) == 2


def test_image_folder_without_parts(tmp_path):
    with pytest.raises(DataError, match="train and test"):
        load_data(f"imagefolder:{tmp_path}")


def test_a_function_of_ones_own(tmp_path):
    (tmp_path / "d.py").write_text(
        "import torch\n"
        "def load():\n"
        "    part = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])\n"
        "    return part, part\n"
    )
    data = load_data(f"{tmp_path}/d.py:load")
    assert data.classes == 3
    with pytest.raises(DataError, match="3 classes, but the model has 2 outputs"):
        data.check_fits(2)


def test_an_empty_source(tmp_path):
    (tmp_path / "d.py").write_text(
        "import torch\n"
        "def load():\n"
        "    part = torch.empty(0, 4), torch.empty(0).long()\n"
        "    return part, part\n"
    )
    with pytest.raises(DataError, match="no training examples"):
        load_data(f"{tmp_path}/d.py:load")


def test_a_function_that_returns_nonsense(tmp_path):
    (tmp_path / "d.py").write_text("def load():\n    return 3\n")
    with pytest.raises(DataError, match=r"must return \(train, test\)"):
        load_data(f"{tmp_path}/d.py:load")


def test_names_that_mean_nothing(tmp_path):
    with pytest.raises(UsageError, match="no data source"):
        load_data("imagenet-of-dreams")
    with pytest.raises(DataError, match="is no folder"):
        load_data(f"imagefolder:{tmp_path}/nowhere")
    with pytest.raises(FileError, match="does not exist"):
        load_data(f"{tmp_path}/nowhere.py:load")
