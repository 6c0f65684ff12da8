"""Files of any widths, written from a few cut graphs: the same as an export writes."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from timed_network import gated
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.features.latency.network_files import DENSE, INPUTS, Exporter, NetworkFiles
from l0prune.features.latency.sizes import slots_of
from l0prune.features.latency.template import with_numbered_names


class Attention(nn.Module):
    """Heads of a size of their own, in a residual stream that is cut, with its norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.qkv = nn.Linear(24, 3 * 32)
        self.out = nn.Linear(32, 24)
        self.mlp = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))

    def forward(self, x):
        x = self.stem(x)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def gated_attention():
    torch.manual_seed(0)
    return l0prune.gate(Attention().eval(), (torch.randn(2, 6, 24),))


class TwoHeads(nn.Module):
    """An attention of which exporters leave out nodes where one head is left."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.out(x + self.attention(x, x, x, need_weights=False)[0])


def gated_inputs():
    """Single inputs of a Linear, cut beside the maps that they are of: a Gather picks them."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 10), nn.Linear(10, 3)
    return l0prune.gate(nn.Sequential(*layers).eval(), (torch.randn(2, 1, 5, 5),))


def gated_groups():
    """Groups of a convolution, and the maps within them."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 40, 1), nn.ReLU(), nn.Conv2d(40, 40, 3, groups=5), nn.ReLU()
    head = nn.Conv2d(40, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return l0prune.gate(nn.Sequential(*layers, *head).eval(), (torch.randn(2, 3, 8, 8),))


@pytest.mark.parametrize("made", [gated, gated_inputs, gated_attention, gated_groups])
@pytest.mark.slow
def test_files_are_those_that_an_export_writes(tmp_path, made):
    model = made()
    plan = l0prune.gates(model).plan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    files = NetworkFiles(model, 3, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    widths = [max(1, axis.size * 5 // 9) for axis in plan.axes]
    kept = plan.kept(slots_of(plan, widths))
    path = files.write("other.onnx", kept)
    l0prune.gates(model).set_open(kept)
    l0prune.export(model).save_onnx(tmp_path / "exported.onnx")
    expected = with_plain_splits(with_numbered_names(onnx.load(str(tmp_path / "exported.onnx"))))
    found = with_plain_splits(onnx.load(str(path)))
    assert [n.op_type for n in found.graph.node] == [n.op_type for n in expected.graph.node]
    assert dims(found) == dims(expected)
    assert integers(found) == integers(expected)
    assert attributes(found) == attributes(expected)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (answer, *_) = session.run(None, dict(np.load(tmp_path / INPUTS).items()))
    assert len(answer) == 3
    dense = onnxruntime.InferenceSession(str(tmp_path / DENSE), providers=["CPUExecutionProvider"])
    (answer, *_) = dense.run(None, dict(np.load(tmp_path / INPUTS).items()))
    assert len(answer) == 3


@pytest.mark.slow
def test_a_network_with_one_head_of_two_is_exported(tmp_path):
    """Its file is no template with other sizes, and computes what the module does."""
    torch.manual_seed(0)
    model = l0prune.gate(TwoHeads().eval(), (torch.randn(2, 6, 12),))
    plan = l0prune.gates(model).plan
    files = NetworkFiles(model, 3, tmp_path)
    kept = plan.kept(slots_of(plan, [max(1, axis.size // 2) for axis in plan.axes]))
    session = onnxruntime.InferenceSession(str(files.write("other.onnx", kept)))
    inputs = dict(np.load(tmp_path / INPUTS).items())
    l0prune.gates(model).set_open(kept)
    small = l0prune.export(model).module
    expected = small(*map(torch.from_numpy, inputs.values())).detach()
    (answer,) = session.run(None, inputs)
    assert answer == pytest.approx(expected.numpy(), abs=0.02)  # weights have a little noise


def test_a_file_that_is_there_is_not_written_again(tmp_path):
    layers = nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)
    model = l0prune.gate(nn.Sequential(*layers).eval(), (torch.randn(2, 5),))
    plan = l0prune.gates(model).plan
    files = NetworkFiles(model, 1, tmp_path)
    kept = [plan.kept(slots_of(plan, [width] * len(plan.axes))) for width in (2, 3)]
    path = files.write("chosen.onnx", kept[0])
    path.write_bytes(b"mine")
    files.write("chosen.onnx", kept[0])
    assert path.read_bytes() == b"mine"
    files.write("chosen.onnx", kept[1])
    assert path.read_bytes() != b"mine"


def with_plain_splits(model):
    """Leave out what a Split is given: a number of equal parts, or their sizes in a cut graph."""
    splits = [node for node in model.graph.node if node.op_type == "Split"]
    sizes = {node.input[1] for node in splits if len(node.input) > 1}
    for node in splits:
        del node.input[1:]
        kept = [a for a in node.attribute if a.name == "axis"]
        del node.attribute[:]
        node.attribute.extend(kept)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in sizes]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def dims(model):
    return {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}


def integers(model):
    kinds = (TensorProto.INT32, TensorProto.INT64)
    tensors = [t for t in model.graph.initializer if t.data_type in kinds]
    values = {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in tensors}
    picked = {n.input[1] for n in model.graph.node if n.op_type == "Gather"}  # time knows how many
    return values | {name: len(values[name]) for name in picked & values.keys()}


def attributes(model):
    return [
        sorted((a.name, a.i, list(a.ints), a.f, a.s) for a in node.attribute)
        for node in model.graph.node
    ]


@pytest.mark.slow
def test_a_model_that_becomes_several_files_is_refused(tmp_path):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))

        def forward(self, x):
            x = torch.relu(self.one(x))
            return self.two(x if x.sum() > 0 else -x)

    model = l0prune.gate(Branches().eval(), (torch.randn(2, 6),))
    with pytest.raises(UsageError, match="captured in parts"):
        NetworkFiles(model, 1, tmp_path)


@pytest.mark.slow
def test_files_that_differ_by_more_than_sizes_are_refused_with_the_place(tmp_path, monkeypatch):
    """Here some keep all 72 inputs of a Linear, so that they have no Gather."""
    compared = {0: [[6, 5, 72], [7, 6, 40]], 1: [[5, 7, 72]]}
    widths = lambda plan, least, seed=0: compared[seed]  # noqa: E731
    monkeypatch.setattr("l0prune.features.latency.network_files.distinguishing_widths", widths)
    where = r"not all have the Gather in 3\).*--exclude"
    with pytest.raises(UsageError, match=where):
        NetworkFiles(gated_inputs(), 1, tmp_path)


@pytest.mark.slow
def test_one_export_tells_what_several_do(tmp_path, monkeypatch):
    model = gated(size=20)
    plan = l0prune.gates(model).plan
    exported, networks = [], Exporter.networks
    monkeypatch.setattr(
        Exporter, "networks", lambda self, w: exported.append(len(w)) or networks(self, w)
    )
    one = NetworkFiles(model, 1, tmp_path / "one")
    monkeypatch.setattr(
        "l0prune.features.latency.network_files.unmistakable_widths", lambda *_: None
    )
    several = NetworkFiles(model, 1, tmp_path / "several")
    assert exported[0] == 1 < exported[1]
    kept = plan.kept(slots_of(plan, [max(1, axis.size * 4 // 7) for axis in plan.axes]))
    made = [
        onnx.load(files.write("other.onnx", kept), load_external_data=False)
        for files in (one, several)
    ]
    assert dims(made[0]) == dims(made[1])
    assert integers(made[0]) == integers(made[1])
    assert attributes(made[0]) == attributes(made[1])
    assert one.facts == several.facts


@pytest.mark.slow
def test_a_large_network_is_written_for_the_batch_alone(tmp_path, monkeypatch):
    layers = nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3)
    model = l0prune.gate(nn.Sequential(*layers).eval(), (torch.randn(2, 20),))
    free = NetworkFiles(model, 5, tmp_path / "free")
    monkeypatch.setattr("l0prune.features.latency.network_files._LARGE", 0)
    fixed = NetworkFiles(model, 5, tmp_path / "fixed")
    plan = l0prune.gates(model).plan
    kept = plan.kept(slots_of(plan, [17 for _ in plan.axes]))
    made = [onnx.load(f.write("x.onnx", kept), load_external_data=False) for f in (free, fixed)]
    sizes = [model.graph.input[0].type.tensor_type.shape.dim[0] for model in made]
    assert not sizes[0].HasField("dim_value")
    assert sizes[1].dim_value == 5
    assert dims(made[0]) == dims(made[1])
    assert [f.monomials for f in free.facts] == [f.monomials for f in fixed.facts]
