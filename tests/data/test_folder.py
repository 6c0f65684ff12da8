"""Folders of images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from l0prune.data import image_folder
from l0prune.errors import DataError
from l0prune.running.sources import load_data


def make(folder, parts=("train", "val"), labels=("cat", "dog"), count=3):
    for part in parts:
        for number, label in enumerate(labels):
            (folder / part / label).mkdir(parents=True)
            for index in range(count):
                colour = (200 * number, 20 * index, 0)
                Image.new("RGB", (40, 30), colour).save(folder / part / label / f"{index}.png")


def test_images_and_their_classes(tmp_path):
    make(tmp_path)
    data = load_data(f"imagefolder:{tmp_path}")
    assert (data.classes, data.n_train, len(data.test)) == (2, 6, 6)
    assert data.name == f"imagefolder:{tmp_path}"
    example = data.train.example(1)
    assert example.shape == (1, 3, 224, 224)
    expected = (0.0 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(example[0, :, 100, 100], expected)


def test_images_of_another_size_come_from_worker_processes_or_if_they_are_few_from_here(tmp_path):
    make(tmp_path, parts=("train", "test"))
    data = load_data(f"imagefolder:{tmp_path}:16")
    assert data.train.workers > data.test.workers == 0
    assert torch.equal(next(data.train.batches(6))[0], next(data.test.batches(6))[0])
    inputs, targets = next(data.test.batches(6))
    assert inputs.shape == (6, 3, 16, 16)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]


def test_augmented_images_are_reproducible_and_vary(tmp_path):
    make(tmp_path, count=1)
    ramp = Image.linear_gradient("L").convert("RGB")
    for label in ("cat", "dog"):
        ramp.save(tmp_path / "train" / label / "0.png")
    split = load_data(f"imagefolder:{tmp_path}:16").train
    batches = [
        next(split.batches(2, generator=torch.Generator().manual_seed(seed), augment=augment))[0]
        for seed, augment in ((3, True), (3, True), (4, True), (3, False))
    ]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert torch.equal(batches[3][0], batches[3][1])


def noise(path, side):
    pixels = np.random.default_rng(len(str(path))).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def test_images_of_the_right_size_are_not_resized(tmp_path):
    make(tmp_path, count=1)
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            pixels = noise(tmp_path / part / label / "0.png", 32)
    data = load_data(f"imagefolder:{tmp_path}:32")
    known = data.preprocessing
    assert (known.resize, known.crop_pct) == (32, 1)
    assert "32×32 pixels as they are" in str(known)
    plain = known.scaled(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    assert torch.allclose(next(data.test.batches(2))[0][1:], plain, atol=1e-6)
    draw = torch.Generator().manual_seed(0)
    varied, labels = next(data.train.batches(2, generator=draw, augment=True))
    whole = data.train.example(2)[labels]
    for image, source in zip(varied, whole, strict=True):  # a part of it lies somewhere, unchanged
        part = image[:, 8:24, 8:24]
        views = [
            each[:, down : down + 16, right : right + 16]
            for each in (source, source.flip(2))
            for down in range(4, 13)
            for right in range(4, 13)
        ]
        assert any(torch.equal(part, view) for view in views)
    noise(tmp_path / "train" / "cat" / "1.png", 33)
    assert load_data(f"imagefolder:{tmp_path}:32").preprocessing.resize == 37


@pytest.mark.parametrize(("sides", "expected"), [((20, 20), 20), ((20, 24), 224)])
def test_the_default_size_is_that_of_images_which_have_one(tmp_path, sides, expected):
    for part in ("train", "test"):
        for label, side in zip(("cat", "dog"), sides, strict=True):
            where = tmp_path / part / label
            where.mkdir(parents=True)
            Image.new("RGB", (side, side)).save(where / "a.png")
    assert load_data(f"imagefolder:{tmp_path}").preprocessing.input_size == [3, expected, expected]


def test_a_folder_for_each_class_and_no_parts(tmp_path):
    make(tmp_path, parts=("",), count=7)
    data = load_data(f"imagefolder:{tmp_path}:16")
    assert (data.classes, len(data.train), len(data.test)) == (2, 12, 2)
    whole = load_data(f"imagefolder:{tmp_path}:16").train.dataset.dataset
    held_back = [whole.samples[number][0] for number in data.test.dataset.indices]
    assert held_back == [str(tmp_path / label / "4.png") for label in ("cat", "dog")]
    assert {*data.test.dataset.indices, *data.train.dataset.indices} == {*range(14)}
    augmented = next(data.train.batches(12, generator=torch.Generator(), augment=True))
    assert augmented[0].shape == (12, 3, 16, 16)


def test_grey_images(tmp_path):
    make(tmp_path)
    data = load_data(f"imagefolder:{tmp_path}:1x16")
    example = data.train.example(3)
    assert example.shape == (3, 1, 16, 16)
    assert data.preprocessing.color == "L"
    brightness = 0.587 * torch.tensor([0.0, 20.0, 40.0])  # of their green
    expected = (brightness.round() / 255 - 0.449) / 0.226
    assert torch.allclose(example[:, 0, 8, 8], expected)


def test_an_image_that_cannot_be_read(tmp_path):
    make(tmp_path)
    (tmp_path / "val" / "cat" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing more")
    data = load_data(f"imagefolder:{tmp_path}:16")
    with pytest.raises(DataError, match="cannot be read"):
        list(data.test.batches(2))


def test_images_without_labels_are_inputs_alone(tmp_path, monkeypatch):
    make(tmp_path / "labelled")
    alone = tmp_path / "labelled" / "train" / "cat"
    given = load_data(f"imagefolder:{alone}:16")
    expected = next(load_data(f"imagefolder:{tmp_path / 'labelled'}:16").train.batches(3))[0]
    assert torch.equal(given, expected)
    monkeypatch.setattr(image_folder, "_MOST", 2)
    assert torch.equal(load_data(f"imagefolder:{alone}:16"), given[::2])
    (alone / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing more")
    with pytest.raises(DataError, match="cannot be read as an image"):
        load_data(f"imagefolder:{alone}:16")


def test_folders_that_are_no_data(tmp_path):
    with pytest.raises(DataError, match="needs two folders, train and test"):
        load_data(f"imagefolder:{tmp_path}")
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match="one folder of images per class"):
        load_data(f"imagefolder:{tmp_path}")


def test_parts_of_different_classes(tmp_path):
    make(tmp_path, parts=("train",))
    make(tmp_path, parts=("test",), labels=("cat", "cow"))
    with pytest.raises(DataError, match=r"different classes \(cow, dog\)"):
        load_data(f"imagefolder:{tmp_path}")


def test_a_class_without_images(tmp_path):
    make(tmp_path)
    (tmp_path / "train" / "eel").mkdir()
    with pytest.raises(DataError, match="eel"):
        load_data(f"imagefolder:{tmp_path}")
