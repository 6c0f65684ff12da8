"""Input gates on the command line: from a model file to a file that skips blocks."""

import pytest
from stacks import Stack

import l0prune
from l0prune.features.exits.network import ExitNetwork
from l0prune.features.input_gates.network import InputGatedNetwork

CODE = """
import torch
from small_task import data as clouds
from stacks import stack

def build():
    return stack()

def data():
    return clouds()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:l0prune. exit")
def test_input_gates_and_exits_from_a_model_file_to_the_files(done, tmp_path):
    (tmp_path / "net.py").write_text(CODE)
    source = ("--data", "net.py:data")
    asked = ("--input-gates", "0.8", "--input-gates", "blocks.*", "--exits", "1", "--json")
    file = done("gate", "net.py:build", *source, *asked)[0]["file"]
    model = l0prune.load(file)
    assert isinstance(model, ExitNetwork)
    assert isinstance(model.network, InputGatedNetwork)
    assert model.network.target == 0.8
    assert isinstance(model.network.network, Stack)
    short = ("--budget", "params=0.8", "--epochs", "3", "--batch-size", "40", "--json")
    tuned = done("finetune", file, *source, *short)[0]["file"]
    options = ("--exits", "tolerance=20%", "--skipping", "--no-time", "--no-report", "--json")
    result, _ = done("export", tuned, *source, *options)
    plain, exits, skipping = result["files"]
    assert skipping.endswith("skipping.onnx")
    tested = (*source, "--batch-size", "1", "--json")
    errors = [done("evaluate", f, *tested)[0]["error"] for f in (plain, exits, skipping)]
    assert errors[0] == errors[2]
    assert errors[1] == pytest.approx(result["exits"]["value"])


def test_input_gates_have_one_share(refused, tmp_path):
    (tmp_path / "net.py").write_text(CODE)
    asked = ("--data", "net.py:data", "--input-gates", "0.8", "--input-gates", "0.5")
    assert "has two shares, 0.8 and 0.5" in refused(2, "gate", "net.py:build", *asked)
