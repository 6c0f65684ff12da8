"""What a forward keeps for its next call is, after tracing, what it was before."""

from __future__ import annotations

from copy import copy

import pytest
import torch
from torch import nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.errors import CaptureError


class Detector(nn.Module):
    """Makes its grid anew for images of a new size, as detectors do with their anchors."""

    grid = torch.empty(0)

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.size, self.seen, self.last = None, {}, []

    def forward(self, x):
        if self.size != x.shape[-2:]:
            self.size = x.shape[-2:]
            self.grid = torch.arange(x.shape[-1], dtype=x.dtype) + 0.5
            self.seen[tuple(self.size)] = self.grid
            self.last.append(self.grid)
        return self.head(self.features(x).relu()) * self.grid


def kept(model):
    names = vars(model).keys() & {"grid", "size", "seen", "last"}
    return {name: copy(vars(model)[name]) for name in names if name != "grid"} | {
        "grid": id(vars(model).get("grid"))
    }


@pytest.mark.parametrize("has_run", [False, True])
def test_a_detector_is_after_survey_gate_and_export_as_it_was(has_run):
    model, x = Detector().eval(), torch.randn(2, 3, 8, 8)
    if has_run:
        model(torch.randn(2, 3, 4, 4))
    before = kept(model)
    l0prune.survey(model, (x,))
    assert kept(model) == before
    l0prune.gate(model, (x,))
    assert kept(model) == before
    with torch.no_grad():
        l0prune.gates(model).log_alpha[:4] = -9
    expected = model(x)
    small = l0prune.export(model)
    assert small.rebuilt
    assert torch.allclose(small.module(x), expected, atol=1e-5)
    assert all(type(grid) is torch.Tensor for grid in small.module.last)
    assert small.module(torch.randn(3, 3, 6, 6)).shape == (3, 2, 6, 6)


def test_a_model_that_cannot_be_captured_is_as_it_was():
    class Looping(Detector):
        def forward(self, x):
            y = super().forward(x)
            while y.sum() > 0:
                y = y - 1
            return y

    model = Looping().eval()
    before = kept(model)
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(2, 3, 8, 8),))
    assert kept(model) == before
