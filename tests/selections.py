"""Small networks that take tokens out and put them back, by values that all channels share.

Each case is as in ``networks.CASES``: module, input shape, sizes of the axes in order.
"""

from __future__ import annotations

import torch
from networks import TOKENS, Fn
from torch import nn


def selecting(middle):
    """Linear layers of 12 channels around ``middle``, given chosen tokens and a mask."""

    def run(m, x):
        y, scores = m.a(x).sigmoid(), m.scores(x)[..., 0]
        return m.b(middle(y, scores.topk(3, dim=1)[1], scores > 0).sigmoid())

    layers = {"a": nn.Linear(32, 12), "scores": nn.Linear(32, 2), "b": nn.Linear(12, 3)}
    return Fn(run, **layers), TOKENS, {"a": 12, "a.in": 32, "scores.in": 32}


def summed(middle):
    """The same where zeros have to pass: nothing weighs the sum over channels after ``middle``."""

    def run(m, x):
        y, scores = m.a(x), m.scores(x)[..., 0]
        y = middle(y, scores.topk(3, dim=1)[1], scores > 0)
        return m.b(y * y.sum(-1, keepdim=True))

    layers = {"a": nn.Linear(32, 12), "scores": nn.Linear(32, 2), "b": nn.Linear(12, 3)}
    return Fn(run, **layers), TOKENS, {"a": 12, "a.in": 32, "scores.in": 32}


def wide(index, y):
    return index[..., None].expand(-1, -1, y.shape[-1])


def repeated(index):
    return index[..., None].repeat(1, 1, 12)


def merged(y, index, mask):
    """Half of the tokens go into tokens of the other half, as in token merging."""
    source, target = y[:, ::2], y[:, 1::2]
    to = (index % 2)[..., None].expand(2, 3, 12)
    return target.scatter_reduce(1, to, source, reduce="mean")


def skipping(y, index, mask):
    """Chosen tokens are worked on and put back, as in a mixture of depths."""
    rows = torch.arange(2)[:, None]
    out = y.clone()
    out[rows, index] = y[rows, index].tanh() * 2
    return out


def spliced(y, index, mask):
    """Features of another kind in the places of some tokens, as in LLaVA."""
    where = mask[..., None].expand_as(y).to(y.device)
    return y.masked_scatter(where, y.flip(1).reshape(-1, 12).tanh())


def of_each_channel(y, index, mask):
    """An index of each channel's own: every channel takes its largest token."""
    return y.gather(1, y.argmax(1, keepdim=True)) * y + index[:, :1, None]


torch.manual_seed(0)  # the networks below are the same in every run
SELECTIONS = {
    "gathered": selecting(lambda y, i, mask: y.gather(1, wide(i, y))),
    "gathered_by_a_repeated_index": selecting(lambda y, i, mask: y.gather(1, repeated(i))),
    "taken_along_a_dim": selecting(lambda y, i, mask: torch.take_along_dim(y, i[..., None], 1)),
    "gathered_by_each_channel": selecting(of_each_channel),
    "scattered": selecting(
        lambda y, i, mask: torch.zeros_like(y).scatter(1, wide(i, y), y[:, :3]) + y
    ),
    "scattered_number": selecting(lambda y, i, mask: y.scatter(1, wide(i, y), 0.5)),
    "scatter_added": selecting(lambda y, i, mask: y.scatter_add(-2, repeated(i), y[:, :3])),
    "merged_tokens": selecting(merged),
    "largest_of_merged_tokens": selecting(
        lambda y, i, mask: y.scatter_reduce(1, wide(i, y), y[:, 2:], "amax", include_self=False)
    ),
    "product_of_merged_tokens": selecting(
        lambda y, i, mask: y.scatter_reduce(1, wide(i, y), y[:, 2:], "prod")
    ),
    "put_back_in_place": selecting(skipping),
    "one_token_for_many": selecting(
        lambda y, i, mask: y.index_put((torch.arange(2)[:, None], i), y[:, 0].mean(0))
    ),
    "masked_rows": selecting(lambda y, i, mask: y.masked_fill(mask[..., None].expand_as(y), 0.5)),
    "spliced": selecting(spliced),
    "gathered_and_summed": summed(lambda y, i, mask: y.gather(1, wide(i, y))),
    "scattered_and_summed": summed(
        lambda y, i, mask: torch.zeros_like(y).scatter(1, wide(i, y), y[:, :3]) + y
    ),
    "scatter_added_and_summed": summed(lambda y, i, mask: y.scatter_add(1, wide(i, y), y[:, :3])),
    "merged_and_summed": summed(merged),
    "put_back_and_summed": summed(skipping),
    "spliced_and_summed": summed(spliced),
}
