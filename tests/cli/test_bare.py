"""The three commands in a folder that holds a model file and a folder of images."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import run
from differences import run_onnx
from PIL import Image
from torch import nn

import l0prune
from l0prune.cli.evaluate import say_what_differs

README = Path(__file__).parents[2] / "README.md"


def network(channels=3, outputs=3, width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(16 * width, 32), nn.ReLU(), nn.Linear(32, outputs),
    )  # fmt: skip


def images(folder, count=16):
    """Noise with more of one colour, in a folder for each class."""
    draw = np.random.default_rng(0)
    for number, label in enumerate(("ant", "bee", "cow")):
        (folder / label).mkdir(parents=True)
        for index in range(count):
            pixels = draw.integers(0, 200, (16, 16, 3))
            pixels[:, :, number] += 55
            Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{index}.png")


def difference(folder):
    """Of the ONNX file's outputs and the tuned model's, relative to their scale."""
    tuned = l0prune.load(folder / "model.tuned.pt").eval()
    x = torch.randn(7, tuned[0].in_channels, 16, 16)
    expected = tuned(x).detach()
    (found,) = run_onnx(folder / "model.onnx", x)
    return (found - expected).abs().max().item() / expected.abs().max().item()


LONG = ("--epochs", "4", "--batch-size", "4", "--gate-lr", "0.5", "--set", "ema=0.9")


def test_gates_close_and_each_command_says_what_it_took(done, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    images(tmp_path / "photos")
    _, err = done("gate", "model.pt")
    assert "the example input is 2x3x16x16, from the images in this folder; to give" in err

    _, err = done("finetune", "--lambda", "20/N", *LONG)
    assert "no data is named, so it is the images here: --data imagefolder:photos:16" in err
    assert "39 training examples, 9 test examples, 3 classes" in err

    _, err = done("export", "--onnx")
    assert "exporting model.tuned.pt" in err
    assert difference(tmp_path) <= 1e-5
    _, err = done("evaluate", "model.tuned.pt", "--data", "imagefolder:photos")
    assert "images get the size that the model takes: --data imagefolder:photos:16" in err
    left = l0prune.read_info(tmp_path / "model.tuned.pt")["history"]["params"]
    assert left < sum(parameter.numel() for parameter in network().parameters())


def lines():
    """The commands of the README's first block of its own network."""
    section = README.read_text(encoding="utf-8").split("## Your own network, on the command line")
    block = section[1].split("```")[1]
    return [line.split("#")[0].split()[1:] for line in block.strip().splitlines()]


@pytest.mark.slow
def test_the_lines_of_the_readme_as_they_stand(tmp_path):
    torch.save(network(width=256), tmp_path / "model.pt")
    for part in ("train", "val"):
        images(tmp_path / "photos" / part)
    assert [arguments[0] for arguments in lines()] == ["gate", "finetune", "export"]
    for arguments in lines():
        code, _, err = run(*arguments, cwd=tmp_path)
        assert code == 0, err
    assert difference(tmp_path) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name", "how"),
    [("timm", "test_vit", "file"), ("torchvision", "shufflenet_v2_x0_5", "name")],
)
def test_networks_of_packages(tmp_path, package, name, how):
    pytest.importorskip(package)
    pytest.importorskip("sklearn")
    row = importlib.import_module("benchmarks.bare").run(package, name, how, tmp_path)
    assert row["took"], row
    assert row["data"] == f"imagefolder:images:{row['input'].rpartition('x')[2]}"
    assert float(row["error"]) <= 1e-5


@pytest.mark.slow
def test_grey_images_and_no_name_at_all(done, tmp_path):
    """In a folder that is the folder of images itself."""
    torch.save(network(channels=1), tmp_path / "model.pt")
    for part in ("train", "test"):
        images(tmp_path / part)
    _, err = done("gate")
    assert "the model is model.pt" in err
    _, err = done("finetune", "--epochs", "2")
    assert "--data imagefolder:.:1x16" in err
    done("export")
    _, err = done("evaluate", "model.onnx")
    assert "--data imagefolder:.:1x16" in err


def test_another_size_than_that_of_the_images_is_said(done, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    images(tmp_path / "photos", count=5)
    done("gate", "model.pt", "--input", "1x3x20x20")
    _, err = done("finetune", "--epochs", "1", "--no-report")
    assert "the images here are 16x16 and each is resized to 20x20" in err


def test_an_export_before_the_gates_have_learned_is_said(done, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    images(tmp_path / "photos", count=5)
    done("gate", "model.pt")
    export = ("export", "--state", "--no-report")
    _, err = done(*export)
    assert "model.gated.pt, whose gates have not learned" in err
    assert "`l0prune finetune` trains it" in err
    done("finetune", "--epochs", "1", "--no-report")
    _, err = done(*export)
    assert "exporting model.tuned.pt\n" in err
    (tmp_path / "model.tuned.pt").unlink()  # as if the run had been stopped
    _, err = done(*export)
    assert "whose gates have not learned" in err
    said = " ".join(err.split())
    assert "The run in model.run is not finished" in said
    assert "the same `l0prune finetune` command goes on from its checkpoint" in said


def test_what_a_folder_lacks_or_has_twice(done, refused, tmp_path):
    torch.save(network(), tmp_path / "model.pt")
    odd = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(77, 2))
    done("gate", "model.pt")
    assert "put a folder of images here" in refused(2, "finetune")
    for name in ("photos", "other"):
        images(tmp_path / name, count=5)
    said = refused(2, "finetune")
    assert "2 folders of images here: other, photos. Name one: --data imagefolder:other" in said
    torch.save(odd, tmp_path / "odd.pth")
    assert "2 model files here: model.pt, odd.pth. Name one" in refused(2, "survey")
    assert re.search("2x1x224x224 did not work .*; nor did ", refused(2, "survey", "odd.pth"))


def test_fewer_classes_and_other_images_than_the_model_knows(done, tmp_path):
    model = network(outputs=5)
    model.pretrained_cfg = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    torch.save(model, tmp_path / "model.pt")
    images(tmp_path / "photos", count=5)
    out, _ = done("gate", "model.pt", "--json")
    assert out["input"] == "2x3x16x16"
    _, err = done("finetune", "--epochs", "1", "--no-report")
    assert "model.gated.pt has 5 outputs and the data 3 classes" in err
    assert (
        "timm's weights of this network expect images normalised with mean [0.5, 0.5, 0.5]" in err
    )


@pytest.mark.parametrize(("classes", "warns"), [(3, False), (1000, True)])
def test_normalisation_is_only_that_of_timms_weights_where_these_can_be_in_the_model(
    capsys, classes, warns
):
    model = network(outputs=classes)
    model.num_classes = classes  # timm's networks say it
    model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "num_classes": 1000}
    given = SimpleNamespace(preprocessing=SimpleNamespace(mean=[0.4] * 3, std=[0.2] * 3))
    say_what_differs(model, given, Path("model.pt"))
    assert ("expect images normalised with mean" in capsys.readouterr().err) == warns
