"""Files whose products get the range of their input in each call."""

import copy
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from differences import run_onnx
from torch import nn

import l0prune
from l0prune.features.int8 import each_call
from l0prune.features.int8.each_call import EACH_CALL, EachCall
from l0prune.features.int8.fastest import InTurns
from l0prune.features.int8.quantizer import (
    RECURRENT,
    Quantizer,
    has_dot_products,
    in_int8,
    name_nodes,
    recurrent_in,
    with_ranges_of_each_call,
)
from l0prune.features.int8.search import least_kept


class Products(nn.Module):
    """Products with and without a bias (Gemm and MatMul), and one of two activations."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 32), nn.Linear(32, 6, bias=False)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.second(hidden) + hidden @ hidden.mT.mean(1, keepdim=True)


def written(tmp_path, model, x):
    path = tmp_path / "net.onnx"
    l0prune.export(l0prune.gate(copy.deepcopy(model), x[:2])).save_onnx(path, time=False)
    file = onnx.load(path)
    name_nodes(file)
    return file


def in_eight_bits(x, linear, largest):
    """The same by definition: bytes between least and largest, and a scale for each output."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = np.float32(high - low) / np.float32(255)
    zero = np.round(-low / step)
    read = (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step
    weight = linear.weight.detach().numpy()
    steps = np.abs(weight).max(1, keepdims=True) / largest
    found = read @ (np.round(weight / steps) * steps).T
    return found if linear.bias is None else found + linear.bias.detach().numpy()


@pytest.mark.parametrize("kept", [0, 1])
def test_products_by_constants_are_on_the_grid_of_the_call(tmp_path, kept):
    torch.manual_seed(0)
    model, x = Products().eval(), torch.randn(8, 12)
    static = Quantizer(written(tmp_path, model, x), {}, {})
    quantizer = EachCall.beside(static)
    names = [name for every in quantizer.nodes.values() for name in every]
    assert len(names) == 2  # not that of two activations
    first = next(n.name for n in static.model.graph.node if n.name in names)
    path = tmp_path / "each.onnx"
    onnx.save(quantizer.quantized(kept=[first] if kept else []), path)
    (found,) = run_onnx(path, x)
    largest = 127 if has_dot_products() else 63
    plain = model.first(x).detach().numpy()
    hidden = plain if kept else in_eight_bits(x.numpy(), model.first, largest)
    hidden = np.maximum(hidden, 0)
    expected = in_eight_bits(hidden, model.second, largest)
    expected = expected + hidden @ hidden.mean(0)[:, None]
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("MatMulInteger") == 2 - kept
    assert quantizer.quantized(kept=names) == static.model


@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.slow
def test_the_faster_of_the_two_ways_is_written(tmp_path, monkeypatch, is_faster):
    def timed(single, models, *others):
        return InTurns(2.0, {"own": 1.0 if is_faster else 1.6, "other": 1.5})

    monkeypatch.setattr(each_call, "ms_of", timed)
    torch.manual_seed(0)
    model, x = Products().eval(), torch.randn(64, 12)
    small = l0prune.export(l0prune.gate(copy.deepcopy(model), x[:2]))
    _, path = small.save_onnx(tmp_path / "net.onnx", int8=x, time=False)
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert (small.int8.method == EACH_CALL) == ("MatMulInteger" in kinds) == is_faster
    assert small.int8.errors["output"] < 0.05
    if is_faster:
        assert small.int8.speed.chosen == 1.0
        onnx.checker.check_model(onnx.load(path))


class Counted:
    """A search with so many further ones, of which those from ``needed`` on are within."""

    def __init__(self, kept, last):
        self.kept, self.last = kept, last

    def beyond(self):
        return [Counted(kept, self.last) for kept in range(1, self.last + 1)]


@pytest.mark.parametrize("last", [0, 1, 2, 5, 40])
def test_as_little_as_it_takes_is_kept(last):
    for needed in range(last + 2):  # the last is not within
        judged = []

        def is_within(search, needed=needed, judged=judged):
            judged.append(search.kept)
            return search.kept >= needed

        found = least_kept(Counted(0, last), is_within)
        assert found.kept == min(needed, last)
        assert found.kept in judged
        assert len(judged) == len({*judged}) <= 2 + 2 * max(1, found.kept).bit_length()


class Recurrent(nn.Module):
    """Two layers, the first of which reads sizes that eight bits of one range do not hold."""

    def __init__(self):
        super().__init__()
        self.first = nn.LSTM(8, 24, bidirectional=True, batch_first=True)
        self.second = nn.LSTM(48, 24, batch_first=True)
        self.head = nn.Linear(24, 6, bias=False)

    def forward(self, x):
        return self.head(self.second(self.first(x)[0])[0][:, -1])


def _rounded(x):
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = np.float32(high - low) / np.float32(255)
    zero = np.round(-low / step)
    return (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step


def _on_grid(weight, largest):
    weight = weight.detach().numpy()
    steps = np.abs(weight).max(1, keepdims=True) / largest
    return np.round(weight / steps) * steps


def _by_definition(x, lstm, end, largest):
    """One direction, with an input of one range, and a state of one range at each step."""
    w, r = (_on_grid(getattr(lstm, f"weight_{of}_l0{end}"), largest) for of in ("ih", "hh"))
    bias = sum(getattr(lstm, f"bias_{of}_l0{end}").detach().numpy() for of in ("ih", "hh"))
    read = _rounded(x) @ w.T + bias
    h = c = np.zeros((x.shape[1], r.shape[1]), np.float32)
    found = []
    for now in read[::-1] if end else read:
        state = _rounded(h) if h.any() else h
        i, f, g, o = np.split(now + state @ r.T, 4, 1)
        i, f, o = (1 / (1 + np.exp(-each)) for each in (i, f, o))
        c = f * c + i * np.tanh(g)
        h = o * np.tanh(c)
        found.append(h)
    return np.stack(found[::-1] if end else found)


def test_recurrent_layers_have_a_range_of_their_input_and_one_of_each_step(tmp_path):
    torch.manual_seed(0)
    lstm, x = nn.LSTM(8, 24, bidirectional=True).eval(), torch.randn(7, 1, 8)

    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = lstm, nn.Linear(48, 5)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    model = Headed().eval()
    file = written(tmp_path, model, x)
    names = sorted(recurrent_in(file))
    assert len(names) == 1
    made = with_ranges_of_each_call(file, names)
    assert [node.name for node in made.graph.node if node.op_type == "DynamicQuantizeLSTM"] == names
    (found,) = run_onnx(made.SerializeToString(), x)
    largest = 127 if has_dot_products() else 64
    ends = ("", "_reverse")
    expected = np.concatenate([_by_definition(x.numpy(), lstm, e, largest) for e in ends], 2)
    expected = model.head(torch.from_numpy(expected)).detach().numpy()
    exact = model(x).detach().numpy()
    found = np.asarray(found)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(found - exact).max()


class BesideGemm(nn.Module):
    """An LSTM, a sum, and a layer of the last step, which is a Gemm."""

    def __init__(self):
        super().__init__()
        self.stem, self.lstm = nn.Linear(8, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        h = self.stem(x)
        return self.head(self.lstm(h + h.relu())[0][:, -1])


def test_a_gemm_beside_an_lstm_stays_one(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 10, 8)
    file = written(tmp_path, BesideGemm().eval(), x)
    made = with_ranges_of_each_call(file, sorted(recurrent_in(file)))
    kinds, found = (Counter(n.op_type for n in each.graph.node) for each in (file, made))
    assert kinds["Gemm"] == found["Gemm"] == 1
    assert (found["MatMul"], found["Add"]) == (kinds["MatMul"], kinds["Add"])
    made = in_int8(file, {file.graph.input[0].name: x.numpy()})
    expected, found = (run_onnx(each.SerializeToString(), x)[0] for each in (file, made))
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() < 0.1


@pytest.mark.parametrize("is_standard", [False, True])
@pytest.mark.slow
def test_other_runtimes_are_given_operators_of_onnx_alone(tmp_path, is_standard):
    x = torch.randn(4, 10, 8)
    file = written(tmp_path, Recurrent().eval(), x)
    made = in_int8(file, {file.graph.input[0].name: x.numpy()}, is_standard=is_standard)
    kinds = [node.op_type for node in made.graph.node]
    assert kinds.count("DynamicQuantizeLSTM") == (0 if is_standard else 2)
    assert all(not node.domain for node in made.graph.node) is is_standard
    assert "QuantizeLinear" in kinds


@pytest.mark.slow
def test_what_reads_too_many_sizes_stays_in_float32_alone(tmp_path):
    torch.manual_seed(0)
    model = Recurrent().eval()
    x = torch.randn(64, 10, 8) * 10 ** torch.linspace(-4, 1, 8)
    with torch.no_grad():  # the small ones matter
        model.first.weight_ih_l0.mul_(5 / x.std((0, 1)))
        model.first.weight_ih_l0_reverse.mul_(5 / x.std((0, 1)))
    small = l0prune.export(l0prune.gate(model, x[:2]))
    small.save_onnx(tmp_path / "net.onnx", int8=x, fastest=False)
    assert small.int8.kept == ("first",)
    kinds = [node.op_type for node in onnx.load(tmp_path / "net.int8.onnx").graph.node]
    assert kinds.count(RECURRENT) == kinds.count("DynamicQuantizeLSTM") == 1
    assert small.int8.errors["output"] < 0.05
