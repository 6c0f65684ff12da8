import torch
from torch import nn

from l0prune.features.unlabelled.uses import uses_of


class Levels(nn.Module):
    """One convolution on maps of two sizes, with a norm for each, or one for both."""

    def __init__(self, norms):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(norms))

    def forward(self, x):
        maps = x, nn.functional.avg_pool2d(x, 2)
        return [self.norms[n % len(self.norms)](self.conv(m)) for n, m in enumerate(maps)]


def test_a_norm_belongs_to_a_layer_whose_every_call_it_reads():
    for norms in (1, 2):
        (reader,) = uses_of(Levels(norms).eval(), torch.randn(2, 3, 8, 8)).readers.values()
        assert (reader.norm is not None) == (norms == 1)
        assert reader.calls == 2
        assert reader.rows == 2 * (64 + 16)


def test_parts_of_one_parameter_are_readers_of_their_own():
    layer = nn.TransformerDecoderLayer(8, 2, 8, batch_first=True).eval()
    found = uses_of(layer, (torch.randn(2, 3, 8), torch.randn(2, 5, 8)))
    name = "multihead_attn.in_proj_weight"
    parts = {view: reader for view, reader in found.readers.items() if view.name == name}
    assert sorted(view.begin for view in parts) == [0, 64]
    assert all(reader.is_alone and reader.has_bias for reader in parts.values())
    biases = {reader.bias or reader.added for reader in parts.values()}
    assert {bias.name for bias in biases} == {"multihead_attn.in_proj_bias"}
    assert {bias.begin for bias in biases} == {0, 8}


def test_a_vector_that_is_added_belongs_to_the_product_unless_it_is_read_elsewhere():
    class Adds(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
            self.again = again

        def forward(self, x):
            x = x @ self.weight + self.bias
            return x * self.bias if self.again else x

    for again in (False, True):
        (reader,) = uses_of(Adds(again), torch.randn(2, 5, 4)).readers.values()
        assert (reader.added is None) == again


def test_a_bias_of_two_layers_belongs_to_none():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    assert {r.bias for r in uses_of(Both().eval(), torch.randn(3, 4)).readers.values()} == {None}


def test_a_matrix_and_its_transpose_read_the_same_elements():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 6)

        def forward(self, x):
            return torch.relu(self.a(self.b(x))) @ self.a.weight

    readers = uses_of(Tied().eval(), torch.randn(3, 6)).readers
    assert [(view.name, reader.is_alone) for view, reader in readers.items()] == [
        ("b.weight", True), ("a.weight", False), ("a.weight", False)
    ]  # fmt: skip
