"""int8 files with the ranges of a training, beside the fake-quantized network, in ONNX Runtime."""

import copy
import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import l0prune
from l0prune.errors import L0pruneError
from l0prune.features.int8.quantizer import has_dot_products
from l0prune.features.int8.trained import quantized

X = torch.randn(48, 3, 12, 12, generator=torch.Generator().manual_seed(0))
LARGEST = 127 if has_dot_products() else 63


class Network(nn.Module):
    """A residual stream, a depthwise convolution, and Linears on maps and on vectors."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6()
        self.deep, self.pool = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.MaxPool2d(2)
        self.inner, self.its_norm = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.mix, self.mixed = nn.Linear(8, 12), nn.LayerNorm(12)
        self.back = nn.Linear(12, 8, bias=False)
        self.head, self.out = nn.Linear(72, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = self.pool(self.act(self.norm(self.stem(x))))
        x = x + self.its_norm(self.inner(torch.relu(self.deep(x))))
        y = self.back(nn.functional.gelu(self.mixed(self.mix(x.permute(0, 2, 3, 1)))))
        x = torch.relu(x + y.permute(0, 3, 1, 2))
        return self.out(torch.relu(self.head(x.flatten(1))))


class Block(nn.Module):
    """A residual block of torchvision's kind, which may make maps smaller."""

    def __init__(self, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, stride, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.down = nn.ReLU(inplace=True), None
        if stride > 1:
            self.down = nn.Sequential(nn.Conv2d(8, 8, 1, stride, bias=False), nn.BatchNorm2d(8))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class Blocks(nn.Module):
    """A residual stream, and another of smaller maps."""

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU()
        self.blocks = nn.Sequential(Block(), Block(), Block(2), Block())
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.blocks(self.act(self.stem(x))).mean((2, 3), keepdim=True))


class Maps(nn.Module):
    """What the model returns is what a convolution writes, past a ReLU or not."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.deep = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3)
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return x, self.last(torch.relu(self.deep(x)))


def learned(network):
    """Gates of any value, many closed; ranges that are too narrow, so that int8 is far from it."""
    torch.manual_seed(3)
    model = l0prune.gate(network(), X[:2])
    pruner = l0prune.Pruner(
        model, steps=8, warmup=0, n=48, settle=7, quantize="int8", say=lambda text: None
    )
    gates = l0prune.gates(model)
    for part in X.split(6):
        with torch.no_grad():
            model(part)
        pruner.before_step()
        pruner.after_step()
    with torch.no_grad():
        gates.log_alpha.uniform_(-4, 3)
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(-2, 2)
                norm.bias.uniform_(-1, 1)
    gates.quantizer.load(gates.quantizer.ranges / 3, gates.quantizer.counts)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return learned(Network)


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """The export, its file in float32, and that in int8."""
    folder = tmp_path_factory.mktemp("files")
    made, small = written(model, folder)
    return made, onnx.load(folder / "model.onnx"), small


def written(model, folder):
    """The export, and its file in int8."""
    made = l0prune.export(model)
    made.save_onnx(folder / "model.onnx")
    names = {name for name, each in made.module.named_parameters() if each.numel()}
    return made, quantized(onnx.load(folder / "model.onnx"), made.ranges, names)


def session(file, **options):
    chosen = onnxruntime.SessionOptions()
    chosen.log_severity_level = 3
    for name, value in options.items():
        setattr(chosen, name, str(value))
    return onnxruntime.InferenceSession(
        file.SerializeToString(), chosen, providers=["CPUExecutionProvider"]
    )


def test_the_file_computes_what_the_fake_quantized_network_does(model, files):
    _, file, small = files
    onnx.checker.check_model(small, full_check=True)
    with torch.no_grad():
        expected = model(X).numpy()
    (found,) = session(small).run(None, {"x": X.numpy()})
    step = (expected.max() - expected.min()) / 255
    assert np.abs(found - expected).max() <= step
    assert np.median(np.abs(found - expected)) <= 0.01 * step  # sums round in another order
    (plain,) = session(file).run(None, {"x": X.numpy()})
    assert np.median(np.abs(plain - expected)) > 5 * step


def test_what_is_proven_of_the_file_in_float32_stays_so(model, files):
    made, file, _ = files
    gates = l0prune.gates(model)
    assert gates.quantizer.is_on
    plain = copy.deepcopy(model)
    l0prune.gates(plain).quantizer.off()
    (found,) = session(file).run(None, {"x": X.numpy()})
    with torch.no_grad():
        expected = plain(X).numpy()
        assert np.abs(made.module(X).numpy() - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert made.certificate.worst(("class", "graph"), "float64") < 1e-10


def test_onnx_runtime_has_operators_on_integers_for_all_of_it(files, tmp_path):
    _, _, small = files
    session(small, optimized_model_filepath=tmp_path / "optimized.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 3
    assert kinds.count("QGemm") == 2
    assert kinds.count("MatMulIntegerToFloat") == 2
    assert not {"Conv", "FusedConv", "Gemm", "MatMul", "Clip"} & {*kinds}


@pytest.mark.parametrize("closed", [(), (1,), (0, 2, 3)])
@pytest.mark.slow
def test_residual_sums_are_of_integers_and_what_the_network_computes(closed, tmp_path):
    model = learned(Blocks)
    gates = l0prune.gates(model)
    branches = [axis.start for axis in gates.plan.axes if axis.kind == "branch"]
    assert len(branches) == 4
    with torch.no_grad():
        gates.log_alpha[branches] = 8.0
        gates.log_alpha[[branches[number] for number in closed]] = -8.0
    made, small = written(model, tmp_path)
    (found,) = session(small, optimized_model_filepath=tmp_path / "o.onnx").run(
        None, {"x": X.numpy()}
    )
    with torch.no_grad():
        expected = model(X).numpy()
    step, _ = made.ranges.grid(made.ranges.scheme.outputs["last"])
    off = np.round(np.abs(found - expected) / step)
    assert off.max() <= 1
    assert (off == 0).mean() > 0.9  # sums round in another order
    kinds = [node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node]
    assert kinds.count("QLinearAdd") == 4 - len(closed)
    assert "Add" not in kinds


@pytest.mark.slow
def test_maps_that_the_model_returns_are_on_their_grids(tmp_path):
    model = learned(Maps)
    made, small = written(model, tmp_path)
    found = session(small).run(None, {"x": X.numpy()})
    with torch.no_grad():
        expected = [each.numpy() for each in model(X)]
    for own, other, module in zip(found, expected, ("norm", "last"), strict=True):
        step, _ = made.ranges.grid(made.ranges.scheme.outputs[module])
        assert np.abs(own - other).max() <= 1.01 * step
        assert (np.abs(own - other) <= 0.01 * step).mean() > 0.99


def test_integers_of_weights_are_those_of_the_training(model, files):
    made, _, small = files
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in small.graph.initializer}
    weights = [each for name, each in tensors.items() if name.endswith("_weight_whole")]
    assert len(weights) == len(made.ranges.scheme.layers) == 7
    assert all(np.abs(each.astype(int)).max() == LARGEST for each in weights)


def test_a_layer_that_the_file_has_not_is_said(files):
    made, file, _ = files
    names = {name for name, _ in made.module.named_parameters()}
    changed = onnx.ModelProto()
    changed.CopyFrom(file)
    for node in changed.graph.node:
        if "mix.weight" in node.input or node.op_type == "MatMul":
            node.op_type = "Einsum"
    with pytest.raises(L0pruneError, match="mix, back learned in eight bits"):
        quantized(changed, made.ranges, names)


def test_a_range_that_nothing_has_shown_is_said(files):
    made, file, _ = files
    unknown = dataclasses.replace(made.ranges, counts=(0,) * len(made.ranges.counts))
    with pytest.raises(L0pruneError, match=r"no step of the training has shown .*stem"):
        quantized(file, unknown, set())


@pytest.mark.slow
def test_save_onnx_writes_it_and_says_so(model, tmp_path):
    made = l0prune.export(model)
    with pytest.warns():
        made.save_onnx(tmp_path / "model.onnx", int8=X)
    onnx.checker.check_model(onnx.load(tmp_path / "model.int8.onnx"))
    assert made.int8.method == "trained"
    (found,) = session(onnx.load(tmp_path / "model.int8.onnx")).run(None, {"x": X.numpy()})
    with torch.no_grad():
        expected = model(X).numpy()
    assert np.abs(found - expected).max() <= (expected.max() - expected.min()) / 255
    with torch.no_grad():  # what learns on without it is quantized as any other
        made.module.out.bias.add_(1)
    assert made.pieces
    assert made.ranges is None
