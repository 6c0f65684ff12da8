"""Branches on values that torch takes only to be quicker do not stop a capture."""

from itertools import product

import pytest
import torch
from deadness import close_some, randomise
from torch import nn

import l0prune

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


class Masked(nn.Module):
    """Gets its mask as an input, or has it as a buffer."""

    def __init__(self, layers: nn.Module, *, constant: bool):
        super().__init__()
        self.layers, self.out = layers, nn.Linear(8, 3)
        self.register_buffer("mask", CAUSAL if constant else None)

    def forward(self, x, mask=None):
        mask = mask if self.mask is None else self.mask
        return self.out(self.run(x, mask))


class Encoder(Masked):
    def __init__(self, **kwargs):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, 1), **kwargs)

    def run(self, x, mask):
        return self.layers(x, mask=mask)


class Decoder(Masked):
    def __init__(self, **kwargs):
        layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        super().__init__(nn.TransformerDecoder(layer, 1), **kwargs)

    def run(self, x, mask):
        return self.layers(x, x.flip(1), tgt_mask=mask)


@pytest.fixture
def _fast_path(request):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


# By default each value with each value of the others, which are half of all combinations.
COMBINATIONS = [
    pytest.param(
        *each, marks=[pytest.mark.slow] if (each[0] is Encoder) ^ each[1] ^ each[2] else []
    )
    for each in product([Encoder, Decoder], [False, True], [False, True])
]


@pytest.mark.usefixtures("_fast_path")
@pytest.mark.parametrize(("kind", "constant", "_fast_path"), COMBINATIONS, indirect=["_fast_path"])
def test_transformers_with_a_mask_are_captured_as_a_whole(kind, constant):
    torch.manual_seed(0)
    model, x = randomise(kind(constant=constant)).eval().double(), torch.randn(2, 5, 8).double()
    args = (x,) if constant else (x, CAUSAL.double())
    l0prune.gate(model, args)
    assert l0prune.gates(model).plan.parts == ("",)
    dense = l0prune.export(close_some(model))
    assert dense.params < dense.params_before
    for other in (CAUSAL, CAUSAL.T):
        given = (torch.randn(3, 5, 8).double(), *((other.double(),) if not constant else ()))
        with torch.no_grad():
            found, expected = dense.module(*given), model(*given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_torch_has_its_own_way_back_afterwards():
    before = nn.modules.transformer._detect_is_causal_mask
    l0prune.survey(Encoder(constant=True), torch.randn(2, 5, 8))
    assert nn.modules.transformer._detect_is_causal_mask is before
