"""Rounding of a runtime, by the file of the uncut network beside its exact answer."""

import gc

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import CertificateError, L0pruneWarning
from l0prune.exporting import network
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.certificate import RuntimeRounding, compare_run
from l0prune.exporting.onnx import file, writing
from l0prune.exporting.uncut import rounding_in

ROUNDING = 3e-5  # of a runtime: more than 1e-5, and than torch rounds


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(self.first(x).relu()) + 16 - 16  # which rounds by some 1e-6


@pytest.fixture
def gated():
    return net()


def net():
    torch.manual_seed(0)
    model = l0prune.gate(Net().eval(), (torch.randn(2, 6),))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    return model


@pytest.fixture
def small(gated):
    return l0prune.export(gated)


def rounds(call, off=ROUNDING):
    """A runtime whose outputs are off by so much of their scale."""
    return lambda *args: [out + off * out.abs().max() for out in call(*args)]


@pytest.fixture
def wrong(monkeypatch):
    """A file that is wrong, in float64, too."""
    of_file = writing.run_in_float64
    monkeypatch.setattr(writing, "run_in_float64", rounds(of_file))


def test_a_runtime_is_allowed_what_it_rounds_in_the_uncut_network(
    gated, small, monkeypatch, tmp_path
):
    monkeypatch.setattr(file.Session, "__call__", rounds(file.Session.__call__))
    small.save_onnx(tmp_path / "net.onnx")
    check = max((c for c in small.certificate.checks if c.what == "onnx"), key=lambda c: c.error)
    assert check.error == pytest.approx(ROUNDING, rel=0.1)
    assert check.rounding == pytest.approx(ROUNDING, rel=0.1)
    assert check.tolerance == 2 * check.rounding


@pytest.mark.slow
def test_a_small_model_that_nobody_holds_is_still_known(monkeypatch, tmp_path):
    small = l0prune.export(net())
    gc.collect()
    monkeypatch.setattr(file.Session, "__call__", rounds(file.Session.__call__))
    small.save_onnx(tmp_path / "net.onnx")
    found = [check.error for check in small.certificate.checks if check.what == "onnx"]
    assert max(found) == pytest.approx(ROUNDING, rel=0.1)


@pytest.mark.usefixtures("wrong")
@pytest.mark.slow
def test_a_large_model_that_nobody_holds_is_named_as_the_cause(monkeypatch, tmp_path):
    monkeypatch.setattr(network, "_KEPT_ALIVE", 0)
    small = l0prune.export(net())
    gc.collect()
    monkeypatch.setattr(file.Session, "__call__", rounds(file.Session.__call__))
    with (
        pytest.warns(L0pruneWarning, match="keep the model until the files are written"),
        pytest.raises(CertificateError, match="onnx in float32"),
    ):
        small.save_onnx(tmp_path / "net.onnx")


@pytest.mark.usefixtures("wrong")
def test_what_is_wrong_in_the_small_file_alone_is_a_fault(
    gated, small, wrong, monkeypatch, tmp_path
):
    exact = file.Session.__call__
    monkeypatch.setattr(file.Session, "__call__", rounds(exact))

    def right(program, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(file.Session, "__call__", exact)
            return file.outputs_of(program, inputs)

    monkeypatch.setattr(writing, "outputs_of", right)
    with pytest.raises(CertificateError, match="onnx in float32"):
        small.save_onnx(tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.usefixtures("wrong")
@pytest.mark.slow
def test_what_both_files_have_and_torch_has_not_is_a_fault(monkeypatch, tmp_path):
    """An operator that is translated wrongly is wrong in the uncut network's file, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    small = l0prune.export(l0prune.gate(model, torch.randn(2, 6)))
    monkeypatch.setattr(file.Session, "__call__", rounds(file.Session.__call__))
    with pytest.raises(CertificateError, match="onnx in float32"):
        small.save_onnx(tmp_path / "net.onnx")


@pytest.mark.usefixtures("wrong")
def test_ten_times_its_rounding_is_a_fault(gated, small, monkeypatch, tmp_path):
    exact = file.Session.__call__
    monkeypatch.setattr(file.Session, "__call__", rounds(exact))
    known = writing.outputs_of

    def of_uncut(program, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(file.Session, "__call__", rounds(exact, ROUNDING / 10))
            return known(program, inputs)

    monkeypatch.setattr(writing, "outputs_of", of_uncut)
    with pytest.raises(CertificateError, match="onnx in float32"):
        small.save_onnx(tmp_path / "net.onnx")


@pytest.mark.slow
def test_what_the_small_file_alone_rounds_is_no_fault_where_it_is_exact_in_float64(
    gated, small, monkeypatch, tmp_path
):
    exact = file.Session.__call__
    known = writing.outputs_of
    monkeypatch.setattr(file.Session, "__call__", rounds(exact))

    def of_uncut(program, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(file.Session, "__call__", exact)
            return known(program, inputs)

    monkeypatch.setattr(writing, "outputs_of", of_uncut)
    small.save_onnx(tmp_path / "net.onnx")
    found = {c.dtype: c.error for c in small.certificate.checks if c.what == "onnx"}
    assert found["float64"] < 1e-6 < found["float32"]
    monkeypatch.setattr(file.Session, "__call__", rounds(exact, 2e-3))
    with pytest.raises(CertificateError, match="onnx in float32"):
        small.save_onnx(tmp_path / "other.onnx")


def test_it_is_the_gated_network_that_is_run(gated, small):
    """Closed gates multiply by zero there, and the example has its own sizes."""
    (piece,) = small.pieces
    seen = []

    def run(program, inputs):
        ((x,), _), module = inputs, program.module(check_guards=False)
        seen.append(sorted(tuple(p.shape) for p in module.parameters()))
        with torch.no_grad():
            expected, found = gated(x), module(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)
        return [found]

    (error,) = rounding_in(run, piece.original, piece.answers[0].inputs).errors
    assert seen == [[(3,), (3, 16), (16,), (16, 6)]]
    assert 0 < error < 4e-6


def test_a_model_without_gates_is_the_uncut_network(gated, small):
    (piece,) = small.pieces
    inputs = piece.answers[0].inputs
    dense = l0prune.ungate(gated)
    with torch.no_grad():
        off = dense(*inputs[0]) + 1
    found = rounding_in(lambda program, inputs: [off], piece.original, inputs)
    assert found.errors == pytest.approx([1], rel=1e-5)
    assert found.is_other


@pytest.mark.parametrize("is_other", [True, False])
def test_roundings_of_two_networks_add(is_other):
    """Those of one network in torch and in a runtime do not: they are of the same numbers."""
    exact = torch.tensor([1.0, 0.5], dtype=torch.float64)
    own, runtime = 2e-5, 3e-5
    inputs = ((torch.zeros(1, 2),), {})
    answer = Answer(inputs, [exact], [exact.float() + own], scales=(1.0,))
    found = RuntimeRounding([runtime], [1.0], is_other)
    most = 2 * (own + runtime) if is_other else 2 * runtime

    def compared(off):
        return compare_run("onnx", answer, [answer.single[0] + off], own=lambda _: found)

    check = compared(0.9 * most)
    assert check.tolerance == pytest.approx(most, rel=0.01)
    assert check.passed
    assert not compared(1.1 * most).passed


def test_without_the_model_it_is_unknown(small):
    (piece,) = small.pieces
    inputs = piece.answers[0].inputs
    assert rounding_in(lambda program, inputs: [], None, inputs) == RuntimeRounding()


@pytest.fixture
def vanishing():
    """A gated network whose probabilities are 0.1 to 1 with open gates, and 1e-8 when cut."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Sigmoid())
    with torch.no_grad():
        net[0].bias.fill_(8.0)
        net[2].weight.fill_(1 / 8).add_(torch.randn(3, 16) / 50)
        net[2].bias.fill_(-18.5)
    l0prune.gate(net, (torch.randn(4, 6),))
    with torch.no_grad():
        l0prune.gates(net).log_alpha[:14] = -9
    return net


@pytest.mark.slow
def test_a_runtimes_sigmoid_beside_probabilities_that_vanish(vanishing, tmp_path):
    small = l0prune.export(vanishing)
    small.save_onnx(tmp_path / "net.onnx")
    worst = small.certificate.worst("onnx", "float32")
    assert worst > 1e-3, "the runtime's sigmoid is not right to the last place of 1e-8"


def test_a_fault_beside_probabilities_that_vanish(vanishing, monkeypatch, tmp_path):
    """The error is one that shows on the scale of the network with open gates."""
    small = l0prune.export(vanishing)
    exact = file.Session.__call__

    def faulty(session, inputs):
        return [each + 1e-6 for each in exact(session, inputs)]

    known = writing.outputs_of

    def of_uncut(program, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(file.Session, "__call__", exact)
            return known(program, inputs)

    monkeypatch.setattr(writing, "outputs_of", of_uncut)
    monkeypatch.setattr(file.Session, "__call__", faulty)
    with pytest.raises(CertificateError, match="onnx in float32"):
        small.save_onnx(tmp_path / "net.onnx")
