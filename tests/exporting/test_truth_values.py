"""Masks that are computed run in ONNX Runtime, which chooses between numbers alone."""

from __future__ import annotations

import pytest
import torch
from networks import Fn
from torch import nn

from l0prune.capture.capture import capture
from l0prune.exporting.onnx.file import Session, to_onnx


def chosen(m, x):
    h = m.a(x)
    mask = torch.where(x[:, :1] > 0, h > 0, h < 0.5)
    return h * mask + torch.where(mask, h, 2 * h)


def filled(m, x):
    mask = (m.a(x) > 0).masked_fill(x > 1, True)
    return x * mask.masked_fill(x < -1, False)


def filled_in_place(m, x):
    mask = m.a(x) > 0
    mask[torch.where(mask.sum(-1) > 1)] = False
    mask.masked_fill_(x[:, :1] > 1, True)
    return x * mask


@pytest.mark.parametrize(
    "forward",
    [*(pytest.param(f, marks=pytest.mark.slow) for f in (chosen, filled)), filled_in_place],
)
def test_the_file_computes_what_torch_does(forward):
    model, x = Fn(forward, a=nn.Linear(3, 3)).eval(), torch.randn(16, 3)
    made = to_onnx(capture(model, (x,)).program)
    (found,) = Session(made.SerializeToString())([x])
    torch.testing.assert_close(found, model(x))
