"""The commands on a model that is an ONNX file."""

import torch
from differences import run_onnx
from onnx_files import draws, node, written

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
