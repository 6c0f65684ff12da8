import copy

import pytest
import torch
from small_task import differing, gated, network, tensors
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from l0prune.training.averages import Average


def wander(model, seed):
    """Another step of some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=generator).to(value.dtype))
            else:
                value.add_(1)


def shown(average, model):
    average.show()
    result = tensors(model)
    average.hide()
    return result


def test_it_is_the_recursion_of_its_docstring():
    model = gated()
    average = Average(model, beta=0.6)
    expected = {n: v.double() for n, v in tensors(model).items()}
    for t in range(12):
        wander(model, t)
        average.update()
        beta = min(0.6, (1 + t) / (10 + t))
        for name, value in model.state_dict().items():
            expected[name] = beta * expected[name] + (1 - beta) * value.double()
    for name, value in shown(average, model).items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_in_the_long_run_it_is_torchs_own():
    model = network()
    average = Average(model, beta=0.5)
    average.load(average.tensors(), updates=10_000)  # β has long been reached
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    theirs.update_parameters(model)  # the first is a copy
    for t in range(5):
        wander(model, t)
        average.update()
        theirs.update_parameters(model)
    ours = shown(average, model)
    for name, value in theirs.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(ours[name], value)


def test_a_short_run_forgets_its_start():
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.0)
    average = Average(model, beta=0.999)
    nn.init.constant_(model.weight, 1.0)
    for _ in range(100):
        average.update()
    assert shown(average, model)["weight"].item() > 0.99  # a plain one would be at 0.095


def test_buffers_and_gates_are_averaged_and_counts_are_the_models_own():
    model = gated()
    before = tensors(model)
    average = Average(model, beta=0.9)
    wander(model, 0)
    average.update()
    assert "l0prune_gates.log_alpha" in average.tensors()
    after = shown(average, model)
    assert {"1.running_mean", "l0prune_gates.log_alpha"} <= set(differing(before, after))
    assert after["1.num_batches_tracked"] == 1


def test_showing_and_hiding_leaves_the_model_and_the_average():
    model = gated()
    average = Average(model, beta=0.9)
    wander(model, 0)
    average.update()
    before = tensors(model)
    held = {name: value.clone() for name, value in average.tensors().items()}
    first = shown(average, model)
    assert differing(before, tensors(model)) == []
    assert differing(held, average.tensors()) == []
    assert differing(first, shown(average, model)) == []


def test_installing_gives_the_model_the_average_and_begins_anew():
    model = network()
    average = Average(model, beta=0.9)
    wander(model, 0)
    average.update()
    expected = shown(average, model)
    average.install()
    assert differing(expected, tensors(model)) == []
    assert average.updates == 0
    average.update()
    assert differing(expected, shown(average, model)) == []


def test_buffers_computed_anew_are_adopted_and_nothing_else():
    model = network()
    average = Average(model, beta=0.9)
    held = {name: value.clone() for name, value in average.tensors().items()}
    average.show()
    model[1].running_mean.fill_(5)
    model[1].running_var.fill_(6)
    average.adopt([model[1].running_mean])
    average.hide()
    assert differing(held, average.tensors()) == ["1.running_mean"]
    assert torch.equal(average.tensors()["1.running_mean"], torch.full((16,), 5.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_float32(dtype):
    model = nn.Linear(4, 4).to(dtype)
    nn.init.constant_(model.weight, 1.0)
    average = Average(model, beta=0.999)
    average.load(average.tensors(), updates=100_000)
    nn.init.constant_(model.weight, 1.0 + 2**-5)
    for _ in range(1000):  # each moves it by 3e-5, far below a step of bfloat16 at 1
        average.update()
    expected = 1 + 2**-5 * (1 - 0.999**1000)
    torch.testing.assert_close(
        average.tensors()["weight"], torch.full((4, 4), expected), rtol=1e-5, atol=0
    )
    shown(average, model)
    assert average.tensors()["weight"].dtype == torch.float32


def test_frozen_parameters_are_left_alone_and_tied_ones_taken_once():
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    model["one"].bias.requires_grad_(False)
    assert set(Average(model, 0.9).tensors()) == {"one.weight", "two.bias"}


def test_a_buffer_that_a_module_replaces_is_followed():
    model = network()
    average = Average(model, beta=0.0)
    model[1].running_mean = torch.full((16,), 3.0)
    average.update()
    assert torch.equal(shown(average, model)["1.running_mean"], torch.full((16,), 3.0))


def test_it_goes_on_from_what_it_was():
    model = gated()
    average = Average(model, beta=0.9)
    wander(model, 0)
    average.update()
    saved, updates = copy.deepcopy(average.tensors()), average.updates
    other = Average(model, beta=0.9)
    other.load(saved, updates)
    wander(model, 1)
    average.update()
    other.update()
    assert differing(average.tensors(), other.tensors()) == []
