"""The commands on a model that is an ONNX file."""

import numpy as np
import pytest
import torch
from differences import run_onnx
from onnx_files import draws, node, written

import l0prune
from l0prune.cli.project import only_model
from l0prune.files.model_sources import load_model


def test_an_ONNX_file_is_gated_fitted_and_exported_by_bare_commands(
    done, refused, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "y")]
    path = written(tmp_path / "model.onnx", nodes, {"w": draws(4, 16), "v": draws(16, 3)})
    _, err = done("gate")
    assert "the model is model.onnx" in err
    assert "the example input is 2x4:float32, from the file" in err
    done("fit", "--score", "magnitude", "--budget", "params=0.5")
    found, _ = done("export", "--no-time", "--no-report", "--json")
    assert found["files"] == ["model.fit.onnx"]
    assert found["params"] <= 0.5 * found["params_before"] == 56
    assert "source" in {check["what"] for check in found["certificate"]}
    assert only_model() == "model.onnx"  # and not what the export wrote
    (tmp_path / "other.onnx").write_bytes((tmp_path / "model.onnx").read_bytes())
    assert "2 model files here: model.onnx, other.onnx. Name one" in refused(2, "survey")
    (tmp_path / "model.pt").touch()
    assert only_model() == "model.pt"
    x = torch.randn(5, 4)
    (answer,) = run_onnx(tmp_path / "model.fit.onnx", x)
    assert load_model(path)(x).shape == answer.shape


@pytest.mark.parametrize("width", [6, 100])
@pytest.mark.parametrize("kind", ["ConstantOfShape", "Expand"])
def test_states_that_a_file_fills_by_a_shape_have_any_batch(tmp_path, kind, width):
    """States of zeros, as a recurrent cell that is called step by step begins with."""
    filled = "size" if kind == "ConstantOfShape" else "zero size"
    nodes = [
        node("Shape", "x", "all", end=1),
        node("Concat", "all width", "size", axis=0),
        node(kind, filled, "state"),
        node("Gemm", "state w b", "of_state"),
        node("MatMul", "x v", "of_x"),
        node("Add", "of_state of_x", "h"),
        node("Tanh", "h", "t"),
        node("MatMul", "t u", "y"),
    ]
    weights = {"w": draws(width, 8), "b": draws(8), "v": draws(4, 8), "u": draws(8, 3)}
    weights["width"] = np.array([width])
    if kind == "Expand":
        weights["zero"] = np.zeros((1, 1), np.float32)
    path = written(tmp_path / "model.onnx", nodes, weights)
    model = load_model(path)
    l0prune.gate(model, torch.randn(2, 4))
    l0prune.fit(model, "params=0.7", scores=l0prune.score(model, "magnitude"))
    small = l0prune.export(model)
    assert small.params < small.params_before
    errors = [each.error for each in small.certificate.checks if each.dtype == "float64"]
    assert errors
    assert max(errors) < 1e-12
    (file,) = small.save_onnx(tmp_path / "small.onnx", time=False)
    x = torch.randn(5, 4)
    (found,) = run_onnx(file, x)
    assert torch.allclose(torch.as_tensor(found), small.module(x), atol=1e-5)
