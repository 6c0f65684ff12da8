"""What is cut lies in memory as torch would lay out a tensor of that shape and format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import l0prune
from l0prune.exporting.slicing.tensors import Place

SIZES = st.integers(1, 4)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@st.composite
def wholes(draw):
    """A tensor as a module has it, and which positions of each dim are left."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=5))
    memory = draw(st.sampled_from([torch.contiguous_format, FORMATS.get(len(shape))]))
    left = [draw(st.none() | st.sets(st.integers(0, size - 1), min_size=1)) for size in shape]
    positions = tuple(None if each is None else torch.tensor(sorted(each)) for each in left)
    return torch.randn(shape), memory or torch.contiguous_format, positions


def moved(tensor, memory):
    """The tensor as ``module.to(memory_format=…)`` lays out a parameter."""
    return nn.ParameterList([tensor]).to(memory_format=memory)[0].detach()


@given(wholes())
def test_what_is_left_has_the_strides_that_torch_gives_it(given):
    plain, memory, left = given
    whole = moved(plain, memory)
    place = Place.of(whole, left)
    small = place.cut(whole)
    expected = whole
    for dim, positions in enumerate(left):
        if positions is not None:
            expected = expected[(slice(None),) * dim + (positions,)]
    assert torch.equal(small, expected)
    assert small.stride() == moved(expected.contiguous().clone(), memory).stride()
    # Whatever the rest lies like, all is as the parameter is.
    assert place.cut(plain).stride() == small.stride()
    back = place.put(small, plain)
    assert torch.equal(back, plain)
    assert back.stride() == place.put(small).stride() == whole.stride()


def test_dims_in_another_order_stay_in_it():
    whole = torch.randn(5, 2, 4).permute(2, 0, 1)
    place = Place.of(whole, (torch.tensor([0, 3]), None, None))
    small = place.cut(whole)
    assert torch.equal(small, whole[[0, 3]])
    assert small.stride() == (1, 4, 2)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.one_in(2)
def test_an_export_keeps_the_memory_format(memory, tmp_path):
    def build():
        layers = nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 3)
        return nn.Sequential(*layers).eval().to(memory_format=memory)

    net = build()
    l0prune.gate(net, torch.randn(2, 8, 7, 7))
    with torch.no_grad():
        l0prune.gates(net).log_alpha[:5] = -20.0
    small = l0prune.export(net)
    small.save_pretrained(tmp_path / "small")
    weights = [layer.weight for layer in small.module[::2]]
    assert weights[1].shape[1] == 7
    again = [layer.weight for layer in l0prune.resize(build(), tmp_path / "small")[::2]]
    for weight in (*weights, *again):
        assert weight.stride() == moved(weight.detach().contiguous().clone(), memory).stride()
