"""Attention with fewer and smaller heads, against torch's own with weights of zero there."""

from __future__ import annotations

import pytest
import torch
from deadness import close_some, randomise
from differences import difference
from torch import nn

import l0prune
from l0prune.files.cut_layers import CutAttention


class Around(nn.Module):
    """Attention between Linear layers, with whatever else its forward is given."""

    def __init__(self, attention, size=16, other=16, **given):
        super().__init__()
        self.a, self.b = nn.Linear(6, size), nn.Linear(6, other)
        self.attention, self.out, self.given = attention, nn.Linear(size, 3), given

    def forward(self, x):
        q, kv = self.a(x), self.b(x)
        result, weights = self.attention(q, kv, kv, **self.given)
        return self.out(result), weights


def causal(length=5):
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


PADDING = torch.tensor([[False, False, True, False, True], [False] * 5])
KINDS = {
    "of weights": ({}, {}),
    "of one head each": ({}, {"average_attn_weights": False}),
    "without weights": ({}, {"need_weights": False}),
    "batch second": ({"batch_first": False}, {}),
    "without bias": ({"bias": False}, {"need_weights": False}),
    "keys of another size": ({"kdim": 10, "vdim": 10}, {"need_weights": False}),
    "causal": ({}, {"attn_mask": causal(), "is_causal": True, "need_weights": False}),
    "a mask for each head": ({}, {"attn_mask": torch.rand(8, 5, 5) < 0.3}),
    "padded": ({}, {"key_padding_mask": PADDING}),
    "padded and masked": ({}, {"key_padding_mask": PADDING, "attn_mask": causal() < 0}),
}


# By default those that differ most.
BY_DEFAULT = {"batch second", "keys of another size", "padded and masked"}
SOME = [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.slow) for n in KINDS]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.one_in(2)
def test_it_computes_what_the_gated_one_does(name):
    torch.manual_seed(0)
    made, given = KINDS[name]
    attention = nn.MultiheadAttention(16, 4, **{"batch_first": True, **made})
    given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    if "attn_mask" in given and given["attn_mask"].ndim == 3:
        given["attn_mask"][..., 0] = False  # or nothing is left to attend to
    model = randomise(Around(attention, other=made.get("kdim", 16), **given)).double().eval()
    is_masked = any("mask" in key for key in given)
    shape = (5, 2, 6) if not attention.batch_first else (2, 5, 6)
    x = torch.randn(shape, dtype=torch.float64)
    close_some(l0prune.gate(model, x), seed=1)
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    cut = small.module.attention
    assert type(cut) is CutAttention
    assert cut.num_heads * cut.head_dim < 16
    if is_masked and "causal" not in name:
        torch.testing.assert_close(small.module(x), model(x), rtol=1e-10, atol=1e-10)
    else:
        assert difference(model, small, x) <= 1e-10


def test_one_example_without_a_batch():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    torch.manual_seed(0)
    cut = nn.MultiheadAttention(4, 2, batch_first=True)
    cut.load_state_dict(attention.state_dict())
    cut.__class__ = CutAttention
    cut.scale = cut.head_dim**-0.5
    x = torch.randn(5, 4)
    mask = torch.tensor([False, True, False, False, False])
    for expected, found in zip(
        attention(x, x, x, key_padding_mask=mask),
        cut(x, x, x, key_padding_mask=mask),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_dropout_falls_on_the_weights():
    cut = nn.MultiheadAttention(8, 2, dropout=1.0, batch_first=True)
    cut.__class__ = CutAttention
    cut.scale = 0.5
    x = torch.randn(2, 3, 8)
    for need_weights in (True, False):
        result, _ = cut.train()(x, x, x, need_weights=need_weights)
        torch.testing.assert_close(result, cut.out_proj.bias.expand(2, 3, 8))


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).eval()


def cut_encoder(model, width=16, **options):
    """The export, after its class was found to compute the same."""
    model, x = randomise(model).double().eval(), torch.randn(2, 5, width, dtype=torch.float64)
    close_some(l0prune.gate(model, x, **options), seed=1)
    small = l0prune.export(model)
    assert small.rebuilt, small.note
    assert difference(model, small, x) <= 1e-10
    return small


def test_an_encoder_layer_keeps_its_class():
    """Its own fast way reads sizes off the attention, and is not taken."""
    inner = encoder(enable_nested_tensor=False)
    cut_encoder(nn.Sequential(nn.Linear(6, 16), inner, nn.Linear(16, 3)), width=6)


def test_an_encoder_whose_attention_stays_whole_runs_the_layers_that_it_has():
    dense = cut_encoder(encoder(enable_nested_tensor=False), include="*linear1*")
    assert type(dense.module.layers[0].linear1).__name__ == "PickedLinear"


@pytest.mark.slow
def test_an_encoder_that_is_the_whole_model_picks_single_inputs():
    dense = cut_encoder(encoder(enable_nested_tensor=False), branches=False)
    attention = dense.module.layers[0].self_attn
    assert len(attention.kept) == attention.in_proj_weight.shape[1] < 16


@pytest.mark.slow
def test_an_encoder_that_packs_padded_tokens_becomes_a_graph():
    """Its class would run its layers on nested tensors, for masks that no example need have."""
    model, x = randomise(encoder()), torch.randn(2, 5, 16)
    close_some(l0prune.gate(model, x), seed=1)
    assert not l0prune.export(model).rebuilt


@pytest.mark.parametrize("include", ["*heads*", "*"])
@pytest.mark.slow
def test_a_file_of_it_loads(include, tmp_path):
    model, x = randomise(encoder(enable_nested_tensor=False)), torch.randn(2, 5, 16)
    close_some(l0prune.gate(model, x, include=include), seed=1)
    small = l0prune.export(model)
    small.save_pretrained(tmp_path / "small")
    loaded = l0prune.resize(encoder(enable_nested_tensor=False), tmp_path / "small")
    kinds = [type(each.layers[0].self_attn).__name__ for each in (loaded, small.module)]
    assert kinds == [("PickedAttention" if include == "*" else "CutAttention")] * 2
    torch.testing.assert_close(loaded(x), small.module(x), rtol=0, atol=0)
    torch.testing.assert_close(loaded(x), model(x))
