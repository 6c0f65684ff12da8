"""Bytes of tensors that ``shrink`` holds at most, beside the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l0prune
from tests.held import Held


@pytest.mark.filterwarnings("ignore:l0prune. outputs differ")
@pytest.mark.slow
def test_weights_are_shared_until_they_are_replaced_and_the_result_has_its_own():
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)
    model, x = nn.Sequential(*layers).eval(), torch.randn(80, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"recover": 1, "batch_size": 8, "exclude": ["2"], "round_to": 1}
    for asked in ({"budget": "params=0.6"}, {"tolerance": "20%", "measure": "macs"}):
        small = l0prune.shrink(model, x, **asked, **options)
        now = model.state_dict()
        assert all(torch.equal(before[name], tensor) for name, tensor in now.items())
        memory = {tensor.untyped_storage().data_ptr() for tensor in now.values()}
        its = {p.untyped_storage().data_ptr() for p in small.module.state_dict().values()}
        assert not memory & its


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:l0prune. outputs differ")
def test_a_llama_is_shrunk_beside_one_copy_of_its_weights():
    """As many tokens for the weights as 64 windows of 1,024 are for 7 billion of them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    with Held(model) as held:
        small = l0prune.shrink(
            model, torch.randint(256, (64, 12)), "params=0.5", batch_size=8, round_to=1,
            allow_worse_than_mean=True,
        )  # fmt: skip
    assert small.params < 0.51 * sum(p.numel() for p in model.parameters())
    # A copy, activations of both networks at one place, and sums of products of one layer.
    assert held.above < 2.2
