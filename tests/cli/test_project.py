"""Names of the files that commands write."""

from pathlib import Path

import pytest

from l0prune.cli.project import output_path

ONE = "def build():\n    return 1\n\n\ndef _help():\n    pass\n\n\ndef of(size):\n    pass\n"
SEVERAL = ONE + "\n\ndef wide():\n    pass\n"


@pytest.mark.parametrize(
    ("code", "source", "name"),
    [
        (ONE, "lenet.py:build", "lenet.onnx"),
        (SEVERAL, "lenet.py:build", "lenet-build.onnx"),  # else two models would share files
        (SEVERAL, "lenet.py:wide", "lenet-wide.onnx"),
        (SEVERAL, "lenet.py:lenet", "lenet.onnx"),
        (ONE, "lenet.py:Net", "Net.onnx"),
        (ONE, "torchvision:resnet18", "resnet18.onnx"),
        (ONE, "timm:hub/resnet", "hub_resnet.onnx"),
        (ONE, "some/model.gated.pt", "model.onnx"),
    ],
)
def test_files_are_named_after_the_model(tmp_path, monkeypatch, code, source, name):
    monkeypatch.chdir(tmp_path)
    Path("lenet.py").write_text(code)
    assert output_path(None, source, ".onnx") == Path(name)
    assert output_path(Path("own.onnx"), source, ".onnx") == Path("own.onnx")
