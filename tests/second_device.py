"""A whole way from gates to files on a second device, and the same on the CPU.

    python tests/second_device.py FOLDER

It runs in a process of its own, since a process has one such device for good. FOLDER is for what
is compiled and written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import load

import l0prune

NAME = "second"


def make_device(folder: Path) -> None:
    """Give torch the device of ``second_device.cpp``, and what it asks of one in Python."""
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(NAME)
    module.is_available, module.current_device = lambda: True, lambda: 0
    module.device_count, module._is_in_bad_fork = lambda: 1, lambda: False
    module.manual_seed_all, module.get_rng_state = lambda seed: None, torch.get_rng_state
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._register_device_module(NAME, module)
    source = Path(__file__).with_suffix(".cpp")
    load("second_device", str(source), build_directory=str(folder), extra_cflags=["-O0", "-w"])
    torch.utils.generate_methods_for_privateuse1_backend()
    plain = nn.Parameter.__deepcopy__, Tensor.__deepcopy__
    nn.Parameter.__deepcopy__ = lambda x, memo: _copied(x, memo, plain[0])
    Tensor.__deepcopy__ = lambda x, memo: _copied(x, memo, plain[1])


def _copied(x: Tensor, memo: dict, plain) -> Tensor:
    """A copy that shares nothing; torch copies storages, which only its own devices have."""
    if x.device.type != NAME or type(x) not in (Tensor, nn.Parameter) or not x.is_leaf:
        return plain(x, memo)
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone()
        if isinstance(x, nn.Parameter):
            memo[id(x)] = nn.Parameter(memo[id(x)], x.requires_grad)
    return memo[id(x)]


class Net(nn.Module):
    """Buffers, norms and positions that are made in the forward, and inputs picked one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.one = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 1)
        self.layer, self.shift = nn.LayerNorm(12), nn.Parameter(torch.randn(12))
        self.register_buffer("scale", torch.rand(12) + 0.5)
        self.wide, self.head = nn.Linear(48, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(self.deep(torch.relu(self.norm(self.stem(x))))))
        x = self.layer(x.flatten(2).transpose(1, 2) * self.scale + self.shift)
        places = torch.arange(x.shape[1], device=x.device).to(x.dtype)
        return self.head(torch.relu(self.wide((x + places[:, None] / 99).flatten(1))))


class Asserting(Net):
    """What it asserts of its sizes keeps the class from being cut: the result is a graph."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.wide.weight.shape[0] == 10
        return super().forward(x)


class Residual(nn.Module):
    """A branch that can go whole."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)
        self.branch = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.branch(torch.relu(x))).mean((2, 3)))


class Within(nn.Module):
    """Only a part can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Residual()

    def forward(self, x: Tensor) -> Tensor:
        y = self.backbone(x)
        return y * 2 if float(y.sum()) > 1e9 else y


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def gated(kind: type[nn.Module], device: str, dtype: torch.dtype, closes: bool) -> nn.Module:
    torch.manual_seed(0)
    model = kind().to(device, dtype).eval()
    l0prune.gate(model, X.to(device, dtype), branches=closes)
    bank = l0prune.gates(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        closed = torch.rand(bank.plan.size, generator=generator) < 0.4
        bank.log_alpha[closed.to(device)] = -20.0
        for axis in bank.axes:
            bank.log_alpha[axis.slice.start] = -20.0 if axis.kind == "branch" else 1.0
    return model


def places(model: nn.Module) -> set[str]:
    return {t.device.type for t in (*model.parameters(), *model.buffers())}


def export_here_and_there(
    folder: Path, kind: type[nn.Module], dtype: torch.dtype, closes: bool = False
) -> None:
    model = gated(kind, NAME, dtype, closes)
    dense, other = l0prune.export(model), l0prune.export(gated(kind, "cpu", dtype, closes))
    assert places(dense.module) == {NAME} == places(model)
    assert dense.params == other.params < dense.params_before
    assert {p.dtype for p in dense.module.parameters()} == {dtype}
    found, expected = dense.module(X.to(NAME, dtype)), other.module(X.to(dtype))
    assert (found.cpu() - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05)
    dense.save_onnx(folder / "model.onnx", time=False)
    dense.save(folder / "model.pt")
    assert not dense.changed
    if dense.rebuilt and dtype == torch.float32:
        small = l0prune.resize(kind().to(NAME).eval(), folder / "model.pt")
        assert places(small) == {NAME}
        assert torch.equal(small(X.to(NAME)).cpu(), found.cpu())
    dense.module.cpu()
    dense.save(folder / "model.pt")
    assert not dense.changed


def train(kind: type[nn.Module]) -> None:
    model = gated(kind, NAME, torch.float32, False)
    data = [(torch.randn(8, 3, 4, 4), torch.randint(0, 3, (8,))) for _ in range(4)]
    l0prune.finetune(model, data, budget="macs=0.5", epochs=2, progress=False, device=NAME)
    assert places(model) == {NAME} == places(l0prune.export(model).module)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    make_device(target)
    for network in (Net, Asserting):
        for precision in (torch.float32, torch.bfloat16):
            export_here_and_there(target, network, precision)
    export_here_and_there(target, Residual, torch.float32, closes=True)
    export_here_and_there(target, Within, torch.float32)
    train(Net)
