import torch
from small_task import clouds, differing, gated, network, tensors
from torch import nn

from l0prune.running.batches import Batch
from l0prune.running.evaluate import recalibrate

CPU = torch.device("cpu")


def batches(size=40):
    return [Batch(*pair) for pair in clouds().batches(size)]


def test_statistics_are_those_of_the_layers_inputs():
    model = network()
    recalibrate(model, batches(), CPU)
    inputs = [model[0](part) for part, *_ in batches()]
    mean = torch.stack([part.mean(0) for part in inputs]).mean(0)
    var = torch.stack([part.var(0) for part in inputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, var)


def test_gates_are_the_deterministic_ones_and_dropout_is_off():
    model = gated(dropout=0.5)
    twin = gated(dropout=0.5)
    for network_ in (model, twin):
        with torch.no_grad():
            network_.l0prune_gates.log_alpha.fill_(0.3)
    recalibrate(model, batches(), CPU)
    torch.manual_seed(1)
    recalibrate(twin, batches(), CPU)
    assert differing(tensors(model), tensors(twin)) == []


def test_everything_but_the_statistics_is_as_it_was():
    model = gated()
    model[1].momentum = 0.37
    before = tensors(model)
    modes = [module.training for module in model.modules()]
    buffers = recalibrate(model, batches(), CPU)
    assert differing(before, tensors(model)) == ["1.running_mean", "1.running_var"]
    assert {b.data_ptr() for b in buffers} == {
        model[1].running_mean.data_ptr(),
        model[1].running_var.data_ptr(),
    }
    assert model[1].momentum == 0.37
    assert modes == [module.training for module in model.modules()]


def test_a_frozen_norm_and_one_without_statistics_are_left_alone():
    model = nn.Sequential(
        network(), nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)
    )
    model[0][1].eval()
    before = tensors(model)
    recalibrate(model, batches(), CPU)
    assert differing(before, tensors(model)) == ["2.running_mean", "2.running_var"]


def test_a_model_without_norms_is_not_run_at_all():
    def explode(*_):
        raise AssertionError

    model = network(norm=False)
    model.register_forward_hook(explode)
    assert recalibrate(model, batches(), CPU) == []
