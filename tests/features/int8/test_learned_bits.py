"""Learned bits beside quantizers that are written out by hand (Bayesian Bits, 2005.07093)."""

import copy
import io
import math

import pytest
import torch
from few_bits import MENU, SCHEME, X, quantized

import l0prune
from l0prune.features.int8.fake_quantizer import FakeQuantizer
from l0prune.features.int8.learned_bits import (
    LearnedBits,
    mixed,
    point_grids,
    quantizer_of,
    shares_of,
    weight_grids,
)


def values(least, most):
    generator = torch.Generator().manual_seed(5)
    return least + (most - least) * torch.rand(400, dtype=torch.float64, generator=generator)


def residuals(x, least, most, gates):
    """Eq. 1 to 6 as they stand: values, the ends of the range, and z₄, z₈, z₁₆."""
    x = x.clamp(least * (1 - 1e-7), most * (1 - 1e-7))
    step = (most - least) / 3
    parts = [step * (x / step).round()]
    for bits in (2, 4, 8):
        step /= 2**bits + 1
        parts.append(step * ((x - sum(parts)) / step).round())
    first, *rest = parts
    inner = torch.zeros_like(x)
    for gate, part in zip(reversed(gates), reversed(rest), strict=True):
        inner = gate * (part + inner)
    return first + inner


@pytest.mark.parametrize("gates", [(0, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (0.3, 0.8, 0.5)])
def test_residuals_of_the_paper(gates):
    z = torch.tensor([1.0, *gates], dtype=torch.float64)
    none = torch.zeros((), dtype=torch.float64)
    end = torch.tensor([1.7], dtype=torch.float64)
    x, beta = values(-1.7, 1.7), 1.7 * 65535 / 65534
    found = mixed(x, none, z, weight_grids(end, MENU))
    assert torch.allclose(found, residuals(x, -beta, beta, gates), rtol=0, atol=1e-14)
    x = values(0, 2.0)
    least, most = torch.tensor([0.0, 1.9], dtype=torch.float64)
    found = mixed(x, none, z, point_grids(least, most, MENU))
    assert torch.allclose(found, residuals(x, 0.0, 1.9, gates), rtol=0, atol=1e-14)


@pytest.mark.slow
def test_compiled_a_mixture_of_grids_has_the_same_gradients():
    def gradients(mix):
        own = [values(-1, 1), torch.zeros(()).double(), torch.tensor([1.0, 0.6, 0.3]).double()]
        for each in own:
            each.requires_grad_()
        mix(*own).pow(3).sum().backward()
        return [each.grad for each in own]

    def mix(x, theta, z):
        return mixed(x, theta, z, weight_grids(torch.tensor([1.7]).double(), (2, 4, 8)))

    compiled = torch.compile(mix, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(gradients(compiled), gradients(mix), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", range(4))
def test_gates_that_are_open_give_the_uniform_quantizer_exactly(level):
    z = torch.tensor([float(n <= level) for n in range(4)], dtype=torch.float64)
    x, largest = values(-2, 2), torch.tensor([1.5], dtype=torch.float64)
    grids, none = weight_grids(largest, MENU), torch.zeros((), dtype=torch.float64)
    bits = MENU[level]
    step = float(grids[level].step)
    assert step == pytest.approx(2 * 1.5 * 65535 / 65534 / (2**bits - 1), rel=1e-14)
    uniform = step * (x / step).round().clamp(-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)
    assert torch.equal(mixed(x, none, z, grids), uniform)
    if level:
        assert float(grids[level - 1].step) == pytest.approx(
            step * (2 ** MENU[level - 1] + 1), rel=1e-14
        )
    ends = torch.tensor([-0.7, 2.1], dtype=torch.float64)
    step, zero = 2.8 / (2**bits - 1), round(0.7 / (2.8 / (2**bits - 1)))
    uniform = step * ((x / step).round() + zero).clamp(0, 2**bits - 1) - step * zero
    found = mixed(x, none, z, point_grids(*ends, MENU))
    assert torch.allclose(found, uniform, rtol=0, atol=1e-14)


def test_gradients_of_gates_are_those_of_the_formula():
    """It is linear in each gate, so that differences are exact."""
    z = torch.tensor([1.0, 0.4, 0.9, 0.2], dtype=torch.float64, requires_grad=True)
    x, weights = values(-1, 1), values(-3, 3)
    grids = weight_grids(torch.ones(1, dtype=torch.float64), MENU)
    none = torch.zeros((), dtype=torch.float64)

    def loss(gates):
        return (weights * mixed(x, none, gates, grids)).sum()

    (found,) = torch.autograd.grad(loss(z), z)
    for level in range(1, 4):
        moved = torch.zeros_like(z)
        moved[level] = 0.1
        change = float(loss((z + moved).detach()) - loss((z - moved).detach())) / 0.2
        assert float(found[level]) == pytest.approx(change, rel=1e-9)


def test_gradients_of_values_and_range():
    """Straight through inside; for θ, of which the range is exp(θ) times as large, PACT and LSQ."""
    x = torch.tensor([-0.2, 0.6, 2.7, 9.0], dtype=torch.float64, requires_grad=True)
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    z = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    least, most = torch.tensor([0.0, 3.0], dtype=torch.float64)
    found = mixed(x, theta, z, point_grids(least, most, MENU))
    of_x, of_theta = torch.autograd.grad(found.sum(), (x, theta))
    assert of_x.tolist() == [0, 1, 1, 0]
    step = 3.0 / 15
    inside = sum(step * (round(v / step) - v / step) for v in (0.6, 2.7))
    assert float(of_theta) == pytest.approx(0 + inside + 3.0)


def test_shares_are_one_together():
    z = torch.tensor([1.0, 0.7, 0.2, 0.9])
    expected = [0.3, 0.7 * 0.8, 0.7 * 0.2 * 0.1, 0.7 * 0.2 * 0.9]
    assert shares_of(z).tolist() == pytest.approx(expected)


def test_eight_bits_alone_are_int8():
    model, gates = quantized((8,))
    with torch.no_grad():
        found = model(X)
        ranges = gates.quantizer.found
        (int8 := FakeQuantizer(gates, SCHEME, 127)).attach(model)
        int8.load(torch.tensor([ranges.least, ranges.most]).T, ranges.counts)
        int8.is_on = True
        assert float((model(X) - found).abs().max()) < 1e-6


def test_bits_are_there_where_they_are_absent_in_less_than_a_third_of_samples():
    _, gates = quantized(MENU)
    weight = gates.plan.axes[-4]
    closed = [0.1, 0.33, 0.35, 0.1]
    shift = 2 / 3 * math.log(0.1 / 1.1)
    with torch.no_grad():
        log_alpha = [math.log((1 - q) / q) + shift for q in closed]
        gates.log_alpha[weight.slice] = torch.tensor(log_alpha)
    assert gates.z()[weight.slice].tolist() == [1, 1, 0, 1]
    assert gates.quantizer.bits["0.weight.bits"] == 4


def test_copies_pickles_and_files_have_their_own(tmp_path):
    model, gates = quantized(MENU)
    with torch.no_grad():
        gates.clips.copy_(torch.linspace(-0.5, 0.1, len(gates.clips)))
        gates.log_alpha[-2] = -4.0
        model(X)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    l0prune.save(model, tmp_path / "model.pt")
    pickled = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), pickled, l0prune.load(tmp_path / "model.pt")):
        others = l0prune.gates(other)
        assert others.quantizer.gates is others
        with torch.no_grad():
            assert torch.equal(other(X), model(X))
            others.clips.zero_()
            assert not torch.equal(other(X), model(X))


def test_damaged_menus_are_refused():
    _, gates = quantized(MENU)
    ranges = gates.quantizer.found
    assert type(quantizer_of(gates, ranges)) is LearnedBits
    with pytest.raises(l0prune.errors.UsageError, match="no menu"):
        quantizer_of(gates, type(ranges).of({**ranges.to_dict(), "menu": [2, 10**9]}))


def test_its_weights_are_put_on_their_grids_and_the_model_stays():
    model, gates = quantized(MENU)
    with torch.no_grad():
        gates.log_alpha[gates.plan.axes[-4].slice][1] = -4.0
        before, output = copy.deepcopy(model.state_dict()), model(X)
        small = l0prune.export(model)
        assert torch.equal(model(X), output)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    bits = dict(zip(("0", "3"), small.ranges.bits.weights, strict=True))
    assert bits == {"0": 2, "3": 16}
    rows = small.module[0].weight.detach().flatten(1)
    assert len(rows) == 4
    for row, end in zip(rows, small.ranges.bits.ends[0], strict=True):
        step = row.abs().max() / end
        assert torch.allclose(row / step, (row / step).round(), atol=1e-5)
        assert end == 1
