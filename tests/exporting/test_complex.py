"""Complex parameters: exported with both of their parts, and learned as such."""

from __future__ import annotations

import pytest
import torch
from differences import onnx_difference
from networks import Fn
from torch import nn

import l0prune
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.dtypes import converted
from l0prune.training.averages import Average
from l0prune.training.penalty import ExpectedSquares


def filtered(m, x):
    """As GFNet has it: each channel times a filter of its own, in frequencies."""
    y = m.a(x)
    waves = torch.fft.rfft2(y, dim=(1, 2), norm="ortho") * m.filter
    y = y + torch.fft.irfft2(waves, s=(6, 6), dim=(1, 2), norm="ortho")
    return m.c(torch.relu(m.b(y)).mean((1, 2)))


def mixed(m, x):
    """As AFNO has it: channels mixed by a complex matrix, in frequencies."""
    waves = torch.fft.rfft(torch.relu(m.a(x)), dim=1)
    waves = torch.einsum("bnc,cd->bnd", waves, m.mix) + m.shift
    return m.c(torch.fft.irfft(waves, n=6, dim=1).mean(1))


def number(*shape):
    return nn.Parameter(torch.randn(*shape, dtype=torch.complex64))


def with_filter():
    torch.manual_seed(0)
    layers = {"a": nn.Linear(3, 8), "b": nn.Linear(8, 7), "c": nn.Linear(7, 4)}
    return Fn(filtered, **layers, filter=number(6, 4, 8)).eval(), torch.randn(2, 6, 6, 3)


def with_matrix():
    torch.manual_seed(0)
    layers = {"a": nn.Linear(3, 8), "c": nn.Linear(5, 4)}
    return Fn(mixed, **layers, mix=number(8, 5), shift=number(5)).eval(), torch.randn(2, 6, 3)


def gated(model, x):
    l0prune.gate(model, x, exclude="*.in")
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::3] = -9
        l0prune.gates(model).log_alpha[1::3] = 0.4  # open, and less than 1
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_a_learned_filter_is_cut_with_both_of_its_parts(dtype, tmp_path):
    model, x = with_filter()
    if dtype == torch.float64:
        model, x = model.double(), x.double()
    gated(model, x)
    assert model.filter.dtype == torch.complex64  # torch's double() leaves it
    small = l0prune.export(model)
    assert small.rebuilt
    assert small.note == ""
    assert small.widths["a"] == (5, 8)
    assert small.module.filter.shape == (6, 4, 5)
    assert {p.dtype for p in small.module.parameters()} == {dtype, torch.complex64}
    other = torch.randn(3, 6, 6, 3, dtype=dtype)
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-7, "rtol": 1e-6}
    torch.testing.assert_close(small.module(other), model(other), **close)
    torch.testing.assert_close(small.program.module()(other), model(other), **close)
    small.save_onnx(tmp_path / "model.onnx")
    if dtype == torch.float32:
        assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= 1e-5


def test_a_complex_matrix_is_cut_on_both_sides():
    model, x = with_matrix()
    small = l0prune.export(gated(model, x))
    assert small.module.mix.shape == (5, 3)
    assert small.module.shift.shape == (3,)
    other = torch.randn(3, 6, 3)
    torch.testing.assert_close(small.module(other), model(other))


def test_a_copy_in_another_dtype_keeps_imaginary_parts():
    model, _ = with_matrix()
    other = converted(model, torch.float64)
    assert {p.dtype for p in other.parameters()} == {torch.float64, torch.complex128}
    assert torch.equal(other.mix.to(torch.complex64), model.mix)
    assert {p.dtype for p in converted(model, torch.bfloat16).parameters()} == {
        torch.bfloat16,
        torch.complex64,
    }


def test_outputs_that_differ_in_their_imaginary_parts_differ():
    a = torch.complex(torch.ones(3), torch.zeros(3))
    assert difference(a, a) == 0
    assert difference(a, a + 0.5j) == pytest.approx(0.5)


def test_complex_weights_learn_and_are_scored():
    model, x = with_matrix()
    gated(model, x)
    before = model.mix.detach().clone()
    data = [(torch.randn(4, 6, 3), torch.randint(4, (4,))) for _ in range(3)]
    task = l0prune.Task(data, size=12)
    scores = {how: l0prune.score(model, how, task) for how in ("group-magnitude", "taylor")}
    assert all(bool((found > 0).any()) for found in scores.values())
    l0prune.finetune(model, task, epochs=1, l2=1e-3, ema=0.9, clip=1.0, device="cpu")
    after = model.mix.detach()
    assert not torch.equal(before.imag, after.imag)


def test_a_complex_parameter_is_averaged_by_its_parts():
    model = nn.Module()
    model.register_parameter("w", number(3))
    average, first = Average(model, 0.5), model.w.detach().clone()
    with torch.no_grad():
        model.w += 1 + 2j
    average.update()
    average.show()
    torch.testing.assert_close(model.w.detach(), first + (1 - 0.1) * (1 + 2j))


def test_of_complex_weights_penalty_and_scores_count_both_parts():
    model, x = with_matrix()
    l0prune.gate(model, x, include="mix")
    plan = l0prune.gates(model).plan
    squares = {n: p.detach().abs().double().square() for n, p in model.named_parameters()}
    del squares["l0prune_gates.log_alpha"]
    always = torch.ones(plan.size, dtype=torch.float64)
    found = ExpectedSquares(plan).total(model, always, "joint")
    assert found.item() == pytest.approx(sum(map(float, (s.sum() for s in squares.values()))))
    scores = l0prune.score(model, "group-magnitude", normalise="none")
    expected = squares["mix"].sum(0) + squares["shift"] + squares["c.weight"].sum(0)
    torch.testing.assert_close(scores, expected.sqrt(), rtol=1e-6, atol=1e-6)
