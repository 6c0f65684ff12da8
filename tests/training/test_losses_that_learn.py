"""A loss with parameters of its own: they learn, are saved, and go on to the bit."""

from __future__ import annotations

import pytest
import torch
from small_task import data, differing, gated, network, tensors
from torch import nn
from torch.nn import functional as F

import l0prune
from l0prune.errors import Interrupted, TrainingError
from l0prune.training.phases import watched

QUIET = {"batch_size": 30, "progress": False, "budget": "params=0.5", "start": "alike"}


class Scaled(nn.Module):
    """Cross-entropy at a temperature and with a bias that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1, 3))

    def forward(self, outputs, targets):
        return F.cross_entropy(self.scale * outputs + self.bias, targets)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_they_learn_under_gates_and_without(optimizer):
    loss = Scaled()
    l0prune.finetune(gated(), data(), epochs=3, loss=loss, optimizer=optimizer, **QUIET)
    assert all(differing(tensors(Scaled()), tensors(loss)))
    dense = Scaled()
    l0prune.train_dense(network(), data(), epochs=1, loss=dense, batch_size=30, progress=False)
    assert len(differing(tensors(Scaled()), tensors(dense))) == 2


def test_they_go_on_to_the_bit(tmp_path):
    whole, its = gated(), Scaled()
    l0prune.finetune(whole, data(), epochs=4, loss=its, out=tmp_path / "whole", **QUIET)
    model = gated()

    def stop(history):
        if len(history) == 2:
            raise Interrupted(2)

    with pytest.raises(Interrupted), watched(stop):
        l0prune.finetune(model, data(), epochs=4, loss=Scaled(), out=tmp_path / "run", **QUIET)
    again, loss = gated(), Scaled()
    with torch.no_grad():
        loss.bias.fill_(7.0)  # whatever it has: the checkpoint knows
    l0prune.finetune(again, data(), epochs=4, loss=loss, out=tmp_path / "run", resume=True, **QUIET)
    assert differing(tensors(whole), tensors(again)) == []
    assert differing(tensors(its), tensors(loss)) == []


def test_a_run_that_fails_leaves_them_as_they_were():
    class Breaks(Scaled):
        def forward(self, outputs, targets):
            found = super().forward(outputs, targets)
            return found * float("nan") if float(self.scale.detach()) != 1 else found

    loss = Breaks()
    with pytest.raises(TrainingError):
        l0prune.finetune(gated(), data(), epochs=3, loss=loss, **QUIET)
    assert differing(tensors(Scaled()), tensors(loss)) == []
