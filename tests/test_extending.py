"""A gate, a penalty and a score as docs/extending.md shows them, in use."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import l0prune
from l0prune.features.penalties.shrinkage import PENALTIES
from l0prune.gating.kinds.base import KINDS
from l0prune.selection.scores import SCORES

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture
def shown(request):
    """Execute the code below a heading of the page; what it registers is gone afterwards."""
    registries = KINDS, PENALTIES, SCORES
    before = [dict(each) for each in registries]
    heading = re.escape(request.param)
    (code,) = re.findall(rf"## {heading}\n[^#]*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope = {"__name__": PAGE.name}
    exec(compile(code, PAGE.name, "exec"), scope)
    yield scope
    for registry, known in zip(registries, before, strict=True):
        for name in registry.keys() - known.keys():
            del registry[name]


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, l0prune.load_data("digits")


def difference(model, small, x):
    with torch.no_grad():
        return float((model.eval()(x) - small.module(x)).abs().max())


@pytest.mark.parametrize("shown", ["A kind of gate"], indirect=True)
def test_the_gate_learns_and_what_it_closes_is_cut(shown, network):
    model, data = network
    model = nn.Sequential(nn.Flatten(), *model)
    l0prune.gate(model, (data.train.inputs[:2],), gate=shown["StraightThrough"]())
    log_alpha = l0prune.gates(model).log_alpha
    before = log_alpha.detach().clone()
    l0prune.finetune(model, data, budget="macs=0.5", epochs=2, progress=False)
    assert not torch.equal(log_alpha, before)
    small = l0prune.export(model)
    assert small.macs <= 0.5 * small.macs_before
    assert difference(model, small, data.test.inputs) < 1e-5


@pytest.mark.parametrize("shown", ["A penalty on weights"], indirect=True)
def test_the_penalty_shrinks_groups_of_weights(shown, network):
    model, data = network
    model = nn.Sequential(nn.Flatten(), *model)
    l0prune.gate(model, (data.train.inputs[:2],))
    before = float(model[1].weight.detach().norm())
    l0prune.finetune(model, data, penalty="ridge", lam=1.0, epochs=1, lr=1e-3, progress=False)
    assert float(model[1].weight.detach().norm()) < 0.9 * before


@pytest.mark.parametrize("shown", ["A score"], indirect=True)
def test_the_score_is_the_mean_slope(shown, network):
    model, data = network
    x, y = data.train.inputs[:32].flatten(1), data.train.targets[:32]
    dense = copy.deepcopy(model)
    l0prune.gate(model, (x[:2],))
    found = l0prune.score(model, "slope", [(x, y)], normalise="none")
    first = dense[:2](x)
    z = torch.ones(32, requires_grad=True)
    loss = nn.functional.cross_entropy(dense[2](first * z), y)
    (expected,) = torch.autograd.grad(loss, z)
    expected = expected.abs().to(found)
    torch.testing.assert_close(found[:32] / found[:32].sum(), expected / expected.sum())
