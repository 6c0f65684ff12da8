"""What timm's training scripts put around a model: groups of parameters, averages of weights."""

from __future__ import annotations

import pytest
import torch
from deadness import close_some
from differences import ROUNDED, difference

import l0prune

timm = pytest.importorskip("timm", reason="pip install timm")
optim = pytest.importorskip("timm.optim")
utils = pytest.importorskip("timm.utils")


def gated():
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=4).eval()
    return l0prune.gate(model, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("layer_decay", [None, 0.7])
@pytest.mark.one_in(2)
def test_its_optimizers_do_not_decay_gates(layer_decay):
    model = gated()
    optimizer = optim.create_optimizer_v2(
        model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=layer_decay
    )
    log_alpha = l0prune.gates(model).log_alpha
    (group,) = [g for g in optimizer.param_groups if any(p is log_alpha for p in g["params"])]
    assert group["weight_decay"] == 0
    assert any(g["weight_decay"] == 0.05 for g in optimizer.param_groups)


@pytest.mark.slow
def test_averaged_weights_are_exported_with_averaged_gates():
    model = gated()
    average = utils.ModelEmaV3(model, decay=0.5)
    close_some(model, seed=1)
    for _ in range(40):
        average.update(model)
    torch.testing.assert_close(
        l0prune.gates(average.module).log_alpha, l0prune.gates(model).log_alpha
    )
    small = l0prune.export(average.module)
    assert small.params == l0prune.export(model).params < small.params_before
    assert difference(model, small, torch.randn(2, 3, 32, 32)) <= ROUNDED
