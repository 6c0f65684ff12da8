"""Model sources and example inputs by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l0prune.errors import FileError, UsageError
from l0prune.models import is_rebuildable, load_model, parse_input


def test_a_factory_in_a_file(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(3, 2)\n"
    )
    model = load_model(f"{tmp_path}/net.py:build")
    assert isinstance(model, nn.Linear)


def test_weights_with_and_without_data_parallel_prefix(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(3, 2)\n"
    )
    state = nn.Linear(3, 2).state_dict()
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "w.pt")
    model = load_model(f"{tmp_path}/net.py:build", str(tmp_path / "w.pt"))
    assert torch.equal(model.weight, state["weight"])


def test_weights_that_do_not_fit(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(3, 2)\n"
    )
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match="do not fit"):
        load_model(f"{tmp_path}/net.py:build", str(tmp_path / "w.pt"))


def test_a_state_dict_without_its_class(tmp_path):
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    with pytest.raises(FileError, match=r"without the class.*--model path.py:factory"):
        load_model(str(tmp_path / "w.pt"))


def test_a_factory_that_is_not_there(tmp_path):
    (tmp_path / "net.py").write_text("def other():\n    pass\n")
    with pytest.raises(UsageError, match="it defines other"):
        load_model(f"{tmp_path}/net.py:build")


def test_a_file_that_fails_on_import(tmp_path):
    (tmp_path / "net.py").write_text("1 / 0\n")
    with pytest.raises(FileError, match="ZeroDivisionError"):
        load_model(f"{tmp_path}/net.py:build")


@pytest.mark.parametrize("spec", ["torchvision:resnet_of_dreams", "nowhere:thing"])
def test_names_that_mean_nothing(spec):
    with pytest.raises(UsageError):
        load_model(spec)


def test_which_sources_can_be_built_again():
    assert is_rebuildable("torchvision:resnet18")
    assert is_rebuildable("dir/net.py:build")
    assert not is_rebuildable("model.pt")


def test_example_inputs():
    image, tokens = parse_input("2x3x4x4, 2x7:int64")
    assert image.shape == (2, 3, 4, 4)
    assert image.dtype == torch.float32
    assert tokens.shape == (2, 7)
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("text", ["", "3by4", "2x0", "2x3:float99", "-1x3"])
def test_inputs_that_do_not_parse(text):
    with pytest.raises(UsageError, match="is no input"):
        parse_input(text)
