"""Weights that are subnormal, or become so: nothing that is handed out has any."""

import numpy as np
import onnx
import pytest
import torch
from deadness import close_some, randomise
from differences import ROUNDED, as_graph, difference, onnx_difference
from onnx import numpy_helper
from torch import nn

import l0prune

TINY = torch.finfo(torch.float32).smallest_normal


def subnormal(tensors):
    """How many numbers are subnormal in float32."""
    return sum(int(((t.abs() < TINY) & (t != 0)).sum()) for t in tensors if t.is_floating_point())


def written(path):
    return [
        torch.from_numpy(np.array(numpy_helper.to_array(each)))
        for each in onnx.load(path).graph.initializer
    ]


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def decayed(model):
    """Two thirds of the weights are small, some of them as small as numbers are."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.flatten()[::3] *= 1e-38
                parameter.flatten()[1::3] *= 1e-43
    return model


@pytest.mark.parametrize("as_a_graph", [False, True], ids=["class", "graph"])
@pytest.mark.slow
def test_module_state_program_and_file_have_none(tmp_path, as_a_graph):
    model, x = randomise(network()).eval(), torch.randn(2, 3, 6, 6)
    close_some(l0prune.gate(decayed(model), (x,)))
    if as_a_graph:
        with as_graph():
            small = l0prune.export(model)
    else:
        small = l0prune.export(model)
    small.save_onnx(tmp_path / "model.onnx")
    small.save(tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)["state_dict"]
    assert subnormal(model.parameters()) > 0
    assert subnormal(small.module.state_dict().values()) == 0
    assert subnormal(state.values()) == 0
    assert subnormal(small.program.state_dict.values()) == 0
    assert subnormal(written(tmp_path / "model.onnx")) == 0
    assert difference(model, small, x) <= ROUNDED
    assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= ROUNDED


def test_the_bound_is_the_smallest_normal_number():
    model, x = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).eval(), torch.randn(2, 4)
    below = torch.nextafter(torch.tensor(TINY), torch.tensor(0.0))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[TINY, below], [-below, 1.0]]))
    l0prune.gate(model, (x,))
    l0prune.gates(model).log_alpha.data.fill_(5.0)
    small = l0prune.export(model)
    assert small.module[1].weight.tolist() == [[TINY, 0.0], [0.0, 1.0]]


def test_a_gate_that_makes_a_weight_subnormal():
    model, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2)).eval(), torch.randn(2, 4)
    with torch.no_grad():
        model[2].weight[0, 0] = 2 * TINY
    l0prune.gate(model, (x,), exclude="*.in")
    bank = l0prune.gates(model)
    bank.log_alpha.data.fill_(-1.5)
    z = bank.z()[0].item()
    assert 0 < z < 0.5  # 2 · TINY · z is normal in float64, and subnormal in float32
    small = l0prune.export(model)
    assert small.module[2].weight[0, 0] == 0
    assert small.module[2].weight[0, 1] != 0


@pytest.mark.slow
def test_a_batch_norm_that_is_folded_into_its_convolution(tmp_path):
    model, x = randomise(network()).eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model[0].weight.flatten()[::3] *= 1e-36
        model[1].weight.mul_(1e-3)
    small = l0prune.export(l0prune.gate(model, (x,)))
    assert subnormal(small.module.parameters()) == 0
    file = tmp_path / "model.onnx"
    small.save_onnx(file)
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(file).graph.node}
    assert subnormal(written(file)) == 0
    assert onnx_difference(model, small, file, x) <= ROUNDED


class Divided(nn.Module):
    """What it divides by is no weight: zero in its place would be another function."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((6,), 1e-40))

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * 1e-35 / self.scale)


@pytest.mark.slow
def test_what_is_divided_by_stays(tmp_path):
    model, x = randomise(Divided()).eval(), torch.randn(2, 4)
    model.scale.fill_(1e-40)
    small = l0prune.export(close_some(l0prune.gate(model, (x,))))
    small.save_onnx(tmp_path / "model.onnx")
    assert 0 < float(small.module.scale.max()) < 1e-39
    assert difference(model, small, x) <= ROUNDED
    assert onnx_difference(model, small, tmp_path / "model.onnx", x) <= ROUNDED


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float64, torch.float16)),
    ],
)
@pytest.mark.slow
def test_other_dtypes(tmp_path, dtype):
    """bfloat16 has float32's range; float16's own subnormal numbers stay; float64 has more."""
    model, x = randomise(network()).eval().to(dtype), torch.randn(2, 3, 6, 6, dtype=dtype)
    small = 1e-7 if dtype == torch.float16 else 1e-39
    with torch.no_grad():
        model[3].weight.fill_(0.1)
        model[3].weight.flatten()[::3] = small
    l0prune.gate(model, (x,))
    l0prune.gates(model).log_alpha.data.fill_(5.0)
    dense = l0prune.export(model)
    left = dense.module[3].weight.flatten()[::3]
    assert bool((left == (0 if dtype == torch.bfloat16 else model[3].weight.flatten()[0])).all())
    if dtype == torch.float64:
        dense.save_onnx(tmp_path / "model.onnx")
        assert subnormal(written(tmp_path / "model.onnx")) == 0
