"""Branches on values that torch takes only to be quicker: what they leave is captured."""

from itertools import product

import pytest
import torch
from deadness import close_some, randomise
from differences import run_onnx
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
@pytest.mark.one_in(4)
def test_transformers_with_a_mask_are_captured_as_a_whole(kind, constant):
    torch.manual_seed(0)
    model, x = randomise(kind(constant=constant)).eval().double(), torch.randn(2, 5, 8).double()
    args = (x,) if constant else (x, CAUSAL.double())
    l0prune.gate(model, args)
    assert l0prune.gates(model).plan.parts == ("",)
    small = l0prune.export(close_some(model))
    assert small.params < small.params_before
    for other in (CAUSAL, CAUSAL.T):
        given = (torch.randn(3, 5, 8).double(), *((other.double(),) if not constant else ()))
        with torch.no_grad():
            found, expected = small.module(*given), model(*given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_torch_has_its_own_way_back_afterwards():
    before = nn.modules.transformer._detect_is_causal_mask
    l0prune.survey(Encoder(constant=True), torch.randn(2, 5, 8))
    assert nn.modules.transformer._detect_is_causal_mask is before


class Padded(nn.Module):
    """Averages over all tokens, so that what stands at the padding counts."""

    def __init__(self, *, nested, norm):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        norm = nn.LayerNorm(8) if norm else None
        self.layers = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=nested)
        self.out = nn.Linear(8, 3)

    def forward(self, x, padding):
        return self.out(self.layers(x, src_key_padding_mask=padding).mean(1))


def padding(*lengths, size=5):
    return torch.arange(size) >= torch.tensor(lengths)[:, None]


OTHERS = [padding(2), padding(3, 5), padding(5, 5), padding(1, 4, 3).flip(1)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.slow
@pytest.mark.parametrize(("nested", "norm"), [(True, True), (True, False), (False, True)])
def test_padding_that_comes_last_is_zero_where_torch_packs_tokens(nested, norm, tmp_path):
    torch.manual_seed(0)
    model = randomise(Padded(nested=nested, norm=norm)).eval()
    x, lengths = torch.randn(3, 5, 8), padding(2, 5, 4)
    with torch.no_grad():
        packed = model(x, lengths)
    assert nested != torch.allclose(packed, model(x, lengths), atol=1e-3)  # with gradients
    l0prune.gate(model, (x, lengths))
    small = l0prune.export(close_some(model))
    assert small.params < small.params_before
    (file,) = small.save_onnx(tmp_path / "model.onnx")
    for mask in (lengths, *OTHERS):
        x = torch.randn(len(mask), 5, 8)
        with torch.no_grad():
            found, expected = small.module(x, mask), model(x, mask)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(run_onnx(file, x, mask)[0], expected)
