import math

import pytest
import torch

from l0prune.training.history import LOOK_EVERY, Meter, NotFinite


def fill(meter, losses, penalties=()):
    for number, loss in enumerate(losses):
        extra = torch.tensor(penalties[number]) if penalties else None
        meter.add(torch.tensor(loss), extra)


def test_means_are_over_steps():
    meter = Meter(forgiving=False)
    fill(meter, [1.0, 2.0, 6.0], [0.5, 0.5, 0.5])
    assert meter.look() == 3.0
    fill(meter, [3.0], [2.5])
    assert meter.look() == 3.0
    assert meter.means() == (3.0, 1.0)


def test_the_sum_does_not_depend_on_when_one_looks():
    losses = torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist()
    often, once = Meter(forgiving=False), Meter(forgiving=False)
    for loss in losses:
        fill(often, [loss])
        often.look()
    fill(once, losses)
    once.look()
    assert often.means() == once.means()


def test_it_is_due_after_so_many_steps():
    meter = Meter(forgiving=False)
    fill(meter, [1.0] * (LOOK_EVERY - 1))
    assert not meter.is_due
    fill(meter, [1.0])
    assert meter.is_due
    meter.look()
    assert not meter.is_due
    assert meter.look() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_it_says_which_loss_was_no_number(bad):
    meter = Meter(forgiving=False)
    fill(meter, [1.0, 1.0, bad, math.nan, 1.0])
    with pytest.raises(NotFinite) as caught:
        meter.look()
    assert caught.value.ago == 2
    assert caught.value.value == bad or (math.isnan(bad) and math.isnan(caught.value.value))


def test_with_a_loss_scaler_single_overflows_are_passed_over():
    meter = Meter(forgiving=True)
    fill(meter, [1.0, math.inf, 3.0])
    assert meter.look() == 2.0
    assert meter.means() == (2.0, 0.0)
    fill(meter, [math.nan, math.nan])
    with pytest.raises(NotFinite):
        meter.look()
