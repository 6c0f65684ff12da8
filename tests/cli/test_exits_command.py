"""Early exits on the command line: from a model file to a file that is left early."""

import pytest
import torch
from stacks import Stack

import l0prune
from l0prune.files.exit_network import ExitNetwork
from l0prune.files.input_gates import InputGatedNetwork

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
def test_from_a_model_file_to_a_file_that_is_left_early(done, tmp_path):
    (tmp_path / "net.py").write_text(CODE)
    source = ("--data", "net.py:data")
    file = done("gate", "net.py:build", *source, "--exits", "1", "--json")[0]["file"]
    model = l0prune.load(file)
    assert type(model) is ExitNetwork
    assert type(model.network) is Stack
    assert model.at == ("blocks.1",)
    asked = (file, *source, "--exits", "tolerance=20%", "--no-time", "--no-report", "--json")
    result, _ = done("export", *asked)
    assert result["files"][-1].endswith("exits.onnx")
    assert sum(result["exits"]["shares"]) == pytest.approx(1)
    tested = ("evaluate", result["files"][-1], *source, "--batch-size", "1", "--json")
    assert done(*tested)[0]["error"] == pytest.approx(result["exits"]["value"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:l0prune. exit")
def test_input_gates_and_exits_from_a_model_file_to_the_files(done, tmp_path):
    (tmp_path / "net.py").write_text(CODE)
    source = ("--data", "net.py:data")
    asked = ("--input-gates", "0.8", "--input-gates", "blocks.*", "--exits", "1", "--json")
    file = done("gate", "net.py:build", *source, *asked)[0]["file"]
    model = l0prune.load(file)
    assert type(model) is ExitNetwork
    assert type(model.network) is InputGatedNetwork
    assert model.network.target == 0.8
    assert type(model.network.network) is Stack
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


def test_networks_of_torch_with_exits_are_ordinary(tmp_path):
    block = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU())
    network = torch.nn.Sequential(block, torch.nn.Sequential(*block), torch.nn.Linear(6, 3))
    model = l0prune.add_exits(network, torch.randn(2, 6), at="0").eval()
    l0prune.save(model, tmp_path / "model.pt")
    again = l0prune.load(tmp_path / "model.pt")
    x = torch.randn(3, 6)
    assert torch.equal(again(x).exits[0], model(x).exits[0])
    assert torch.equal(again(x).logits, model(x).logits)
