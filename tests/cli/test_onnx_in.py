"""The commands on a model that is an ONNX file."""

import torch
from differences import run_onnx
from onnx_files import draws, node, written

from l0prune.files.model_sources import load_model


def test_an_ONNX_file_is_gated_fitted_and_exported_by_bare_commands(done, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "y")]
    path = written(tmp_path / "model.onnx", nodes, {"w": draws(4, 16), "v": draws(16, 3)})
    _, err = done("gate", "model.onnx")
    assert "the example input is 2x4:float32, from the file" in err
    done("fit", "--score", "magnitude", "--budget", "params=0.5")
    found, _ = done("export", "--no-time", "--no-report", "--json")
    assert found["files"] == ["model.fit.onnx"]
    assert found["params"] <= 0.5 * found["params_before"] == 56
    assert "source" in {check["what"] for check in found["certificate"]}
    x = torch.randn(5, 4)
    (answer,) = run_onnx(tmp_path / "model.fit.onnx", x)
    assert load_model(path)(x).shape == answer.shape
