"""Messages about a network that came from an ONNX file name the file's nodes, and no code."""

import pytest
import torch
from onnx_files import draws, node, written

import l0prune
from l0prune.errors import CaptureError


@pytest.fixture
def model(tmp_path):
    weights = {"first": draws(4, 8), "last": draws(8, 2), "apart": [-1, 8, 1], "flat": [-1, 8]}
    nodes = [
        node("MatMul", "x first", "hidden", name="enter"),
        node("Reshape", "hidden apart", "column"),
        node("Relu", "column", "open"),
        node("Reshape", "open flat", "row"),
        node("MatMul", "row last", "y", name="leave"),
    ]
    return l0prune.load_model(written(tmp_path / "net.onnx", nodes, weights))


def test_a_survey_does_not_speak_of_code_that_the_user_has_not_got(model):
    found = l0prune.survey(model, model.example_input_array)
    assert found.plan.code.reused  # such sizes are given to the modules, whoever wrote them
    assert "code" not in str(found)
    assert "GivenSizes" not in str(found)


def test_an_input_that_does_not_fit_is_said_with_the_node(model):
    with pytest.raises(CaptureError) as caught:
        l0prune.gate(model, torch.zeros(2, 5))
    said = str(caught.value)
    assert "does not run on these inputs, (2, 5) of float32: it fails at MatMul (enter) of" in said
    assert "net.onnx" in said
    assert "(2, 4) of float32" in said  # what the file declares
    assert "torch.export" not in said
    assert "forward" not in said
