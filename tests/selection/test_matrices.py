import pytest
import torch
from torch import nn

from l0prune.features.unlabelled.lockstep import Weights, forwards
from l0prune.selection.matrices import product_of


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 2, 3))

    def forward(self, x):
        return torch.einsum("bsd,dhk->bshk", x, self.weight)


class OnTheLeft(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return torch.mm(self.weight, x.T)


LAYERS = {
    "linear": (lambda: nn.Linear(5, 7), (2, 3, 5)),
    "linear without a bias": (lambda: nn.Linear(5, 7, bias=False), (4, 5)),
    "strided, dilated, in groups": (
        lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1, dilation=2, groups=2),
        (2, 6, 11, 12),
    ),
    "1d": (lambda: nn.Conv1d(6, 8, 3, padding="same"), (2, 6, 11)),
    "3d": (lambda: nn.Conv3d(2, 4, (1, 2, 3)), (2, 2, 5, 6, 7)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), (2, 6, 8, 8)),
    "transposed, in groups": (
        lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 6, 5, 7),
    ),
    "transposed, dilated": (lambda: nn.ConvTranspose1d(4, 6, 4, 2, 1, dilation=2), (2, 4, 9)),
    "einsum": (Einsum, (2, 4, 5)),
    "weight on the left": (OnTheLeft, (3, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_the_matrix_are_what_the_operator_gives(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    with forwards(layer, [x], Weights(layer)) as (forward,):
        read = forward.advance()
        assert read.name == "weight"
        rows, matrix = read.product.inputs(read.args, None), read.product.matrix(read.weight)
        product = rows @ matrix
        if read.bias is not None:
            product = product + read.bias.reshape(len(matrix), 1, -1)
        outputs = read.product.outputs(read.run(), None)
        torch.testing.assert_close(product, outputs)
        assert torch.equal(read.product.unmatrix(matrix).reshape(read.weight.shape), read.weight)
        some = torch.randperm(rows.shape[1])[:3]
        assert torch.equal(read.product.inputs(read.args, some), rows[:, some])
        assert torch.equal(read.product.outputs(read.out, some), outputs[:, some])
        assert forward.advance() is None
        torch.testing.assert_close(forward.output, layer(x))


def test_other_operators_are_no_products():
    weight = torch.zeros(2, 2)
    assert product_of(torch.ops.aten.mul.Tensor, (weight, weight), lambda _: True) is None
    assert product_of(torch.ops.aten.mm.default, (weight, weight), lambda _: True) is None
