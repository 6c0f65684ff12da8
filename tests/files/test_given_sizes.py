"""Modules whose code is given its sizes: each way to write a call, and what is not one."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from round_trips import through_pickle
from torch import nn

from l0prune.files.given_sizes import (
    GIVEN,
    PADDED,
    GivenSizes,
    PaddedNorm,
    are_sizes_of_calls,
    are_whole_sizes,
)

X = torch.arange(24.0).view(2, 3, 4)


class Code(nn.Module):
    """Its forward is the function that it is given."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def forward(self, x, *, times=1):
        return self.code(x)


def given(code, *calls):
    module = Code(code)
    module.__class__ = GivenSizes.mixed_into(Code)
    setattr(module, GIVEN, [list(call) for call in calls])
    return module


REGROUPED = [
    lambda x: x.reshape(2, 12),
    lambda x: x.reshape((2, 12)),
    lambda x: x.reshape(shape=(2, 12)),
    lambda x: torch.reshape(x, (2, 12)),
    lambda x: torch.reshape(x, shape=[2, 12]),
]


@pytest.mark.parametrize("code", REGROUPED)
def test_reshape_is_given_the_size_that_is_known(code):
    assert given(code, ("reshape", 2, [None, 6]))(X[:, :, :2]).shape == (2, 6)


@pytest.mark.parametrize(
    ("code", "call", "shape"),
    [
        (lambda x: x.view(24), ("view", 1, [12]), (12,)),
        (lambda x: x.view(size=(2, 12)), ("view", 2, [None, 6]), (2, 6)),
        (lambda x: x[:1].expand(7, -1, -1), ("expand", 3, [5, None, None]), (5, 3, 2)),
        (lambda x: x.unflatten(2, (2, 2)), ("unflatten", 2, [1, None]), (2, 3, 1, 2)),
        (lambda x: torch.unflatten(x, 2, (2, 2)), ("unflatten", 2, [1, None]), (2, 3, 1, 2)),
        (lambda x: x.new_zeros(2, 4), ("new_zeros", 2, [None, 2]), (2, 2)),
        (lambda x: torch.zeros(2, 4), ("zeros", 2, [None, 2]), (2, 2)),
        (lambda x: torch.full((2, 4), 1.0), ("full", 2, [None, 2]), (2, 2)),
    ],
)
def test_other_functions_that_take_sizes(code, call, shape):
    assert given(code, call)(X[:, :, :2].contiguous()).shape == shape


@pytest.mark.parametrize(
    ("code", "count"),
    [
        (lambda x: x.split(2, dim=2), 1),
        (lambda x: torch.split(x, 2, 2), 1),
        (lambda x: torch.split(x, split_size_or_sections=2, dim=2), 1),
        (lambda x: x.split([2, 2], dim=2), 2),
    ],
)
def test_pieces_of_a_split_may_differ_then(code, count):
    first, second = given(code, ("split", count, [1, 2]))(X[:, :, :3])
    assert torch.equal(first, X[:, :, :1])
    assert torch.equal(second, X[:, :, 1:3])


def test_calls_with_another_number_of_sizes_do_not_count():
    def code(x):
        return x.reshape(-1).reshape(2, 12).reshape(4, 3, 1).reshape(3, 12)

    result = given(code, ("reshape", 2, [None, 6]), ("reshape", 2, [None, 4]))(X[:, :, :2])
    assert result.shape == (3, 4)


@pytest.mark.parametrize("code", [lambda x: x.mean(-1), lambda x: torch.mean(x, dim=-1)])
def test_a_mean_is_over_all_that_there_were(code):
    left = torch.cat([X, torch.zeros(2, 3, 6)], -1)
    module = given(code, ("mean", 1, [4, 10]))
    torch.testing.assert_close(module(X), left.mean(-1))


def test_means_that_are_right_stay():
    module = given(lambda x: x.mean(-1).mean(0), ("mean", 1, [4, 10]), ("mean", 1, [None]))
    torch.testing.assert_close(module(X), 0.4 * X.mean(-1).mean(0))


def test_attention_scales_by_the_size_that_is_known():
    attention = torch.nn.functional.scaled_dot_product_attention
    module = given(lambda x: attention(x, x, x), ("scaled_dot_product_attention", 1, [9]))
    torch.testing.assert_close(module(X), attention(X, X, X, scale=1 / 3))
    module = given(lambda x: attention(x, x, x), ("scaled_dot_product_attention", 1, [None]))
    torch.testing.assert_close(module(X), attention(X, X, X))


def test_more_calls_than_are_known_are_an_error():
    module = given(lambda x: x.reshape(2, 12).reshape(4, 6), ("reshape", 2, [None, 12]))
    with pytest.raises(RuntimeError, match="reshape is called more often"):
        module(X)
    assert X.reshape(2, 12).shape == (2, 12)  # nothing is left behind


def test_each_call_of_the_module_begins_anew():
    module = given(lambda x: x.reshape(2, 12), ("reshape", 2, [None, 6]))
    assert module(X[:, :, :2]).shape == module(X[:, :, 2:]).shape == (2, 6)


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        rows, _, columns = x.shape
        return self.linear(x).reshape(rows, 3 * columns)


def halved():
    module = Halved()
    module.__class__ = GivenSizes.mixed_into(Halved)
    setattr(module, GIVEN, [["reshape", 2, [None, 6]]])
    return module


def test_it_is_of_its_own_class_by_name_and_signature():
    module = halved()
    assert isinstance(module, Halved)
    assert type(module).__qualname__ == "Halved"
    assert GivenSizes.mixed_into(type(module)) is GivenSizes.mixed_into(Halved) is type(module)
    assert list(inspect.signature(module.forward).parameters) == ["x"]


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_copies_are_the_same(copied):
    module = halved()
    again = copied(module)
    assert type(again) is type(module)
    assert torch.equal(again(X), module(X))


def test_compiled_in_one_graph_and_captured():
    module = halved()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), module(X))
    program = torch.export.export(module, (X,), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    assert torch.equal(program.module()(X[:1]), module(X[:1]))


@pytest.mark.parametrize(
    "data",
    [
        "reshape",
        [["reshape", 2]],
        [["eval", 1, [3]]],
        [["reshape", 2, [None]]],
        [["reshape", 2, [None, -2]]],
        [["reshape", 2, [None, 1.5]]],
        [["reshape", "2", [None, 1]]],
        [[["reshape"], 2, [None, 1]]],
        [["split", 1, []]],
    ],
)
def test_what_is_none(data):
    assert not are_sizes_of_calls(data)
    assert are_sizes_of_calls([["reshape", 2, [-1, 6]], ("split", 1, [3, 4])])


class Standardised(nn.Module):
    """Channels first, as in image networks, with a weight for each."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 1))

    def forward(self, x):
        return self.weight * (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1)


def standardised():
    """Of eight channels the first five are left."""
    whole, module = Standardised(8), Standardised(5)
    module.weight.data = whole.weight.data[:5].clone()
    module.__class__ = PaddedNorm.mixed_into(Standardised)
    setattr(module, PADDED, [["", 1, 8], ["weight", 0, 8]])
    return whole, module


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, through_pickle])
def test_an_average_over_what_is_left_is_that_over_all(copied):
    whole, module = standardised()
    module, x = copied(module), torch.randn(2, 5, 7)
    padded = torch.cat([x, torch.zeros(2, 3, 7)], 1)
    assert torch.equal(module(x), whole(padded)[:, :5])
    assert list(module.state_dict()) == ["weight"]
    module(x).sum().backward()
    whole(padded)[:, :5].sum().backward()
    assert torch.equal(module.weight.grad, whole.weight.grad[:5])


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 breaks the graph")
def test_a_padded_norm_is_compiled_in_one_graph_and_captured():
    _, module = standardised()
    x = torch.randn(2, 5, 7)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    assert torch.equal(program.module()(x[:1]), module(x[:1]))
    assert [name for name, _ in program.named_parameters()] == ["weight"]


@pytest.mark.parametrize("data", ["", [["", 1]], [["", 1, -1]], [[0, 1, 2]], [["w", 1.0, 2]]])
def test_what_no_whole_sizes_are(data):
    assert not are_whole_sizes(data)
    assert are_whole_sizes([("", -1, 8), ["weight", 0, 8]])
