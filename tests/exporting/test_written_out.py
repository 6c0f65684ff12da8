"""Operators in other terms: the same numbers, and sizes that are free."""

import pytest
import torch
import torch.nn.functional as F
from networks import Fn
from torch.export import Dim

from l0prune.exporting.onnx.operators import _scatter_mean, written_out

ATEN = torch.ops.aten


def program(forward, *args, free=None):
    shapes = {"args": tuple(free)} if free else None
    with torch.no_grad():
        return torch.export.export(Fn(lambda m, *a: forward(*a)), args, dynamic_shapes=shapes)


def targets(made):
    return {node.target for node in made.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.one_in(3)
def test_distances(p):
    a, b = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    b[0, 0] = a[0, 0]
    made = written_out(program(lambda a, b: torch.cdist(a, b, p), a, b))
    assert ATEN.cdist.default not in targets(made)
    torch.testing.assert_close(made.module()(a, b), torch.cdist(a, b, p))


SETTINGS = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.one_in(6)
def test_filters_of_each_examples_own(settings, is_transposed):
    more = {"output_padding": 1} if is_transposed and settings.get("stride") == 2 else {}

    def forward(x, weight, bias):
        n = x.shape[0]
        way = F.conv_transpose2d if is_transposed else F.conv2d
        rows, filters = x.reshape(1, -1, *x.shape[2:]), weight.flatten(0, 1)
        y = way(rows, filters, bias.flatten(), groups=n, **settings, **more)
        return y.view(n, -1, *y.shape[2:])

    def given(n):
        between = (2, 4) if is_transposed else (4, 2)
        x, bias = torch.randn(n, 2, 7, 8), torch.randn(n, 4)
        return [each.double() for each in (x, torch.randn(n, *between, 3, 2), bias)]

    n = Dim("n")
    made = written_out(program(forward, *given(2), free=[{0: n}] * 3))
    assert not targets(made) & {ATEN.conv2d.default, ATEN.conv_transpose2d.input}
    for size in (2, 5):
        inputs = given(size)
        torch.testing.assert_close(made.module()(*inputs), forward(*inputs))


def test_what_onnx_has_stays_as_it_is():
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 2, 3, 3)
    given = program(lambda x, weight: F.conv2d(x, weight, groups=2), x, weight)
    assert written_out(given) is given


def test_others_of_the_same_kind_compute_what_they_did():
    def forward(x, weight, other):
        y = F.conv2d(x, other, stride=2, groups=2)
        own = F.conv2d(y.reshape(1, -1, *y.shape[2:]), weight.flatten(0, 1), groups=x.shape[0])
        return own.view(x.shape[0], -1, *own.shape[2:])

    sizes = (2, 4, 7, 7), (2, 3, 6, 2, 2), (6, 2, 3, 3)
    given = tuple(torch.randn(size, dtype=torch.float64) for size in sizes)
    n = Dim("n")
    made = written_out(program(forward, *given, free=[{0: n}, {0: n}, None]))
    torch.testing.assert_close(made.module()(*given), forward(*given))


@pytest.mark.parametrize("include_self", [True, False])
def test_a_mean_of_what_is_scattered_to_one_place(include_self):
    x, given = torch.randn(3, 5, 4), torch.randn(3, 7, 4)
    index = torch.randint(0, 4, (3, 6, 4))  # nothing comes to the last place
    arguments = (x, 1, index, given, "mean")
    expected = x.scatter_reduce(*arguments[1:], include_self=include_self)
    torch.testing.assert_close(_scatter_mean(*arguments, include_self=include_self), expected)
