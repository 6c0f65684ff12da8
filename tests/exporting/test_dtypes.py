"""Models in other dtypes than float32, of which the capture keeps the dtype as a constant."""

from __future__ import annotations

import copy
import threading

import onnx
import pytest
import torch
from differences import difference, onnx_difference
from networks import ByWidth, Fn
from torch import nn

import l0prune
from l0prune.errors import CertificateError
from l0prune.exporting.certify.dtypes import InOneDtype, converted
from l0prune.infer.rewrites import literals


def forward(m, x):
    z = torch.zeros(x.shape[0], 8, dtype=x.dtype)
    for _ in range(2):
        z = torch.tanh(m.b(z) + m.a(x).to(torch.float32).to(x.dtype))
    return m.out(z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.one_in(3)
def test_a_dtype_that_the_code_asks_for_follows_the_model(dtype, tmp_path):
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 8), "out": nn.Linear(8, 2)}
    model = Fn(forward, **layers).to(dtype).eval()
    x = torch.randn(2, 4, dtype=dtype)
    model = l0prune.gate(model, x)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert {p.dtype for p in small.module.parameters()} == {dtype}
    close = 1e-12 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(small.module(x), model(x), atol=close, rtol=close)
    small.save_onnx(tmp_path / "m.onnx")
    assert onnx_difference(model, small, tmp_path / "m.onnx", x) <= max(close, 1e-5)


def test_a_copy_of_a_plain_model_is_in_the_dtype_and_the_original_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other = converted(model, torch.float64)
    assert {p.dtype for p in other.parameters()} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def hidden(m, x):
    h = m.a(x)
    return m.out(torch.tanh(m.b(h.masked_fill(h < 0, torch.finfo(h.dtype).min).softmax(-1))))


def hidden_by_a_product(m, x):
    rows = torch.finfo(x.dtype).min * (x[:, :1] > 9).to(x.dtype)
    return m.out(torch.tanh(m.b(torch.tanh(m.a(x)) + rows.clamp(min=-1))))


@pytest.mark.parametrize("forward", [hidden, hidden_by_a_product])
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_the_limit_of_a_dtype_follows_the_model(forward, dtype, tmp_path):
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 8), "out": nn.Linear(8, 2)}
    model = Fn(forward, **layers).to(dtype).eval()
    x = torch.randn(3, 4, dtype=dtype)
    with torch.no_grad():
        l0prune.gates(l0prune.gate(model, x)).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert small.params < small.params_before
    close = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(small.module(x), model(x), atol=close, rtol=close)
    small.save_onnx(tmp_path / "model.onnx")


def norm_in_single(m, x):
    h = torch.relu(m.a(x.bfloat16()))
    h = h + m.b(m.norm(h.float()).bfloat16())
    return m.out(h).float()


def under_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.out(m.norm(torch.relu(m.b(torch.relu(m.a(x)))))).float()


@pytest.mark.parametrize("forward", [norm_in_single, under_autocast])
@pytest.mark.slow
def test_casts_in_the_forward_are_kept_in_the_module_and_lifted_in_the_file(forward, tmp_path):
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 8), "out": nn.Linear(8, 2)}
    model = Fn(forward, norm=nn.LayerNorm(8), **layers).eval()
    if forward is norm_in_single:
        for name in layers:
            model.get_submodule(name).bfloat16()
    before = {name: p.dtype for name, p in model.named_parameters()}
    x = torch.randn(3, 4)
    with torch.no_grad():
        l0prune.gates(l0prune.gate(model, x)).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert small.params < small.params_before
    assert {name: p.dtype for name, p in small.module.named_parameters()} == before
    assert difference(model, small, x) <= 1e-2  # folded weights are rounded to bfloat16
    torch.testing.assert_close(small.module(x), model(x), atol=0.02, rtol=0.02)
    assert torch.equal(small.program.module()(x), small.module(x))
    small.save_onnx(tmp_path / "model.onnx")
    types = {tensor.data_type for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert types <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    again = copy.deepcopy(model).float()
    again.run = single(forward)
    assert onnx_difference(again, small, tmp_path / "model.onnx", x) <= 0.01


def single(forward):
    """The forward with nothing less than float32."""

    def lifted(m, x):
        with InOneDtype(torch.float32):
            return forward(m, x)

    return lifted


def test_a_module_that_does_not_run_in_its_own_dtypes_is_not_handed_out(monkeypatch):
    def too_large(sizes, node):
        """The same in exact numbers, but no number in float16."""
        with node.graph.inserting_after(node):
            up = node.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1e30))
        with node.graph.inserting_after(up):
            down = node.graph.call_function(torch.ops.aten.mul.Tensor, (up, 1e-30))
        node.replace_all_uses_with(down, delete_user_cb=lambda user: user is not up)

    monkeypatch.setitem(literals.REWRITES, "aten.linear", too_large)
    model, x = ByWidth().half().eval(), torch.randn(2, 4).half()
    l0prune.gate(model, x, exclude="*.in")
    l0prune.gates(model).set_open(torch.arange(l0prune.gates(model).plan.size) % 2 == 0)
    with pytest.raises(CertificateError, match="float16"):
        l0prune.export(model)


def test_threads_take_turns_at_the_default_dtype():
    """Each puts back what it has found; in between another's would be found."""
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        with InOneDtype(torch.float64):
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    with InOneDtype(torch.float64):
        inside.set()
        thread.join(0.2)
        assert torch.get_default_dtype() is torch.float64
    done.set()
    thread.join()
    assert torch.get_default_dtype() is torch.float32


class InParts(nn.Module):
    """Its forward looks at values between two parts, and leaves its loss to training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), nn.Conv1d(8, 6, 1))
        self.head = nn.Sequential(nn.Conv1d(6, 8, 1), nn.ReLU(), nn.Conv1d(8, 2, 1))
        self.loss = nn.PReLU(dtype=torch.float64)

    def forward(self, x):
        x = self.body(x)
        return self.head(x if x.max() > 0 else -x)


@pytest.mark.slow
def test_parts_of_one_dtype_within_a_model_of_two():
    model, x = InParts().eval(), torch.randn(3, 4, 2)
    l0prune.gate(model, x)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    small = l0prune.export(model)
    assert len(small.pieces) == 2
    assert small.module.loss.weight.dtype == torch.float64
    torch.testing.assert_close(small.module(x), model(x))


def plain(m, x):
    return m.out(torch.relu(m.a(x)))


def test_a_double_that_only_the_loss_uses_stays_as_it_is():
    layers = {"a": nn.Linear(4, 8), "out": nn.Linear(8, 2), "loss": nn.Linear(1, 1).double()}
    model, x = Fn(plain, **layers).eval(), torch.randn(2, 4)
    l0prune.gate(model, x)
    with torch.no_grad():
        l0prune.gates(model).log_alpha[::2] = -9
    module = l0prune.export(model).module
    assert torch.equal(module.loss.weight, model.loss.weight)
    assert module.loss.weight.dtype == torch.float64
