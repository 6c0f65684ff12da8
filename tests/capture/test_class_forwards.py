"""A forward that another package has put around the model's own."""

from types import MethodType

import torch
from torch import nn

import l0prune
from l0prune.capture.copying import class_forwards, copied


def prepared():
    """As accelerate does it under mixed precision."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return type(self).forward(self, x)

    model._original_forward = model.forward
    model.forward = MethodType(forward, model)
    return model


def test_within_the_context_the_forward_is_that_of_the_class():
    model, x = prepared(), torch.randn(2, 4)
    plain = model.state_dict()
    with class_forwards(model):
        assert model(x).dtype == torch.float32
    assert model(x).dtype == torch.bfloat16
    assert plain.keys() == model.state_dict().keys()


def test_a_copy_has_the_forward_of_its_class_and_the_original_keeps_its_own():
    model, x = prepared(), torch.randn(2, 4)
    assert copied(model)(x).dtype == torch.float32
    assert model(x).dtype == torch.bfloat16


def test_survey_gate_and_export_are_about_the_model_itself():
    model, x = prepared(), torch.randn(2, 4)
    assert str(l0prune.survey(model, x)) == str(l0prune.survey(nn.Sequential(*model), x))
    l0prune.gate(model, x)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert small.module(x).dtype == torch.float32
    assert model(x).dtype == torch.bfloat16
