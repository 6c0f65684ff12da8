"""ONNX files in float64, which tell a runtime's rounding from what is translated wrongly."""

import copy

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import answers_of
from l0prune.exporting.certify.certificate import (
    Certificate,
    RuntimeRounding,
    compare,
    compare_file,
)
from l0prune.exporting.onnx import file, writing
from l0prune.exporting.onnx.reference import run_in_float64


class ManyKinds(nn.Module):
    """Convolutions, norms, attention, a recurrent layer, and constants of several kinds."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm(self.conv(x)).clamp(-2.5, 3.0).mT
        found, at = x.new_zeros(x.shape), torch.arange(x.shape[1])
        found[:, at] = self.lstm(x)[0]
        x = self.attention(found)
        x = torch.where(x > 0.1, x, x.tanh() * 0.3)
        return self.head(x.mean(1)) / (1 + torch.arange(4).float())


def test_a_file_in_float64_is_exact(tmp_path):
    torch.manual_seed(0)
    model, x = ManyKinds().eval(), torch.randn(3, 3, 10)
    l0prune.export(l0prune.gate(copy.deepcopy(model), x)).save_onnx(tmp_path / "net.onnx")
    (found,) = run_in_float64(tmp_path / "net.onnx", [x])
    with torch.no_grad():
        expected, single = model.double()(x.double()), model.float()(x)
    assert found.dtype == torch.float64
    error = (found - expected).abs().max()
    assert error < 1e-8  # constants are in float32
    assert error < 0.1 * (single - expected).abs().max()


@pytest.mark.parametrize(("off", "exactly", "is_allowed"), [
    (3e-5, 0.0, True), (3e-5, None, False), (3e-5, 3e-5, False), (3e-3, 0.0, False),
])  # fmt: skip
def test_what_is_exact_in_float64_is_the_runtimes_rounding(off, exactly, is_allowed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)).eval()
    answers = answers_of(model, [((torch.randn(5, 8),), {})])
    exact = model.double()

    def run(given, by=off):
        with torch.no_grad():
            return [exact(given[0].double()) * (1 + by)]

    in_float64 = None if exactly is None else lambda given: run(given, exactly)
    checks = compare_file("onnx", answers, run, run_in_float64=in_float64)
    kinds = ["float32"] if exactly is None else ["float64", "float32"]
    assert [check.dtype for check in checks] == kinds
    if is_allowed:
        Certificate((*checks,))
        assert checks[-1].error == pytest.approx(off, rel=1e-2)
    else:
        with pytest.raises(CertificateError):
            Certificate((*checks,))


@pytest.mark.slow
def test_a_runtime_that_rounds_much_is_no_reason_to_refuse_a_file(tmp_path, monkeypatch):
    """As by ONNX Runtime's norms, which take mean and variance in one pass."""
    torch.manual_seed(0)
    model = l0prune.gate(ManyKinds().eval(), torch.randn(3, 3, 10))
    small = l0prune.export(model)
    plain = file.Session.__call__
    monkeypatch.setattr(file.Session, "__call__", lambda *args: [x * 1.00003 for x in plain(*args)])
    monkeypatch.setattr(writing, "rounding_in", lambda *args: RuntimeRounding())
    small.save_onnx(tmp_path / "net.onnx", time=False)
    kinds = [(c.what, c.dtype) for c in small.certificate.checks]
    assert ("onnx", "float64") in kinds


class Rounds(nn.Module):
    """A network that rounds by some 1e-6, and its copy that is off by more."""

    def __init__(self, single=0.0, double=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.off = {torch.float32: single, torch.float64: double}

    def forward(self, x):
        found = self.second(self.first(x).relu()) + 64 - 64
        return found + self.off[found.dtype] * found.abs().max()


@pytest.mark.parametrize(("times", "double", "is_allowed"), [
    (4, 0.0, True), (8, 0.0, False), (4, 1e-9, False),
])  # fmt: skip
def test_in_float32_a_model_that_is_exact_may_round_more_than_was_measured(
    times, double, is_allowed
):
    answers = answers_of(Rounds().eval(), [((torch.randn(50, 6),), {})])
    (answer,) = (each.measured_on(Rounds().eval()) for each in answers)
    alone = max(answer.rounding, *(max(run) for run in answer.measured()))
    assert 2 * alone > 2e-6
    off = max(times * alone, 1.2e-5)
    checks = [*compare([answer], Rounds(off - answer.rounding, double).eval())]
    assert all(check.passed for check in checks) is is_allowed
