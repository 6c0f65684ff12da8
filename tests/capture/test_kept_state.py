"""Objects that a forward returns for its next call are no results."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import l0prune
from l0prune.capture.capture import capture
from l0prune.errors import CaptureError


class Cache:
    def __init__(self, keys):
        self.keys = keys


@dataclass
class Result:
    found: Tensor


class Decoder(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.a, self.b, self.wrap = nn.Linear(4, 8), nn.Linear(8, 3), wrap

    def forward(self, x):
        keys = self.a(x)
        return self.wrap(self.b(keys.relu()), keys)


def test_a_cache_beside_the_results_is_left_out_of_the_graph_alone():
    model, x = Decoder(lambda y, keys: {"logits": y, "cache": Cache(keys)}), torch.randn(2, 4)
    l0prune.gate(model.eval(), (x,))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert "forward" not in vars(model)
    found = small.module(x)
    torch.testing.assert_close(found["logits"], model(x)["logits"])
    assert isinstance(found["cache"], Cache)
    assert found["cache"].keys.shape[1] == small.module.a.out_features < 8
    assert len(small.program.graph_signature.user_outputs) == 2  # the second is None


@pytest.mark.parametrize("wrap", [lambda y, _: Result(y), lambda y, _: Cache(y)])
def test_results_in_a_class_of_the_users_are_not_lost_in_silence(wrap):
    with pytest.raises(CaptureError):
        capture(Decoder(wrap), (torch.randn(2, 4),))


def test_a_forward_of_the_users_own_on_the_module_stays():
    model = Decoder(lambda y, keys: (y, Cache(keys)))
    own = model.forward
    model.forward = own
    capture(model, (torch.randn(2, 4),))
    assert vars(model)["forward"] is own
