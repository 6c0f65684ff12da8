"""The file that loads a smaller model where l0prune is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from deadness import close_some, randomise

import l0prune

# Code of a user's own, with all that a class may become: other norms, picked inputs, heads of
# torch's own attention, sizes that are read off an input, tied weights, a tensor in no state_dict.
MODEL = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 3, C // 3).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.attention = nn.Linear(6, 12), nn.LayerNorm(12), Attention()
        self.torchs = nn.MultiheadAttention(12, 3, batch_first=True)
        self.scale = nn.Buffer(torch.linspace(1, 2, 12), persistent=False)
        self.head, self.again = nn.Linear(60, 12), nn.Linear(60, 12)
        self.again.weight = self.head.weight

    def forward(self, x):
        x = self.up(x)
        x = x + self.attention(self.norm(x))
        x = self.scale * (x + self.torchs(x, x, x, need_weights=False)[0])
        return self.head(x.flatten(1)) + self.again(x.flatten(1))
"""

SCRIPT = """
import sys
sys.modules["l0prune"] = None  # importing it is an error
sys.path[:0] = [{0!r}, {1!r}]
import torch
from l0prune_model import resize
from net import Net
torch.manual_seed(1)
model = Net().double().eval()
x, expected = torch.load({2!r})
assert resize(model, {1!r}) is model
assert model.again.weight is model.head.weight
assert torch.equal(model(x), expected)
again = Net().double()
again.up = torch.nn.Linear(6, 13)
try:
    resize(again, {1!r})
except ValueError as error:
    print(error)
"""


@pytest.fixture
def dense(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    from net import Net  # type: ignore[import-not-found]

    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    model = l0prune.gate(randomise(Net()).double().eval(), x, branches=False)
    yield l0prune.export(close_some(model, seed=1)), x
    monkeypatch.delitem(sys.modules, "net")


@pytest.mark.slow
def test_a_folder_is_loaded_without_l0prune(dense, tmp_path):
    dense, x = dense
    kinds = set(dense._manifest["layers"].values())
    assert {"CutLayerNorm", "PickedLinear", "CutAttention", "GivenSizes"} <= kinds
    said = dense.save_pretrained(tmp_path / "small", code=True)
    assert "l0prune_model.py" in said
    with torch.no_grad():
        torch.save((x, dense.module(x)), tmp_path / "answer.pt")
    script = SCRIPT.format(str(tmp_path), str(tmp_path / "small"), str(tmp_path / "answer.pt"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is of another model: up.weight is not [12, 6] in this" in done.stdout
    dense.save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small" / "l0prune_model.py").exists()
