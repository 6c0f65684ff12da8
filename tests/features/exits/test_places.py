"""Places at which a network can be left: ends of blocks, and nothing beside a shortcut."""

import pytest
import torch
from stacks import Block, stack
from torch import nn

from l0prune.capture.capture import capture
from l0prune.features.exits.places import places


def found(model, *args):
    return places(model.eval(), capture(model, args))


def by_path(model, *args):
    return {path: place for place in found(model, *args) for path in place.paths}


def test_ends_of_blocks_are_places_and_their_insides_are_none():
    seen = by_path(stack(), torch.randn(2, 6))
    ends = [path for path, place in seen.items() if place.ends_block]
    assert [*seen] == ["stem", *[f"blocks.{n}" for n in range(3)], "blocks", "blocks.3", "last"]
    assert ends == ["blocks.0", "blocks.1", "blocks.2", "blocks", "blocks.3"]


def test_shares_are_those_of_the_multiplications():
    seen = by_path(stack(), torch.randn(2, 6))
    total = 6 * 12 + 8 * 12 * 12 + 12 * 3
    for number in range(4):
        done = 6 * 12 + 2 * (number + 1) * 12 * 12
        assert seen[f"blocks.{number}"].share == pytest.approx(done / total)


def test_the_dim_of_channels_is_the_one_with_slots():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(5, 7), Block(7), Block(7))
            self.last = nn.Linear(7, 2)

        def forward(self, x):
            return self.last(self.blocks(x).mean((1, 2)))

    place = by_path(Last(), torch.randn(2, 3, 4, 5))["blocks.1"]
    assert (place.shape, place.dim) == ((2, 3, 4, 7), 3)


def test_in_place_operators_and_masks_do_no_harm():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x, mask):
            wide = (1 - mask) * -9.0  # of the inputs alone
            x = self.first(x)
            x += wide
            return self.second(self.act(x)) + wide

    assert [*by_path(Masked(), torch.randn(2, 6), torch.ones(2, 6))] == ["first", "act", "second"]


def test_layers_within_a_block_are_no_blocks():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
            self.second = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

        def forward(self, x):
            return self.second(self.first(x))

    seen = found(nn.Sequential(Pair(), Pair(), nn.Linear(6, 2)), torch.randn(2, 6))
    assert [place.paths[0] for place in seen if place.ends_block] == ["0", "1"]
