"""Model sources and example inputs by name."""

from __future__ import annotations

import collections
import sys

import pytest
import safetensors.torch
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import l0prune
from l0prune.errors import FileError, UsageError
from l0prune.files.model_sources import is_rebuildable, load_model, parse_input


@pytest.fixture
def linear(tmp_path, monkeypatch):
    """A model source that builds a Linear of 3 to 2, and its file's folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(3, 2)\nready = build()\n"
        "def wrong():\n    return 'a model'\n"
    )
    return f"{tmp_path}/net.py"


def test_a_factory_in_a_file(linear):
    assert isinstance(load_model(f"{linear}:build"), nn.Linear)
    assert load_model(f"{linear}:ready") is load_model(f"{linear}:ready")
    with pytest.raises(FileError, match="holds a str, not a"):
        load_model(f"{linear}:wrong")
    with pytest.raises(UsageError, match="it defines build, ready, wrong"):
        load_model(f"{linear}:other")


def test_a_pickled_module(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    torch.save(model, tmp_path / "model.pt")
    loaded = load_model(str(tmp_path / "model.pt"))
    assert torch.equal(loaded[0].weight, model[0].weight)


STATE = nn.Linear(3, 2).state_dict()


@pytest.mark.parametrize(
    "content",
    [
        STATE,
        nn.Linear(3, 2),
        {"state_dict": STATE, "epoch": 3},
        {"model": STATE, "optimizer": {"lr": 0.1}},
        {"net": STATE, "accuracy": 0.9},
        {"ema": {k: v + 1 for k, v in STATE.items()}, "model_state_dict": STATE},
        {f"module.{k}": v for k, v in STATE.items()},
        {"state_dict": {f"module._orig_mod.{k}": v for k, v in STATE.items()}},
        {f"_orig_mod.module.{k}": v for k, v in STATE.items()},
        collections.OrderedDict(STATE),
    ],
)
def test_weights_as_training_scripts_save_them(linear, tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    expected = content.state_dict() if isinstance(content, nn.Module) else STATE
    model = load_model(f"{linear}:build", str(tmp_path / "w.pt"))
    assert torch.equal(model.weight, expected["weight"])
    assert torch.equal(model.bias, expected["bias"])


def test_weights_in_safetensors(linear, tmp_path):
    state = nn.Linear(3, 2).state_dict()
    safetensors.torch.save_file({f"module.{n}": t for n, t in state.items()}, tmp_path / "w.bin")
    model = load_model(f"{linear}:build", str(tmp_path / "w.bin"))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    with pytest.raises(FileError, match=r"holds a state_dict.*--model path\.py:factory"):
        load_model(str(tmp_path / "w.bin"))


def test_a_gated_model_is_said_to_be_one(tmp_path):
    model = l0prune.gate(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (torch.zeros(2, 3),))
    l0prune.save(model, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"is a gated model already.*l0prune\.load"):
        load_model(str(tmp_path / "a.pt"))


def test_a_model_may_have_a_part_called_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n    m = nn.Module()\n    m.module = nn.Linear(3, 2)\n    return m\n"
    )
    torch.save({f"module.{k}": v for k, v in STATE.items()}, tmp_path / "w.pt")
    model = load_model(f"{tmp_path}/net.py:build", str(tmp_path / "w.pt"))
    assert torch.equal(model.module.weight, STATE["weight"])


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (nn.Linear(4, 2).state_dict(), UsageError, "do not fit"),
        ({"epoch": 3}, FileError, "holds no state_dict"),
        ([1, 2], FileError, "holds no state_dict"),
        ({"a": STATE, "b": STATE}, FileError, r"several state_dicts \(a, b\)"),
    ],
)
def test_weights_that_are_no_use(linear, tmp_path, content, error, message):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(error, match=message):
        load_model(f"{linear}:build", str(tmp_path / "w.pt"))
    with pytest.raises(FileError, match="does not exist"):
        load_model(f"{linear}:build", str(tmp_path / "nothing.pt"))


def test_files_without_a_module(tmp_path):
    path = tmp_path / "w.pt"
    for state in (STATE, {"model": STATE, "epoch": 1}):
        torch.save(state, path)
        with pytest.raises(FileError, match=r"without the class.*--model path\.py:factory"):
            load_model(str(path))
    torch.save(torch.zeros(3), path)
    with pytest.raises(FileError, match="holds a Tensor, not a"):
        load_model(str(path))
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    l0prune.save(l0prune.gate(model, torch.randn(2, 3)), path)
    with pytest.raises(FileError, match=r"is a gated model already.*l0prune\.load"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("torchvision:resnet18x", UsageError, "did you mean resnet18"),
        ("torchvision:zzzzzz", UsageError, "list_models"),
        ("resnet18", UsageError, "neither a file nor any other model source.*torchvision:NAME"),
        ("nowhere:thing", UsageError, "neither a file nor any other model source"),
        ("nothing.pt", FileError, "does not exist"),
        ("dir/nothing.py:build", FileError, "does not exist"),
        ("timm:no_such_net", UsageError, "timm"),
    ],
)
def test_names_that_mean_nothing(spec, error, message):
    with pytest.raises(error, match=message):
        load_model(spec)


def test_torchvision_names():
    model = load_model("torchvision:squeezenet1_1")
    assert type(model) is torchvision.models.SqueezeNet
    with pytest.raises(UsageError, match="IMAGENET1K_V1"):
        load_model("torchvision:squeezenet1_1", "IMAGENET9K")
    with pytest.raises(FileError, match="does not exist"):
        load_model("torchvision:squeezenet1_1", "nothing.pth")


def test_published_weights(monkeypatch):
    state = {k: v + 1 for k, v in torchvision.models.squeezenet1_1().state_dict().items()}
    weights = torchvision.models.SqueezeNet1_1_Weights
    monkeypatch.setattr(weights, "get_state_dict", lambda self, *args, **kwargs: state)
    for name in ("DEFAULT", "IMAGENET1K_V1"):
        model = load_model("torchvision:squeezenet1_1", name)
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    def offline(self, *args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(weights, "get_state_dict", offline)
    with pytest.raises(FileError, match="DEFAULT cannot be downloaded: no route to host"):
        load_model("torchvision:squeezenet1_1", "DEFAULT")


def test_no_weights_of_a_backbone_are_downloaded():
    model = load_model("torchvision:lraspp_mobilenet_v3_large")  # would fetch one by default
    assert isinstance(model, nn.Module)


def test_old_initialisations_announce_nothing():
    assert isinstance(load_model("torchvision:googlenet"), torchvision.models.GoogLeNet)


def test_timm_names():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    assert isinstance(load_model("timm:test_vit"), timm.models.VisionTransformer)


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match="pip install timm"):
        load_model("timm:resnet18")


def test_which_sources_can_be_built_again():
    assert is_rebuildable("torchvision:resnet18")
    assert is_rebuildable("dir/net.py:build")
    assert not is_rebuildable("model.pt")
    assert not is_rebuildable("timm:")
    assert not is_rebuildable("")


def test_example_inputs():
    (image, tokens), named = parse_input("2x3x4x4, 2x7:int64")
    assert named == {}
    assert image.shape == (2, 3, 4, 4)
    assert image.dtype == torch.float32
    assert tokens.shape == (2, 7)
    assert tokens.dtype == torch.int64
    assert set(tokens.unique().tolist()) <= {0, 1}
    assert torch.equal(image, parse_input("2x3x4x4")[0][0])


def test_example_inputs_by_name():
    (image,), named = parse_input("2x3, input_ids=2x16:int64,attention_mask=2x16:bool")
    assert image.shape == (2, 3)
    assert {name: value.dtype for name, value in named.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.bool,
    }


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(["float32", "float64", "bfloat16", "int32", "int64", "uint8", "bool"]),
)
def test_any_shape_and_dtype(shape, dtype):
    ((tensor,), _) = parse_input("x".join(map(str, shape)) + f":{dtype}")
    assert tensor.shape == tuple(shape)
    assert tensor.dtype == getattr(torch, dtype)


UNREADABLE = (
    "", "3by4", "2x0", "2x3:float99", "-1x3", "2x3:", "2xx3", "2x3:save", "1,", "٣x2", "1e3",
    "a=2x3,2x3", "a=2,a=2", "=2x3", "a=", "a b=2x3", "a=b=2x3",
)  # fmt: skip


@pytest.mark.parametrize("text", UNREADABLE)
def test_inputs_that_do_not_parse(text):
    with pytest.raises(UsageError, match="is no input"):
        parse_input(text)


def test_an_input_larger_than_any_memory():
    with pytest.raises(UsageError, match="can be made here"):
        parse_input("99999999x99999999x99999999")
