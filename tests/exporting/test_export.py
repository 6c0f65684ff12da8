"""The export, on small networks of every kind: exact, counted, written whole, loadable by torch."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from deadness import close_some, randomise
from differences import (
    ROUNDED,
    difference,
    in_float64,
)
from models import Tied
from networks import CASES, ByWidth, Fn
from torch import nn

import l0prune
from l0prune.errors import CertificateError, NotGated, UsageError


def gated_case(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    module, shape, _ = CASES[name]
    model = randomise(copy.deepcopy(module)).eval().to(dtype)
    x = torch.randn(shape, dtype=dtype)
    return close_some(l0prune.gate(model, (x,)), seed), x


def test_fine_gates_become_a_gather():
    """With every kept input known, the first layer is exactly the chosen columns."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    l0prune.gate(model, (torch.randn(2, 6),))
    (axis,) = [a for a in l0prune.gates(model).axes if a.kind == "input"]
    with torch.no_grad():
        l0prune.gates(model).log_alpha[axis.slice][[0, 3]] = -9.0
    small = l0prune.export(model)
    first = small.module.get_parameter("0.weight")
    assert torch.equal(first, plain[0].weight[:, [1, 2, 4, 5]])


def test_export_leaves_the_model_as_it_is():
    model, _ = gated_case("mlp")
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    l0prune.export(model)
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_state_dict_and_manifest_rebuild_the_class(tmp_path):
    def build():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8),
            nn.Conv2d(8, 6, 1), nn.GroupNorm(3, 6), nn.Conv2d(6, 5, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2),
        )  # fmt: skip

    model = randomise(build()).eval()
    l0prune.gate(model, (torch.randn(2, 3, 6, 6),))
    close_some(model, seed=2)
    l0prune.export(model).save(tmp_path / "model.pt")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    manifest = json.loads(content["manifest"])
    assert manifest["rebuild"] == {"verified": True, "reason": "", "training": ""}
    rebuilt = build().eval()
    for path, attributes in manifest["attributes"].items():
        for name, value in attributes.items():
            setattr(rebuilt.get_submodule(path), name, value)
    for name, shape in manifest["shapes"].items():
        path, _, leaf = name.rpartition(".")
        owner, new = rebuilt.get_submodule(path), torch.empty(shape["new"])
        setattr(owner, leaf, nn.Parameter(new) if leaf in owner._parameters else new)
    rebuilt.load_state_dict(content["state_dict"])
    x = torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_class_that_computes_with_its_sizes_cannot_be_rebuilt_and_says_so(tmp_path):
    torch.manual_seed(0)
    model = l0prune.gate(ByWidth().eval(), torch.randn(2, 4), exclude="*.in")
    l0prune.export(close_some(model)).save(tmp_path / "model.pt")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    rebuild = json.loads(content["manifest"])["rebuild"]
    assert not rebuild["verified"]
    assert rebuild["reason"] == "its forward computes something else at these sizes (from b on)"


def test_tied_weights_are_stored_under_both_names(tmp_path):
    model = close_some(l0prune.gate(Tied(mix=False, bias=True), (torch.randint(0, 20, (2, 5)),)))
    small = l0prune.export(model)
    assert sum(p.numel() for p in small.module.parameters()) == small.params
    small.save(tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"]
    assert state.keys() == {"embed.weight", "head.weight", "head.bias"}
    assert torch.equal(state["embed.weight"], state["head.weight"])
    assert state["embed.weight"].shape[1] < 12


def test_a_failed_onnx_comparison_writes_nothing(tmp_path):
    model, _ = gated_case("mlp", seed=3)
    small = l0prune.export(model)
    for answer in small.pieces[0].answers:  # as if the file were another model's
        answer.single[0].add_(1.0)
    with pytest.raises(CertificateError, match="onnx in float32"):
        small.save_onnx(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_ungated_model_is_refused():
    with pytest.raises(NotGated):
        l0prune.export(nn.Linear(3, 2))


def test_a_model_changed_since_gating_is_refused():
    model, _ = gated_case("mlp")
    model[1] = nn.Softmax(-1)
    with pytest.raises(UsageError, match="changed since"):
        l0prune.export(model)


FLOAT32 = {
    # Models that ask for float32 inside: the comparison in float64 gives them float64 all the same.
    "a cast": (
        Fn(lambda m, x: m.c(m.a(x).to(torch.float32)), a=nn.Linear(10, 8), c=nn.Linear(8, 3)),
        torch.randn(2, 10),
    ),
    "a constant": (
        Fn(
            lambda m, x: m.c(m.a(x).lerp(torch.ones(8), 0.5)), a=nn.Linear(10, 8), c=nn.Linear(8, 3)
        ),
        torch.randn(2, 10),
    ),
    "a state that torch makes": (
        Fn(
            lambda m, x: m.c(m.r(m.a(x))[0][:, -1]),
            a=nn.Linear(10, 8),
            r=nn.LSTM(8, 6, batch_first=True),
            c=nn.Linear(6, 3),
        ),
        torch.randn(2, 5, 10),
    ),
}


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.one_in(3)
def test_float32_inside_a_model_is_no_error_of_the_cut(name):
    module, x = FLOAT32[name]
    model = close_some(l0prune.gate(copy.deepcopy(module), (x,)))
    small = l0prune.export(model)
    assert small.params < small.params_before
    assert difference(model, small, x) <= ROUNDED
    assert torch.get_default_dtype() == torch.float32


def test_a_model_that_does_not_run_in_float64_is_refused_with_the_reason():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(6, 5), nn.Linear(5, 2)
            self.mixing = torch.eye(5)  # no buffer: model.double() does not see it

        def forward(self, x):
            return self.c(self.a(x) @ self.mixing)

    model = l0prune.gate(Fixed(), (torch.randn(2, 6),))
    with pytest.raises(CertificateError, match=r"float64 failed .*register_buffer"):
        l0prune.export(model)


def test_a_layer_replaced_since_gating_is_named():
    model, _ = gated_case("mlp")
    model[2] = nn.Linear(8, 6)
    with pytest.raises(UsageError, match="2 has been replaced"):
        l0prune.export(model)


def test_a_slot_that_a_norm_averages_over_stays_while_it_is_open():
    """No column of the Linear reads it any more, but the norm's statistics still count it."""
    layers = {"a": nn.Conv2d(3, 4, 1), "norm": nn.LayerNorm(4), "b": nn.Linear(4 * 36, 3)}
    model = Fn(lambda m, x: m.b(m.norm(m.a(x).movedim(1, -1)).flatten(1)), **layers)
    model, x = in_float64(model.eval(), torch.randn(2, 3, 6, 6))
    l0prune.gate(model, (x,))
    bank = l0prune.gates(model)
    assert [axis.name for axis in bank.axes] == ["a", "b.in"]
    with torch.no_grad():
        bank.log_alpha.fill_(5)
        bank.log_alpha[4:].view(36, 4)[:, 2] = -9
    small = l0prune.export(model)
    assert difference(model, small, x) <= 1e-12
    assert "a.weight" in dict(small.module.named_parameters())
    assert small.module.a.weight.shape[0] == 4


def test_inputs_that_an_export_picks_can_be_picked_from():
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 6)
    weight = model[0].weight.detach().clone()
    for closed in ([0, 3], [1, 3]):  # of six, and of the four that are left
        l0prune.gate(model, (x,))
        (axis,) = [a for a in l0prune.gates(model).axes if a.kind == "input"]
        with torch.no_grad():
            l0prune.gates(model).log_alpha[axis.slice][closed] = -9.0
        model = l0prune.export(model).module
    assert torch.equal(model.get_parameter("0.weight"), weight[:, [1, 4]])


class Around(nn.Module):
    """As a framework's module around a network."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, batch):
        return self.network(batch[0]).sum()


@pytest.mark.parametrize(
    "wrap", [Around, nn.DataParallel, lambda m: torch.compile(m, backend="eager")]
)
@pytest.mark.one_in(2)
def test_of_a_wrapper_the_model_in_it_is_exported(wrap):
    model, x = gated_case("sigmoid_after_bn")
    small = l0prune.export(wrap(model))
    assert difference(model, small, x) <= ROUNDED
    assert small.note.startswith("What was gated is exported")
    assert small.module.state_dict().keys() == l0prune.export(model).module.state_dict().keys()


@pytest.mark.parametrize("is_zero", [True, False])
def test_a_comparison_of_zeros_is_said_to_show_nothing(is_zero):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    if is_zero:
        for parameter in net[2].parameters():
            nn.init.zeros_(parameter)
    small = l0prune.export(close_some(l0prune.gate(net, torch.randn(2, 4))))
    assert ("All outputs are 0" in small.note) == is_zero
