"""Numbers of what is handed out, repeated by a script that knows no l0prune."""

import contextlib
import io
import json
import re
import runpy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image
from torch import nn

import l0prune
from l0prune.cli import evaluate, export, opening
from l0prune.data.preprocessing import Preprocessing
from l0prune.report.content import parsed

NET = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 6 * 6, 16), nn.ReLU(), nn.Linear(16, 3),
    )
"""
PAGE = Path(__file__).parents[2] / "docs/howto/repeat-the-number.md"
DATA = "imagefolder:photos:32"


def photos(folder, count=24):
    """Noise in which the class has more of its colour, and the ends of the long side less."""
    draw = np.random.default_rng(0)
    for part in ("train", "test"):
        for number, label in enumerate(("ant", "bee", "cow")):
            (folder / part / label).mkdir(parents=True)
            for index in range(count):
                short, long = draw.integers(33, 60), draw.integers(60, 90)
                pixels = draw.integers(0, 200, (short, long, 3))
                pixels[:, :, number] += draw.integers(10, 55)
                ends = (long - short) // 2
                pixels[:, :ends, number] = pixels[:, long - ends :, number] = 0
                image = Image.fromarray(pixels.astype(np.uint8))
                image = image.rotate(90, expand=True) if index % 2 else image
                image.save(folder / part / label / f"{index}.png")


@pytest.fixture
def made(done, tmp_path):
    """A folder with photos and a network that was gated, tuned and exported on them."""
    photos(tmp_path / "photos")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "l0prune.toml").write_text("[finetune]\nepochs = 4\nlr = 3e-3\n")
    formats = ("--onnx", "--pt2", "--state", "--pretrained", "small")
    said = [
        done("gate", "net.py:net", "--data", DATA),
        done("finetune", "--budget", "macs=0.7", "--batch-size", "8", "--device=cpu"),
        done("export", *formats, "--no-time"),
    ]
    return [err for _, err in said]


def page_script(folder):
    """The script of the page, run in the folder: what it prints."""
    code = re.search(r"```\n(import json.*?)```", PAGE.read_text(), re.DOTALL)[1]
    assert "import l0prune" not in code
    (folder / "repeat.py").write_text(code)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(folder / "repeat.py"))
    return float(told.getvalue())


@pytest.mark.slow
def test_every_file_gives_the_number_that_an_own_script_repeats(done, refused, made, tmp_path):
    def found(*arguments):
        return done("evaluate", *arguments, "--data", DATA, "--json")

    check_records(tmp_path)
    onnx, said = found("net.onnx")
    assert onnx["examples"] == 72
    assert page_script(tmp_path) == onnx["error"]
    assert 0 < onnx["error"] < 0.5
    assert "shorter side resized to 37 pixels (bilinear, antialiased), middle 32×32 pixels" in said
    assert all("shorter side resized to 37 pixels" in err for err in made[:2])
    for arguments in (
        ["net.tuned.pt"],
        ["small"],
        ["net.pt2", "--trust-pickle"],
        ["--model", "net.py:net", "--weights", "net.state.pt"],
    ):
        other, _ = found(*arguments, "--batch-size", "7")
        assert other["error"] == onnx["error"]
        assert other["test_loss"] == pytest.approx(onnx["test_loss"], rel=1e-4)
    torch.save(l0prune.load("small"), "whole.pt")
    assert found("whole.pt")[0]["error"] == onnx["error"]
    assert "--trust-pickle" in refused(1, "evaluate", "net.pt2", "--data", DATA)

    other = ("--data", "imagefolder:photos:40")
    said = refused(1, "evaluate", "net.onnx", *other)
    assert "net.onnx takes" in said
    assert "the data gives (72, 3, 40, 40) in float32" in said
    assert "was made with other images than these" in said
    assert "do not fit together" in refused(1, "evaluate", "whole.pt", *other)


def check_records(tmp_path):
    """What is done to images, and the commands, are in all that is handed out."""
    expected = l0prune.load_data(f"imagefolder:{tmp_path}/photos:32").preprocessing
    assert (expected.input_size, expected.resize) == ([3, 32, 32], 37)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    text = session.get_modelmeta().custom_metadata_map["l0prune.preprocessing"]
    assert Preprocessing.model_validate_json(text) == expected
    for manifest in (
        json.loads((tmp_path / "small/l0prune.json").read_text()),
        json.loads(torch.load(tmp_path / "net.state.pt")["manifest"]),
    ):
        assert Preprocessing.model_validate(manifest["preprocessing"]) == expected
    repeat = parsed((tmp_path / "net.run/report.json").read_text(), "the report").repeat
    assert repeat.preprocessing == expected
    assert repeat.commands == [
        f"l0prune gate net.py:net --data {DATA}",
        f"l0prune finetune --budget macs=0.7 --batch-size 8 --device=cpu --set=epochs=4 "
        f"--set=lr=0.003 "
        f"--data {DATA} net.gated.pt",
    ]
    assert repeat.command.endswith("--pretrained small --no-time net.tuned.pt")
    page = (tmp_path / "net.run/report.html").read_text()
    assert "shorter side resized to 37 pixels" in page
    shown = re.search(r"How to repeat it</h2>\s*<pre><code>(.*?)</code>", page, re.DOTALL)[1]
    assert shown.splitlines() == [*repeat.commands, repeat.command]


CLASSES = """
import torch


def data():
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    return (x, torch.arange(20) % 2), (x, torch.arange(20) % 2)


def numbers():
    x = torch.ones(20, 6)
    return (x, x[:, :3] * 2), (x, x[:, :3] * 2)


def pair():
    x = torch.ones(20, 6)
    return [(x, x)], [({"one": x[:5]}, x[:5, 0].long())]
"""


def test_loss_metric_and_what_does_not_fit(done, refused, tmp_path):
    (tmp_path / "own.py").write_text(CLASSES)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    torch.save(net, tmp_path / "net.pt")
    x = torch.ones(20, 6)
    far = (net(x) - 2).abs().mean().item()
    asked = ("--data", "own.py:numbers", "--loss", "l1", "--metric", "mse", "--json")
    out, _ = done("evaluate", "net.pt", *asked)
    assert out["test_loss"] == pytest.approx(far, rel=1e-5)
    assert out["mse"] == pytest.approx((net(x) - 2).square().mean().item(), rel=1e-5)

    out, err = done("evaluate", "net.pt", "--data", "own.py:data")
    assert "net.pt has 3 outputs and the data 2 classes" in err
    assert re.search(r"test examples │ +20", out)
    torch.save(nn.Sequential(net, nn.Linear(3, 1)), tmp_path / "one.pt")
    (tmp_path / "no.onnx").write_bytes(b"nothing")
    for code, arguments, message in (
        (1, ["one.pt", "--data", "own.py:data"], "has 2 classes, but the model has 1 outputs"),
        (2, ["net.pt"], "no data is named"),
        (2, [], "name one model"),
        (1, ["lost.onnx", "--data", "digits"], "lost.onnx does not exist"),
        (2, ["own.py", "--data", "digits"], "own.py:data"),
        (1, ["no.onnx", "--data", "own.py:data"], "ONNX Runtime cannot open no.onnx"),
    ):
        assert message in refused(code, "evaluate", *arguments)


class Tokens(nn.Module):
    """Tokens with a mask, which may be left out."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, ids, mask=None):
        weight = torch.ones_like(ids) if mask is None else mask
        return self.b((self.a(self.embed(ids)).relu() * weight[..., None]).sum(1))


@pytest.mark.parametrize(
    ("shapes", "given", "is_told"),
    [
        (None, {"ids": (2, 5)}, False),
        (None, {"ids": (4, 5)}, False),
        (None, {"ids": (2, 7)}, True),
        ({"ids": {1: "length"}}, {"ids": (2, 7)}, False),
        ({"ids": {1: "length"}}, {"ids": (2, 7), "mask": (2, 7)}, True),
    ],
)
def test_inputs_other_than_those_of_the_gated_model_are_told(monkeypatch, shapes, given, is_told):
    said = []
    monkeypatch.setattr(evaluate, "say", said.append)
    model = l0prune.gate(Tokens(), torch.zeros(2, 5, dtype=torch.int64), dynamic_shapes=shapes)
    inputs = {name: torch.ones(shape, dtype=torch.int64) for name, shape in given.items()}
    evaluate._compare_inputs(model, inputs, Path("t.pt"))
    shown = ", ".join(f"{name} {a}x{b}" for name, (a, b) in given.items())
    known = f"t.pt was gated with ids 2x5, and the data has {shown}."
    assert [known in each for each in said] == [True] * is_told


def test_inputs_whose_length_may_be_free_are_named(monkeypatch):
    said = []
    monkeypatch.setattr(opening, "say", said.append)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    opening.say_of_lengths(Tokens(), ((ids,), {"mask": ids}))
    opening.say_of_lengths(nn.Linear(5, 2), ((torch.zeros(2, 5),), {}))
    assert said == [
        "files will take sequences of 5 alone, or of any length with --dynamic ids:1=length "
        "--dynamic mask:1=length (in a recipe gate.dynamic)"
    ]


def test_what_a_file_takes_is_said(tmp_path):
    kind, shape = TensorProto.INT64, ["batch", "length"]
    given = helper.make_tensor_value_info("ids", kind, shape)
    other = helper.make_tensor_value_info("mask", kind, ["batch", 5])
    result = helper.make_tensor_value_info("y", kind, shape)
    node = helper.make_node("Identity", ["ids"], ["y"])
    graph = helper.make_graph([node], "net", [given, other], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    path = str(tmp_path / "net.onnx")
    onnx.save(model, path)
    sizes = "ids (batch, length), mask (batch, 5)"
    assert export.takes(path) == f"{path}, of opset 17, takes {sizes}"
