"""Fake quantization of a gated model, beside the formulas written out."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.int8.fake_quantizer import FakeQuantizer
from l0prune.features.int8.ranges import QuantizedLayer, Ranges, Scheme
from l0prune.gating.attaching import bypass

INFINITE = float("inf")
SCHEME = Scheme(
    (QuantizedLayer("0", "0.weight", 0, True, 1), QuantizedLayer("3", "3.weight", 1, False)),
    ((-INFINITE, INFINITE), (0.0, INFINITE)),
    {"1": 1},
)
RANGES = Ranges(SCHEME, (-1.5, 0.0), (2.0, 3.0), (1, 1), 127)
X = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(1)
    layers = nn.Conv1d(2, 6, 1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 1)
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -2.0, 1.0, 0.1, 3.0, -1.0]))
        model[1].running_mean.uniform_(-1, 1)
    return model


@pytest.fixture
def model():
    model = l0prune.gate(network(), X[:2])
    gates = l0prune.gates(model)
    gates.set_open("0", [0, 2, 3, 5])
    FakeQuantizer.of(gates, RANGES).attach(model)
    return model


def rounded(values, step, zero, least, most):
    whole = np.clip(np.round(values / step) + zero, least, most)
    return (whole - zero) * step


def by_hand(model, x):
    """As a runtime computes it: BatchNorm folded, then each output's weights rounded."""
    z = l0prune.gates(model).z().double().numpy()
    conv, norm, last = (model[n] for n in (0, 1, 3))
    w, b = (p.detach().double().numpy() for p in (conv._parameters["weight"], conv.bias))
    g = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().double().numpy()
    w, b = w[:, :, 0] * g[:, None], (b - norm.running_mean.numpy()) * g
    b = b + norm.bias.detach().numpy()
    second = last._parameters["weight"].detach().double().numpy()[:, :, 0] * z
    for each in (w, second):
        steps = np.abs(each).max(1, keepdims=True) / 127
        each[:] = rounded(each, np.maximum(steps, 1e-12), 0, -127, 127)
    read = rounded(x.double().numpy(), 3.5 / 255, round(1.5 / (3.5 / 255)), 0, 255)
    hidden = rounded(np.einsum("oi,nit->not", w, read) + b[:, None], 3 / 255, 0, 0, 255)
    return np.einsum("oi,nit->not", second, hidden) + last.bias.detach().numpy()[:, None]


def test_it_computes_what_a_runtime_does_that_folds_batch_norm(model):
    with torch.no_grad():
        assert np.abs(model(X).numpy() - by_hand(model, X)).max() < 1e-5


def test_a_grid_is_that_of_the_file(model):
    step, zero = RANGES.grid(0)
    quantizer = l0prune.gates(model).quantizer
    values = torch.linspace(-3, 3, 999)
    expected = rounded(values.double().numpy(), float(step), zero, 0, 255)
    assert np.abs(quantizer.at(0, values).numpy() - expected).max() < 1e-6


def test_gradients_go_straight_through_and_not_where_a_value_is_clamped(model):
    quantizer = l0prune.gates(model).quantizer
    values = torch.tensor([-9.0, -1.0, 1.9, 2.5], requires_grad=True)
    quantizer.at(0, values).sum().backward()
    assert values.grad.tolist() == [0, 1, 1, 0]
    weight = torch.randn(3, 4, requires_grad=True)
    quantizer.weight(weight, 0).sum().backward()
    assert torch.equal(weight.grad, torch.ones(3, 4))


def test_ranges_are_moving_averages_of_what_steps_have_shown(model):
    gates = l0prune.gates(model)
    quantizer = FakeQuantizer(gates, SCHEME, 127)
    quantizer.attach(model)
    quantizer.is_observing = quantizer.is_on = True
    model.train()
    for scale in (1.0, 3.0):
        quantizer.forget()
        for half in X.split(3):  # two micro-batches
            assert bool(quantizer.counts[0]) == (scale > 1)
            model(scale * half)
        quantizer.advance(quantizer.seen, quantizer.computed)
    assert torch.allclose(quantizer.ranges[0], 2 * torch.stack(X.aminmax()))
    assert quantizer.ranges[1, 0] == 0  # before a ReLU
    assert quantizer.counts == [2, 2]
    model.eval()(9 * X)
    quantizer.advance(quantizer.seen, quantizer.computed)
    assert quantizer.counts == [2, 2]


def test_without_it_the_model_is_what_it_was(model):
    gates = l0prune.gates(model)
    plain = l0prune.gate(network(), X[:2])
    l0prune.gates(plain).set_open(gates.open())
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        quantized = model(X)
        with bypass(model):
            assert torch.equal(model(X), network()(X))
        gates.quantizer.detach(model)
        assert torch.equal(model(X), plain(X))
        assert not torch.equal(model(X), quantized)
    assert [type(module) for module in model] == [type(module) for module in plain]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


def test_ungate_takes_it_off(model):
    l0prune.ungate(model)
    assert [type(m) for m in model] == [nn.Conv1d, nn.BatchNorm1d, nn.ReLU, nn.Conv1d]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


def test_copies_pickles_and_files_have_their_own(model, tmp_path):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    l0prune.save(model, tmp_path / "model.pt")
    pickled = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), pickled, l0prune.load(tmp_path / "model.pt")):
        quantizer = l0prune.gates(other).quantizer
        with torch.no_grad():
            assert torch.equal(other(X), model(X))
            quantizer.off()
            assert not torch.equal(other(X), model(X))


def test_ranges_of_another_model_are_refused(model):
    other = l0prune.gate(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), X[0, 0, :3])
    with pytest.raises(UsageError, match="of another model"):
        FakeQuantizer(l0prune.gates(other), SCHEME, 127).attach(other)
    assert l0prune.gates(other).quantizer is None


@pytest.mark.parametrize("change", [{"least": [0.0]}, {"scheme": {}}, {"largest": "x"}])
def test_damaged_ranges_are_refused(change):
    with pytest.raises((ValueError, TypeError, LookupError)):
        Ranges.of({**RANGES.to_dict(), **change})
    assert Ranges.of(RANGES.to_dict()) == RANGES
