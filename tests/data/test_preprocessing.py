"""What is said of the preprocessing is what is done: repeated by PIL and numpy."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import l0prune
from l0prune.data.preprocessing import Preprocessing
from l0prune.running.sources import load_data


@pytest.mark.parametrize("side", [32, 45])
def test_images_of_a_folder_by_hand(tmp_path, side):
    draw, wanted = np.random.default_rng(side), []
    for part, sizes in (("train", [(50, 50)]), ("test", [(61, 97), (97, 61), (48, 300), (33, 40)])):
        for label in ("ant", "bee"):
            (tmp_path / part / label).mkdir(parents=True)
            for number, (height, width) in enumerate(sizes):
                image = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
                image.save(tmp_path / part / label / f"{number}.png")
                if part == "test":
                    wanted.append(image)
    data = load_data(f"imagefolder:{tmp_path}:{side}")
    known = data.preprocessing
    assert known.resize == round(side * 256 / 224)
    assert known.crop_pct == side / known.resize
    mean, std = np.array(known.mean, np.float32), np.array(known.std, np.float32)
    (found, _), *more = data.test.batches(8)
    assert not more
    for image, given in zip(wanted, found, strict=True):
        sides = [each * known.resize // min(image.size) for each in image.size]
        image = image.resize(sides, Image.Resampling.BILINEAR)
        left, top = (round((each - side) / 2) for each in image.size)
        pixels = np.asarray(image.crop((left, top, left + side, top + side)), np.float32)
        expected = ((pixels / np.float32(known.pixel_max) - mean) / std).transpose(2, 0, 1)
        assert np.array_equal(expected, given.numpy())
    assert f"shorter side resized to {known.resize} pixels (bilinear, antialiased)" in str(known)


def test_digits_by_hand():
    datasets = pytest.importorskip("sklearn.datasets")
    data = load_data("digits")
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[1437:]
    images = torch.tensor(datasets.load_digits().images, dtype=torch.float32)[order, None]
    assert torch.equal(data.test.inputs, images / 8 - 1)
    known = data.preprocessing
    assert (known.input_size, known.color, known.pixel_max) == ([1, 8, 8], "L", 16)
    scaled = "values over 16, minus mean (0.5), over deviation (0.5)"
    assert str(known) == f"L images, 8×8 pixels, {scaled}"


def test_what_a_task_says_of_its_images_is_in_the_files_of_an_export(tmp_path):
    """Whoever fine-tunes, or looks at the data for a start, need not say it again."""
    known = Preprocessing(input_size=[1, 4, 4], color="L", mean=[0.5], std=[0.25])
    images, targets = torch.randn(40, 1, 4, 4), torch.arange(40) % 3
    task = l0prune.Task([(images, targets)], [(images, targets)], preprocessing=known)
    for way in ("finetune", "own loop"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
        l0prune.gate(model, (images[:2],))
        if way == "finetune":
            l0prune.finetune(model, task, epochs=2, lam=0.1, progress=False)
        else:
            l0prune.Pruner(model, budget="params=0.5", steps=10).start_from(task)
        l0prune.save(model, tmp_path / "net.tuned.pt")
        told = l0prune.read_info(tmp_path / "net.tuned.pt")["preprocessing"]
        assert Preprocessing.model_validate(told) == known
        small = l0prune.export(copy.deepcopy(model))
        assert small.preprocessing == known
        small.save_pretrained(tmp_path / "small")
        manifest = json.loads((tmp_path / "small/l0prune.json").read_text())
        assert Preprocessing.model_validate(manifest["preprocessing"]) == known
