"""Early exits on the command line: from a model file to a file that is left early."""

import pytest
import torch
from stacks import Stack

import l0prune
from l0prune.features.exits.network import ExitNetwork

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
    assert isinstance(model, ExitNetwork)
    assert isinstance(model.network, Stack)
    assert model.at == ("blocks.1",)
    asked = (file, *source, "--exits", "tolerance=20%", "--no-time", "--no-report", "--json")
    result, _ = done("export", *asked)
    assert result["files"][-1].endswith("exits.onnx")
    assert sum(result["exits"]["shares"]) == pytest.approx(1)
    tested = ("evaluate", result["files"][-1], *source, "--batch-size", "1", "--json")
    assert done(*tested)[0]["error"] == pytest.approx(result["exits"]["value"])


def test_networks_of_torch_with_exits_are_ordinary(tmp_path):
    block = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU())
    network = torch.nn.Sequential(block, torch.nn.Sequential(*block), torch.nn.Linear(6, 3))
    model = l0prune.add_exits(network, torch.randn(2, 6), at="0").eval()
    l0prune.save(model, tmp_path / "model.pt")
    again = l0prune.load(tmp_path / "model.pt")
    x = torch.randn(3, 6)
    assert torch.equal(again(x).exits[0], model(x).exits[0])
    assert torch.equal(again(x).logits, model(x).logits)
