"""Networks with input gates in files."""

import pytest
import torch
from input_gated import POINTS, points, said
from torch import nn

import l0prune


def small_network():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8))
    return nn.Sequential(nn.Linear(6, 8), block, nn.Linear(8, 3)).eval()


@pytest.mark.slow
def test_a_gated_one_is_loaded_into_a_module(tmp_path):
    model = l0prune.gate(points(), (POINTS,))
    with torch.no_grad():
        l0prune.gates(model).log_alpha.add_(torch.randn(l0prune.gates(model).plan.size))
    l0prune.save(model, tmp_path / "model.pt")
    again = l0prune.load(tmp_path / "model.pt", points(skip=True, shape=1.0))
    assert torch.equal(again(POINTS), model(POINTS))


def test_one_of_ordinary_layers_comes_back_by_itself(tmp_path):
    model = said(l0prune.add_input_gates(small_network(), (POINTS,), at="1", price=0.5, shape=0.1))
    l0prune.save(model, tmp_path / "plain.pt")
    loaded = l0prune.load(tmp_path / "plain.pt")
    assert torch.equal(loaded(POINTS), model(POINTS))
    assert loaded.facts == model.facts
    assert not loaded.training


@pytest.mark.parametrize("heads", [None, [nn.Sequential(nn.Flatten(), nn.Linear(8, 3))]])
def test_exits_on_one_come_back_with_it(heads, tmp_path):
    inner = said(l0prune.add_input_gates(small_network(), (POINTS,), at="1"))
    model = l0prune.add_exits(inner, (POINTS,), at="network.1", heads=heads).eval()
    l0prune.gate(model, (POINTS,))
    l0prune.save(model, tmp_path / "plain.pt")
    loaded = l0prune.load(tmp_path / "plain.pt")
    assert type(loaded.network) is type(inner)
    assert torch.equal(loaded(POINTS).logits, model(POINTS).logits)
    assert torch.equal(loaded(POINTS).exits[0], model(POINTS).exits[0])
