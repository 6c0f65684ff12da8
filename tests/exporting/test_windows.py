"""What windows do to sizes, against torch's own convolutions and pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from l0prune.exporting.own_class.skipped_modules import windows_to
from l0prune.files.cut_layers import SkippedModule, are_windows, sizes_after

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
MEANS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


def windows(module: nn.Module, x: torch.Tensor):
    """All ways from the input to the output."""
    graph = torch.export.export(module.eval(), (x,)).module().graph
    start = next(node for node in graph.nodes if node.op == "placeholder")
    between = {node for node in graph.nodes if node.op == "call_function"}
    return windows_to(max(between), start, between)


@st.composite
def modules(draw, dims):
    """A window over so many dims, two of which fit into 21 positions."""
    each = st.integers(1, 3)
    kernel, stride = (draw(st.tuples(*[each] * dims)) for _ in range(2))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    kind = draw(st.sampled_from((CONVOLUTIONS, MAXIMA, MEANS)))[dims - 1]
    if kind in MEANS:
        return kind(kernel, stride, padding)
    dilation = draw(st.integers(1, 2))
    if kind in MAXIMA:
        return kind(kernel, stride, padding, dilation)
    same = draw(st.booleans()) and all(k % 2 for k in kernel)  # else torch warns
    return kind(3, 2, kernel, 1 if same else stride, "same" if same else padding, dilation)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.one_in(3)
@settings(max_examples=10)
@given(data=st.data())
def test_sizes_are_those_that_torch_gives(dims, data):
    first, second = data.draw(modules(dims)), data.draw(modules(dims))
    channels = getattr(first, "out_channels", 3)
    if isinstance(second, CONVOLUTIONS):
        second = type(second)(channels, 2, second.kernel_size, second.stride, second.padding)
    x = torch.zeros(1, 3, *data.draw(st.tuples(*[st.integers(21, 24)] * dims)))
    both = nn.Sequential(first, nn.ReLU(), second)
    (found,) = windows(both, x)
    assert sizes_after(x.shape, found)[2:] == both(x).shape[2:]


def test_what_keeps_sizes_is_left_out():
    x = torch.zeros(1, 4, 9, 9)
    keeps = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2))
    assert windows(keeps, x) == [()]
    changes = nn.Sequential(*keeps, nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding="valid"))
    assert windows(changes, x) == [
        (((2, 2), (2, 2), (0, 0), (1, 1)), ((3, 3), (1, 1), (0, 0), (1, 1)))
    ]


def test_paths_side_by_side_are_ways_of_their_own():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.pool = nn.Conv2d(4, 4, 3, 2, 1), nn.MaxPool2d(2, 2, ceil_mode=True)

        def forward(self, x):
            gate = x.mean((2, 3), keepdim=True).sigmoid()
            return (self.first(x) + self.first(x).relu() + self.pool(x)) * gate

    found = windows(Both(), torch.zeros(1, 4, 9, 9))
    assert found == [(((3, 3), (2, 2), (1, 1), (1, 1)),), ()]  # the second is that of the gate


@pytest.mark.parametrize("module", [nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(2, 2, 0, True)])
def test_what_rounds_up_is_not_known(module):
    assert windows(module, torch.zeros(1, 4, 9, 9)) == []


def test_zeros_of_another_shape():
    passed = nn.Conv2d(4, 6, 3, 2, 1)
    passed.__class__ = SkippedModule
    passed.gives, passed.at, passed.name = "zeros", 0, "input"
    passed.depth, passed.results = 0, 0
    passed.windows, passed.dim, passed.channels = (), 0, 0
    x = torch.randn(2, 4, 9, 8)
    assert passed(x).shape == x.shape
    passed.windows, passed.dim, passed.channels = [[[3, 3], [2, 2], [1, 1], [1, 1]]], 1, 6
    assert passed(x).shape == (2, 6, 5, 4)
    assert not passed(x).any()


@pytest.mark.parametrize(
    "damaged",
    [
        3,
        [[3, 2, 1]],
        [[[3, 3], [2, 2], [1, 1]]],
        [[[3, 3], [2, 2], [1], [1, 1]]],
        [[[3, 3], [2, "2"], [1, 1], [1, 1]]],
        [[[3, 3], [2, 0], [1, 1], [1, 1]]],
        [[[], [], [], []]],
    ],
)
def test_what_is_no_window_is_noticed(damaged):
    assert are_windows([[[3, 3], [2, 2], [0, 1], [1, 1]]])
    assert are_windows([])
    assert not are_windows(damaged)
