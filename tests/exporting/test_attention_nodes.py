"""Attention in an ONNX file: the fewest nodes, and what torch computes where all is hidden."""

import onnx
import pytest
import torch
from deadness import close_some, randomise
from differences import ROUNDED, onnx_difference
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import l0prune
from l0prune.exporting.onnx.operators import written_as_products

SOME = torch.eye(7).bool()
SOME[3] = False  # one query may look at nothing


class Attention(nn.Module):
    def __init__(self, mask=None, **options):
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 5)
        self.mask, self.options = mask, options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, self.mask, **self.options)
        return self.proj(y.transpose(1, 2).flatten(2))


def program(model, x):
    shapes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(model.eval(), (x,), dynamic_shapes=shapes)


@pytest.mark.parametrize("mask", [None, torch.randn(7, 7), SOME], ids=["none", "added", "boolean"])
@pytest.mark.one_in(2)
def test_it_is_the_same_function(mask):
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    given = program(Attention(mask, scale=0.3).double(), x)
    before = [str(node.target) for node in given.graph.nodes]
    made = written_as_products(given)
    targets = [str(node.target) for node in made.graph.nodes]
    assert "aten.scaled_dot_product_attention.default" not in targets
    assert [str(node.target) for node in given.graph.nodes] == before
    torch.testing.assert_close(made.module()(x), given.module()(x), rtol=1e-12, atol=1e-12)
    for name, tensor in given.state_dict.items():  # a copy of the graph, not of its weights
        assert made.state_dict[name] is tensor


def test_causal_attention_stays_for_the_exporter():
    given = program(Attention(is_causal=True), torch.randn(2, 7, 12))
    assert written_as_products(given) is given


@pytest.mark.parametrize("mask", [None, SOME], ids=["none", "boolean"])
@pytest.mark.slow
def test_no_size_is_read_off_at_run_time_and_a_query_may_look_at_nothing(mask, tmp_path):
    """Of such a query torch answers zero; the exporter by itself an average of all values."""
    x = torch.randn(2, 7, 12)
    model = close_some(l0prune.gate(randomise(Attention(mask)).eval(), (x,), exclude="*.in"))
    small = l0prune.export(model)
    small.save_onnx(tmp_path / "model.onnx")
    kinds = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert mask is not None or not kinds & {"Shape", "Gather", "Concat"}
    assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= ROUNDED
