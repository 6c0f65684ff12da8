"""The scripts in examples/ run as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "examples"
# What each learns: the share that it gets right, and by chance.
LEARNS = {"bert_classification": 0.8, "llama_generation": 0.5, "timm_lightning": 0.7}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


NEEDS = {"timm_lightning": ("timm", "lightning"), "hard_concrete_vae": ("sklearn",)}


def script(name):
    for package in NEEDS.get(name, ("transformers", "accelerate")):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_them_are_here():
    assert {path.stem for path in ROOT.glob("*.py")} == {*LEARNS, "hard_concrete_vae"}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_an_example_runs(name, tmp_path, capsys):
    assert script(name).main(tmp_path) > LEARNS[name]
    said = capsys.readouterr().out
    for words in ("Export(", "l0prune.", "ONNX"):
        assert words in said


@pytest.mark.slow
def test_both_variational_autoencoders_learn():
    example = script("hard_concrete_vae")
    x, _ = example.images()
    p = x.mean(0)
    apart = -(p.xlogy(p) + (1 - p).xlogy(1 - p)).sum().item()  # pixels that know nothing of others
    for figures in example.main().values():
        assert figures.divergence > 0
        assert figures.bound < 0.9 * apart
        assert figures.binary < 0.75 * apart
