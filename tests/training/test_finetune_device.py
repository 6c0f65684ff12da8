import pytest
import torch
from torch import nn

from l0prune.capture.model_checks import evaluating
from l0prune.errors import UsageError
from l0prune.running import device


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())


def modes(module):
    return [part.training for part in module.modules()]


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto", model()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.choose_device("auto", model()) == torch.device("cuda")


def test_auto_stays_where_the_model_is():
    assert device.choose_device("auto", model().to("meta")) == torch.device("meta")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(UsageError, match="cannot be used here"):
        device.choose_device(name, model())


def test_the_model_comes_home_even_after_an_error():
    network = model()
    with pytest.raises(ZeroDivisionError), device.on_device(network, torch.device("cpu")):
        raise ZeroDivisionError
    assert device.device_of(network) == torch.device("cpu")
    assert device.device_of(nn.ReLU()) == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_model_is_on_the_gpu_meanwhile():
    network = model()
    with device.on_device(network, torch.device("cuda")):
        assert device.device_of(network).type == "cuda"
    assert device.device_of(network).type == "cpu"


def test_training_wakes_a_model_in_eval_mode_and_puts_it_back():
    network = model().eval()
    with device.train_mode(network):
        assert all(modes(network))
    assert not any(modes(network))


def test_training_leaves_frozen_parts_of_a_model_in_train_mode():
    network = model()
    network[1].eval()
    with device.train_mode(network):
        assert modes(network) == [True, True, False, True]


def test_evaluating_restores_each_mode_even_after_an_error():
    network = model()
    network[1].eval()
    with evaluating(network):
        assert not any(modes(network))
        assert not torch.is_grad_enabled()
    assert modes(network) == [True, True, False, True]
    with pytest.raises(ZeroDivisionError), evaluating(network):
        raise ZeroDivisionError
    assert modes(network) == [True, True, False, True]


def test_precision_is_what_was_asked_for():
    one = torch.ones(2, 2)
    for name, dtype in ((None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with device.precision(torch.device("cpu"), name):
            assert (one @ one).dtype == dtype


def test_bf16_is_refused_on_a_gpu_that_does_not_compute_in_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UsageError, match=r"from Ampere .* use autocast='fp16'"):
        device.precision(torch.device("cuda"), "bf16")
    with device.precision(torch.device("cpu"), "bf16"):
        assert torch.is_autocast_enabled("cpu")
