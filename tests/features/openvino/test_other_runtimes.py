"""An ONNX file in the other runtimes that are installed: one that agrees is among the checks."""

import pytest
import torch
from torch import nn

import l0prune
from l0prune.features.openvino import check as other_runtimes


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))
    gated = l0prune.gate(model, (torch.randn(2, 3, 8, 8),))
    l0prune.gates(gated).set_open("0", [0, 2, 5])
    return l0prune.export(gated)


@pytest.mark.usefixtures("openvino")
def test_openvino_where_it_is_installed_computes_the_same(dense, tmp_path):
    dense.save_onnx(tmp_path / "net.onnx")
    (check,) = [each for each in dense.certificate.checks if each.what == "openvino"]
    assert check.error < check.tolerance
    dense.save_onnx(tmp_path / "again.onnx")
    assert [each.what for each in dense.certificate.checks].count("openvino") == 1


class Other:
    """A runtime that computes something else."""

    def __init__(self, path):
        assert path.exists()

    def __call__(self, inputs):
        return [torch.ones(len(inputs[0]), 4)]


class Broken(Other):
    """A runtime that lacks an operator."""

    def __call__(self, inputs):
        raise TypeError("no kernel for Conv")


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Other, "computes something else from this file"), (Broken, "cannot run.*no kernel for Conv")],
)
def test_one_that_does_not_is_warned_of_and_no_check(dense, tmp_path, monkeypatch, kind, said):
    monkeypatch.setattr(other_runtimes, "find_spec", lambda name: name)
    monkeypatch.setattr(other_runtimes, "_OpenVino", kind)
    with pytest.warns(l0prune.errors.L0pruneWarning, match=said):
        (file,) = dense.save_onnx(tmp_path / "net.onnx")
    assert file.exists()
    assert "openvino" not in {each.what for each in dense.certificate.checks}
