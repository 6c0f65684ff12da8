"""LoRA of peft's around a gated model's layers, and under them."""

from __future__ import annotations

import pytest
import torch
from deadness import close_some
from torch import nn

import l0prune
from benchmarks import zoo
from l0prune.errors import UsageError

peft = pytest.importorskip("peft", reason="pip install peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages, about each other


def with_adapters(model):
    wanted = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    return peft.get_peft_model(model, wanted).eval()


@pytest.mark.slow
def test_adapters_first_are_cut_and_merge():
    model, (args, kwargs) = zoo.build("transformers", "bert")
    adapted = with_adapters(model)
    l0prune.gate(adapted, args, kwargs, branches=False)
    close_some(adapted, seed=1)
    small = l0prune.export(adapted)
    assert type(small.module) is peft.PeftModel
    expected = adapted(**kwargs).last_hidden_state
    torch.testing.assert_close(small.module(**kwargs).last_hidden_state, expected)
    merged = small.module.merge_and_unload()
    assert type(merged) is type(model)
    torch.testing.assert_close(merged(**kwargs).last_hidden_state, expected)
    query = merged.encoder.layer[0].attention.self.query
    assert query.weight.shape[0] == query.out_features < 32


def test_adapters_on_a_gated_model_are_refused_with_the_order_that_works():
    model, (args, kwargs) = zoo.build("transformers", "bert")
    adapted = with_adapters(l0prune.gate(model, args, kwargs))
    with pytest.raises(UsageError, match=r"adapters .* put them on first, and gate the model then"):
        l0prune.export(adapted)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlps, self.out = nn.ModuleList([Mlp(), Mlp()]), nn.Linear(8, 3)

    def forward(self, x):
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.out(x)


@pytest.mark.slow
def test_adapters_merge_where_a_branch_is_gone():
    """Also those that peft has put on layers inside a module that is skipped."""
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(4, 8)
    l0prune.gate(model, (x,))
    bank = l0prune.gates(model)
    is_open = torch.ones(bank.plan.size, dtype=torch.bool)
    is_open[next(a for a in bank.plan.axes if a.kind == "branch").slice] = False
    bank.set_open(is_open)
    small = l0prune.export(model)
    assert small.rebuilt
    wanted = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    adapted = peft.get_peft_model(small.module, wanted).eval()
    expected = adapted(x)
    assert not torch.allclose(expected, model(x))
    torch.testing.assert_close(adapted.merge_and_unload()(x), expected)
