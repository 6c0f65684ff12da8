"""Where an export works, what it asks of a device, and what it says where that is not met."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import second_device
import torch
from torch import nn

import l0prune
from l0prune.errors import L0pruneError, UsageError
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.dtypes import Dtypes, marked, placed


class Net(nn.Module):
    """It asks for the device of its input, so that a graph of it names one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.lacks = None

    def forward(self, x):
        if self.lacks == x.dtype:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        places = torch.arange(8, device=x.device).to(x.dtype)
        return self.last(torch.relu(self.first(x)) * (places + 1))


def gated() -> nn.Module:
    torch.manual_seed(0)
    model = l0prune.gate(Net(), torch.randn(2, 4))
    with torch.no_grad():
        l0prune.gates(model).log_alpha[:3] = -20.0
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_out_of_memory_leaves_all_as_it_was_and_says_how_much_is_needed(dtype):
    model = gated().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kind, keys = type(model), set(vars(model))
    model.lacks = dtype
    with pytest.raises(L0pruneError, match=r"not enough memory on cpu .* GiB .* 1.3 times") as told:
        l0prune.export(model)
    assert "out of memory. Tried to allocate 2.00 GiB." in str(told.value)
    assert told.value.__context__ is None  # whose frames would hold what was made
    assert (type(model), set(vars(model)), model.training) == (kind, keys, True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.lacks = None
    assert l0prune.export(model).module.first.weight.shape[0] == 5


def test_a_model_on_several_devices_is_refused_with_the_way_on():
    model, x = Net(), torch.randn(2, 4)
    model.last.to("meta")  # as device_map of accelerate leaves what it keeps on the disk
    for of in (l0prune.survey, l0prune.gate):
        with pytest.raises(
            UsageError, match=r"first.weight on cpu, last.weight on meta.*device_map"
        ):
            of(model, x)
    model = gated()
    model.last.to("meta")
    with pytest.raises(UsageError, match="on several devices"):
        l0prune.export(model)


def test_a_graph_is_moved_with_all_that_it_names():
    x = torch.randn(2, 4)
    graph = torch.export.export(Net().eval(), (x,)).module(check_guards=False)
    marked(graph, Dtypes.of(graph))
    assert placed(graph, torch.device("meta")) is graph
    assert graph(x.to("meta")).device.type == "meta"


def test_float32_is_compared_in_float32_whatever_is_set():
    """A user who trains in TF32 may have asked for it everywhere."""
    seen = []

    class Asking(Net):
        def forward(self, x):
            seen.append((torch.backends.cuda.matmul.fp32_precision, x.dtype))
            return super().forward(x)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        output_of(Asking(), ((torch.randn(2, 4),), {}), torch.float32)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("ieee", torch.float32)]


def test_a_proof_in_float32_alone_runs_nothing_in_float64_and_says_so():
    model = gated()
    model.lacks = torch.float64
    small = l0prune.export(model, verify="float32")
    assert {check.dtype for check in small.certificate.checks} == {"float32"}
    assert "float32 alone" in small.note
    model.lacks = None
    exact = l0prune.export(model)
    assert {check.dtype for check in exact.certificate.checks} == {"float64", "float32"}
    for a, b in zip(small.module.parameters(), exact.module.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UsageError, match="'float64' or 'float32', not 'bf16'"):
        l0prune.export(model, verify="bf16")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="a C++ compiler makes the second device")
def test_all_is_done_on_a_second_device_and_comes_back_there(tmp_path):
    script = Path(second_device.__file__)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
