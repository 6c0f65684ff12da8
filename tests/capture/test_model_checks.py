"""What is no module that anybody can look into, or has nothing to export, is refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("act", [l0prune.survey, l0prune.gate])
def test_what_unflatten_made_is_refused(act, inside):
    x = torch.randn(2, 4)
    made = torch.export.unflatten(torch.export.export(plain(), (x,)))
    with pytest.raises(UsageError, match=r"torch\.export\.unflatten"):
        act(nn.Sequential(made, nn.ReLU()) if inside else made, x)


def test_a_model_without_values_is_gated_and_not_exported():
    with torch.device("meta"):
        model, x = plain(), torch.randn(2, 4)
    l0prune.gate(model, x)
    with pytest.raises(UsageError, match=r"0\.weight is on the meta device.*load_state_dict"):
        l0prune.export(model)
    real = l0prune.gate(plain(), torch.randn(2, 4))
    assert real.state_dict().keys() == model.state_dict().keys()
    assert l0prune.export(real).certificate.checks
