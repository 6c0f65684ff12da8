"""The scripts in examples/ run as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "examples"
# What each learns: the share that it gets right, and by chance.
LEARNS = {"bert_classification": 0.8, "llama_generation": 0.5, "timm_lightning": 0.7}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


def script(name):
    for package in (
        ("transformers", "accelerate") if name != "timm_lightning" else ("timm", "lightning")
    ):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_them_are_here():
    assert {path.stem for path in ROOT.glob("*.py")} == LEARNS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_an_example_runs(name, tmp_path, capsys):
    assert script(name).main(tmp_path) > LEARNS[name]
    said = capsys.readouterr().out
    for words in ("Export(", "l0prune.", "ONNX"):
        assert words in said
