"""What users do to ``module.weight`` between the forwards of a gated model."""

import copy

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError


def gated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    l0prune.gate(model, (torch.randn(2, 4),), open_probability=0.6, jitter=1.0)
    return model.eval(), plain


WRITES = {
    "init": lambda w: nn.init.constant_(w, 0.5),
    "in place": lambda w: w.mul_(2).clamp_(-0.1, 0.1),
    "data": lambda w: w.data.fill_(0.25),
    "item": lambda w: w.__setitem__(0, 7.0),
    "copy": lambda w: w.copy_(torch.ones(3, 6)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.one_in(5)
def test_what_is_written_lands_in_the_parameter(name):
    model, plain = gated()
    with torch.no_grad():
        WRITES[name](model[2].weight)
        WRITES[name](plain[2].weight)
    assert torch.equal(model[2]._parameters["weight"], plain[2].weight)


def test_augmented_assignment():
    model, plain = gated()
    with torch.no_grad():
        weight = model[2].weight
        weight += 1
    assert torch.equal(model[2]._parameters["weight"], plain[2].weight + 1)


def test_reading_gives_the_product():
    model, plain = gated()
    bank = l0prune.gates(model)
    z = bank.z()[bank.axes[0].slice]
    assert not torch.equal(z, torch.ones_like(z))
    assert torch.equal(model[2].weight.detach(), plain[2].weight.detach() * z)
    assert type(model[2].weight + 1) is torch.Tensor
    assert type(model[2].weight.detach()) is torch.Tensor


def test_gradients_and_freezing_are_the_parameters():
    model, _ = gated()
    model(torch.randn(2, 4)).sum().backward()
    assert model[2].weight.grad is model[2]._parameters["weight"].grad is not None
    model[2].weight.grad = None
    assert model[2]._parameters["weight"].grad is None
    model[2].weight.requires_grad_(False)
    assert not model[2]._parameters["weight"].requires_grad
    model[2].weight.requires_grad = True
    assert model[2]._parameters["weight"].requires_grad


def test_a_part_of_the_model_on_its_own_is_gated_and_learns():
    model, _ = gated()
    hidden = torch.randn(5, 6)
    bank = l0prune.gates(model)
    out = model[2](hidden)
    assert type(out) is torch.Tensor
    z = bank.z()[bank.axes[0].slice]
    expected = nn.functional.linear(hidden * z, model[2]._parameters["weight"], model[2].bias)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert bank.log_alpha.grad.abs().sum() > 0


def synced(layer):
    """A norm is made anew from the norm that is there, under no_grad."""
    nn.SyncBatchNorm.convert_sync_batchnorm(layer)


def other(layer):
    made = nn.LayerNorm(8)
    made.weight = layer.weight


REPLACEMENTS = {
    "converted": synced,
    "assigned": other,
    "tied": lambda layer: setattr(layer, "weight", layer.weight),
    "parameter": lambda layer: nn.Parameter(layer.weight),
    "list": lambda layer: nn.ParameterList([layer.weight]),
    "registered": lambda layer: nn.LayerNorm(8).register_parameter("weight", layer.weight),
}


class Normed(nn.Module):
    """The norm stands before the sum, so that its own parameters are gated."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.n, self.o = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.a(x)
        return self.o((x + self.n(self.c(x))).relu())


@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.one_in(2)
def test_a_layer_that_is_made_from_a_gated_one_says_in_which_order_it_goes(how):
    model, x = Normed().eval(), torch.randn(2, 3, 8, 8)
    l0prune.gate(model, x)
    before = model(x)
    with pytest.raises(UsageError, match=r"convert first, and gate the model then"):
        REPLACEMENTS[how](model if how == "converted" else model.n)
    assert torch.equal(model(x), before)
    # What the same code does with the value alone goes on as before.
    assert not isinstance(model.n.weight.detach(), nn.Parameter)
    assert "FloatTensor" in torch.typename(model.n.weight)
    l0prune.ungate(model)
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(model).n, nn.SyncBatchNorm)
