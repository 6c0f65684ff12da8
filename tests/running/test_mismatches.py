"""Data that does not fit a model: messages name shapes, dtypes and the way on without labels."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import CaptureError, DataError


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def batches(inputs):
    return [(inputs, torch.zeros(len(inputs), dtype=torch.int64))] * 8


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.zeros(4, 7), r"inputs are \(4, 7\) of float32, .* gated with \(2, 6\) of float32"),
        (torch.zeros(4, 6).long(), r"\(4, 6\) of int64, .* gated with \(2, 6\) of float32"),
        (torch.zeros(4, 6).double(), r"\(4, 6\) of float64, .* gated with \(2, 6\) of float32"),
    ],
)
def test_training_data_of_another_shape_or_dtype(inputs, said):
    model = l0prune.gate(network(), torch.zeros(2, 6))
    with pytest.raises(DataError, match=said):
        l0prune.finetune(model, batches(inputs), budget="macs=0.5", progress=False)
    with pytest.raises(DataError, match=said):
        l0prune.evaluate(model, ([], batches(inputs)))
    with pytest.raises(DataError, match=re.escape(f"inputs are {tuple(inputs.shape)}")):
        l0prune.with_pseudo_labels(batches(inputs), network())


def test_equal_inputs_are_not_blamed():
    model = l0prune.gate(network(), torch.zeros(2, 6))
    with pytest.raises(DataError) as caught:
        l0prune.evaluate(model, ([], batches(torch.zeros(4, 6))), metric=lambda y, t: y @ t)
    assert "gated with" not in str(caught.value)


@pytest.mark.parametrize(
    "inputs", [torch.zeros(8, 6), [torch.zeros(4, 6)] * 4, [[torch.zeros(4, 6)]] * 4]
)
def test_without_labels_the_models_answers_are_named(inputs):
    model = l0prune.gate(network(), torch.zeros(2, 6))
    with pytest.raises(DataError, match=r"l0prune\.with_pseudo_labels\(inputs, model\)"):
        l0prune.finetune(model, inputs, budget="macs=0.5", progress=False)


def test_an_example_that_the_model_does_not_run_on():
    with pytest.raises(
        CaptureError, match=r"does not run on these inputs, \(2, 7\) of float32"
    ) as e:
        l0prune.gate(network(), torch.zeros(2, 7))
    assert "torch.export" not in str(e.value)


def test_a_refused_example_leaves_the_models_buffers_and_the_generators_alone():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.layer(x + torch.rand(x.shape))

    model, before = Counting(), torch.get_rng_state()
    with pytest.raises(CaptureError, match="does not run"):
        l0prune.gate(model, torch.zeros(2, 7))
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_path_names_a_model(tmp_path):
    torch.save(network(), tmp_path / "net.pt")
    torch.save(network().state_dict(), tmp_path / "state.pt")
    found = l0prune.load_model(Path(tmp_path / "net.pt"), Path(tmp_path / "state.pt"))
    assert torch.equal(found[0].weight, network()[0].weight)
