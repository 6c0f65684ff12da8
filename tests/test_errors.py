"""Warnings are about the user's line."""

import warnings

import pytest
import torch
from small_task import FEATURES, gated
from torch import nn

import l0prune
from l0prune.gating.bank import asked_of


def through_the_pruner():
    pruner = l0prune.Pruner(gated(), steps=2, lam=0.1, gate_lr=1e-9)
    for _ in range(2):
        pruner.model(torch.zeros(2, FEATURES)).sum().backward()
        pruner.before_step()
        pruner.after_step()


def through_a_fit():
    l0prune.fit(gated(), "params=0.5")  # of gates that have not learned


def through_an_export():
    model = gated()
    asked_of[l0prune.gates(model)] = lambda open_: "more than that"
    l0prune.export(model)


def through_torch():
    layer = nn.Identity()
    layer.register_forward_hook(lambda *_: l0prune.fit(gated(), "params=0.5"))
    nn.Sequential(layer)(torch.zeros(1))


@pytest.mark.parametrize(
    "act", [through_the_pruner, through_a_fit, through_an_export, through_torch]
)
def test_a_warning_is_about_the_line_of_the_user(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", l0prune.errors.L0pruneWarning)
        act()
    found = [each for each in caught if str(each.message).startswith("l0prune: ")]
    assert {each.filename for each in found} == {__file__}
