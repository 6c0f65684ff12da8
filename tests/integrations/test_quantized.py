"""What is exported, in 8 bits: by torchao and by torch itself."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deadness import close_some
from torch import nn

import l0prune
from benchmarks.quantization import WAYS, off, size
from l0prune.files.cut_layers import PickedLinear

PAGE = Path(__file__).parents[2] / "docs/howto/in-eight-bits.md"


@pytest.fixture(scope="module")
def cut():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    l0prune.gate(model.eval(), torch.randn(2, 64))
    return l0prune.export(close_some(model, seed=1)).module


@pytest.mark.parametrize("name", [name for name in WAYS if name != "float32"])
def test_a_cut_module_in_8_bits(cut, name):
    if "torchao" in name:
        pytest.importorskip("torchao", reason="torchao is not installed")
    assert isinstance(cut[0], PickedLinear)
    before = copy.deepcopy(cut.state_dict())
    quantized = WAYS[name](cut)
    # torch goes by the class, and leaves the first layer as it is
    assert size(quantized) < size(cut) / (3 if "torchao" in name else 2)
    assert 0 < off(cut, quantized, torch.randn(50, 64)) < 0.03
    assert all(torch.equal(cut.state_dict()[key], tensor) for key, tensor in before.items())


def test_the_code_of_the_page_runs(cut):
    pytest.importorskip("torchao", reason="torchao is not installed")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "torchao" in block)
    found = {"small": SimpleNamespace(module=cut)}
    exec(code, found)
    assert size(found["quantized"]) < size(cut) / 3
    assert off(cut, found["quantized"], torch.randn(50, 64)) < 0.03
