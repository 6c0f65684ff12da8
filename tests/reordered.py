"""Small networks that put channels in another order, always the same one.

Each case is as in ``networks.CASES``: module, input shape, sizes of the axes in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from networks import FLAT, IMAGE, Fn, conv
from torch import nn

ORDER = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])


def between(middle, **layers):
    """What is tried between two convolutions of 8 channels, with a shift that zeros do not pass."""
    run = lambda m, x: m.b(torch.sigmoid(middle(m, torch.sigmoid(m.a(x)))))  # noqa: E731
    return Fn(run, a=conv(3, 8), b=conv(8, 2), **layers)


def shuffled_by_index(m, x):
    """ShuffleNet's shuffle as an index that the forward makes."""
    order = torch.arange(x.shape[1]).view(2, -1).t().reshape(-1)
    return m.grouped(x[:, order])


def coupled(m, x):
    """Affine couplings of a flow, and the order turned around between them."""
    x = m.i(x)
    for shift in (m.first, m.second):
        a, b = x.chunk(2, -1)
        x = torch.cat([a, b + shift(a)], -1).flip(-1)
    return m.o(x)


eight = {"a": 8}
torch.manual_seed(0)  # the networks below are the same in every run
REORDERED = {
    "flipped": (between(lambda m, x: x.flip(1)), IMAGE, eight),
    "flipped_and_added": (between(lambda m, x: x + x.flip(1)), IMAGE, {"a": 4}),
    "rolled": (between(lambda m, x: x.roll((3, 1), (1, 2))), IMAGE, eight),
    "rolled_back": (between(lambda m, x: x.roll(-13, -3)), IMAGE, eight),
    "rolled_and_added": (between(lambda m, x: x + x.roll(4, 1)), IMAGE, {"a": 4}),
    "order_in_a_buffer": (between(lambda m, x: x[:, m.order], order=ORDER), IMAGE, eight),
    "order_and_back": (
        between(lambda m, x: x[:, m.order].tanh()[:, m.order.argsort()] + x, order=ORDER),
        IMAGE,
        eight,
    ),
    "order_in_a_list": (between(lambda m, x: x[..., ORDER.tolist(), :, :]), IMAGE, eight),
    "order_by_index_select": (
        between(lambda m, x: x.index_select(-3, m.order), order=ORDER),
        IMAGE,
        eight,
    ),
    "some_channels_several_times": (
        between(lambda m, x: x[:, [1, 1, -3, 0, 1, 4, 7, 7]]),
        IMAGE,
        eight,
    ),
    "some_channels_beside_all": (
        Fn(
            lambda m, x: m.b((y := m.a(x).tanh())[:, [6, 1, 3, 0]]) + m.c(y),
            a=nn.Linear(10, 8),
            b=nn.Linear(4, 3),
            c=nn.Linear(8, 3),
        ),
        FLAT,
        {"a": 8, "a.in": 10},
    ),
    "concat_in_another_order": (
        Fn(
            lambda m, x: m.b(m.n(torch.cat([m.a(x), m.c(x)], 1)[:, m.order]).relu()),
            a=conv(3, 5),
            c=conv(3, 3),
            n=nn.BatchNorm2d(8),
            b=conv(8, 2),
            order=ORDER,
        ),
        IMAGE,
        {"a": 5, "c": 3},
    ),
    "flattened_map_in_another_order": (
        Fn(
            lambda m, x: m.b(F.relu(m.a(x)).flatten(1)[:, m.order]),
            a=conv(3, 4),
            b=nn.Linear(144, 3),
            order=torch.randperm(144),
        ),
        IMAGE,
        {"a": 4, "b.in": 144},
    ),
    "shuffled_before_groups": (
        between(shuffled_by_index, grouped=conv(8, 8, groups=2)),
        IMAGE,
        {"a.groups": 2, "a": 4, "grouped": 4},
    ),
    "shuffled_between_groups": (
        between(
            lambda m, x: shuffled_by_index(m, m.first(x)),
            first=conv(8, 8, groups=2),
            grouped=conv(8, 8, groups=2),
        ),
        IMAGE,
        {},
    ),
    "couplings": (
        Fn(
            coupled,
            i=nn.Linear(10, 10),
            first=nn.Linear(5, 5),
            second=nn.Linear(5, 5),
            o=nn.Linear(10, 3),
        ),
        FLAT,
        {},
    ),
}
