"""Early exits in a recipe: chosen on examples that are kept back, by a budget or a tolerance."""

import json
import warnings

import numpy as np
import onnxruntime
import pytest

import l0prune
from l0prune.doors import features
from l0prune.errors import UsageError

if "recipes" not in features():
    pytest.skip("recipes are not installed", allow_module_level=True)
from l0prune.features.recipes.files import builtin, load
from l0prune.features.recipes.runs import run


def test_its_recipe_is_a_builtin_one():
    assert "digits-exits" in builtin()


@pytest.mark.parametrize("override", ["exits.tolerance=", "exits.budget=macs=0.5"])
def test_exits_are_chosen_by_a_budget_or_a_tolerance(override):
    assert load("digits-exits", []).exits.budget is None
    with pytest.raises(UsageError, match="either a budget"):
        load("digits-exits", [override])


@pytest.mark.slow
def test_a_recipe_with_exits_chooses_them_on_examples_that_it_keeps_back(tmp_path):
    short = ["dense.epochs=3", "finetune.epochs=2", "finetune.settle=0.5", "exits.measure=macs"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="l0prune: exit")
        result = run(load("digits-exits", short), tmp_path / "run")
    exits = result["exits"]
    assert exits["held_out"] == round(0.2 * 1437)
    assert exits == json.loads((tmp_path / "run" / "result.json").read_text())["exits"]
    session = onnxruntime.InferenceSession(exits["onnx"])
    data = l0prune.load_data("digits").test
    found = [session.run(None, {"x": x[None].numpy()})[0].argmax() for x in data.inputs]
    wrong = np.mean(np.array(found) != data.targets.numpy())
    assert wrong == pytest.approx(exits["test_error"], abs=1e-9)
