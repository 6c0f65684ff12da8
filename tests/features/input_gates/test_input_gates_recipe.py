"""Input gates in a recipe: what they leave is counted, and both files are written."""

import json

import numpy as np
import onnxruntime
import pytest

import l0prune
from l0prune.doors import features
from l0prune.errors import UsageError

if "sweep" not in features():
    pytest.skip("sweeps are not installed", allow_module_level=True)
from l0prune.features.recipes.files import load
from l0prune.features.recipes.runs import run
from l0prune.features.sweep.grid import Point


def test_runs_of_several_targets_train_each_a_network_of_their_own():
    keys = {
        Point("", {}, load("digits-exits", ["exits=", f"input_gates.target={target}"])).dense
        for target in (0.5, 0.6, 0.6)
    }
    assert len(keys) == 2


@pytest.mark.slow
def test_a_recipe_with_input_gates_counts_them_and_writes_both_files(tmp_path):
    own = ["exits=", "input_gates.target=0.6", "input_gates.shape=0.5"]
    short = ["dense.epochs=3", "finetune.epochs=2", "finetune.settle=0.5", *own]
    result = run(load("digits-exits", short), tmp_path / "run")
    found = result["input_gates"]
    assert 0 < found["expected"] <= found["whole"] == result["macs"]
    assert found == json.loads((tmp_path / "run" / "result.json").read_text())["input_gates"]
    data = l0prune.load_data("digits").test
    plain, skipping = map(onnxruntime.InferenceSession, (result["onnx"], found["onnx"]))
    for x in data.inputs[:50]:
        answers = [each.run(None, {"x": x[None].numpy()})[0] for each in (plain, skipping)]
        np.testing.assert_allclose(*answers, rtol=1e-4, atol=1e-4)


def test_rounds_and_input_gates_are_refused():
    with pytest.raises(UsageError, match="leave out input_gates or rounds"):
        load("mnist-lenet5-small", ["input_gates.target=0.6"])
