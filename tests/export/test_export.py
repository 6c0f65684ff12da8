"""Export: exact on small networks of every kind, honest in its counts, whole or not at all."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
from deadness import randomise
from networks import CASES
from torch import nn

import l0prune
from l0prune.errors import CertificateError, NotGated
from l0prune.export.certificate import Certificate, Check


def half_closed(model: nn.Module, *args: torch.Tensor, seed: int = 0) -> nn.Module:
    """Gated, half of the gates closed at random, the others at fractional values."""
    model = l0prune.gate(randomise(model).eval(), args)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        log_alpha = l0prune.gates(model).log_alpha
        log_alpha.copy_(torch.randn(log_alpha.shape, generator=generator) * 3 - 2.4)
    return model


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_small_network(name):
    module, shape, _ = CASES[name]
    torch.manual_seed(1)
    if l0prune.survey(module, torch.randn(shape)).axes:
        model = half_closed(module, torch.randn(shape))
        try:
            dense = l0prune.export(model)
        finally:
            l0prune.ungate(model)
        assert dense.certificate.worst("dense", "float64") <= 1e-10
        assert sum(p.numel() for p in dense.module.parameters()) == dense.params


def test_the_dense_module_against_masking_by_hand():
    """An independent computation: zero the columns, run the plain network."""
    model = half_closed(small(), torch.randn(2, 1, 8, 8))
    gates = l0prune.gates(model)
    axes = {axis.name: gates.z()[axis.slice] for axis in gates.axes}
    plain = small()
    plain.load_state_dict(
        {k: v for k, v in model.state_dict().items() if not k.startswith("l0prune_gates")}
    )
    plain.eval()
    with torch.no_grad():
        plain[4].weight.mul_(axes["0"].repeat_interleave(36) * axes["4.in"])
        plain[6].weight.mul_(axes["4"])
        x = torch.randn(7, 1, 8, 8)
        expected = plain(x)
        found = l0prune.export(model).module(x)
    assert torch.allclose(expected, found, atol=1e-6 * float(expected.abs().max()))


def test_onnx_file_has_its_certificate_and_a_free_batch(tmp_path):
    model = half_closed(small(), torch.randn(2, 1, 8, 8))
    dense = l0prune.export(model)
    dense.save_onnx(tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    facts = {entry.key: entry.value for entry in proto.metadata_props}
    checks = json.loads(facts["l0prune.certificate"])
    assert {c["what"] for c in checks} == {"dense", "onnx"}
    assert len({c["batch"] for c in checks}) > 1
    first = proto.graph.input[0].type.tensor_type.shape.dim[0]
    assert first.dim_param
    assert int(facts["l0prune.params"]) == dense.params < dense.params_before


def test_pt2_and_state_need_only_torch(tmp_path):
    model = half_closed(small(), torch.randn(2, 1, 8, 8))
    dense = l0prune.export(model)
    dense.save(tmp_path / "m.pt2")
    dense.save(tmp_path / "m.state.pt")
    x = torch.randn(3, 1, 8, 8)
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.allclose(program(x), dense.module(x))
    content = torch.load(tmp_path / "m.state.pt", weights_only=True)
    shapes = json.loads(content["manifest"])["shapes"]
    assert {k: list(v.shape) for k, v in content["state_dict"].items()} == {
        k: v["new"] for k, v in shapes.items()
    }


def test_the_manifest_rebuilds_the_users_own_class(tmp_path):
    """Without fine gates nothing is gathered, so the class itself runs at the new sizes."""
    torch.manual_seed(0)
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8),
        nn.ReLU(), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    model = half_closed(build(), torch.randn(2, 3, 9, 9))
    dense = l0prune.export(model)
    dense.save(tmp_path / "m.state.pt")
    content = torch.load(tmp_path / "m.state.pt", weights_only=True)
    rebuilt = build().eval()
    for path, changes in json.loads(content["manifest"])["attributes"].items():
        for name, value in changes.items():
            setattr(rebuilt.get_submodule(path), name, value)
    for name, tensor in content["state_dict"].items():
        path, _, leaf = name.rpartition(".")
        owner = rebuilt.get_submodule(path)
        is_parameter = leaf in owner._parameters
        setattr(owner, leaf, nn.Parameter(tensor) if is_parameter else tensor)
    x = torch.randn(4, 3, 9, 9)
    assert torch.allclose(rebuilt(x), dense.module(x), atol=1e-6)


def test_all_gates_of_an_axis_closed_is_exact_too():
    model = half_closed(small(), torch.randn(2, 1, 8, 8))
    with torch.no_grad():
        l0prune.gates(model).log_alpha.fill_(-9)
    dense = l0prune.export(model)
    assert all(kept == 1 for kept, _ in dense.widths.values())


def test_exporting_leaves_the_model_as_it_was():
    model = half_closed(small(), torch.randn(2, 1, 8, 8)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    l0prune.export(model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_gates_on_some_axes_only():
    model = l0prune.gate(randomise(small()).eval(), torch.randn(2, 1, 8, 8), exclude=["*.in", "4"])
    with torch.no_grad():
        l0prune.gates(model).log_alpha[:3] = -9
    dense = l0prune.export(model)
    assert dense.widths["0"] == (3, 6)
    assert dense.widths["4"] == (8, 8)


def test_a_failed_check_makes_no_certificate():
    good = Check("dense", "float64", 2, 1e-16, 1e-10)
    with pytest.raises(CertificateError, match=r"2\.00e-03 of the output's scale"):
        Certificate((good,)).with_checks([Check("onnx", "float32", 5, 2e-3, 1e-5)])
    with pytest.raises(CertificateError):
        Certificate((Check("dense", "float64", 2, float("nan"), 1e-10),))


def test_a_model_that_is_random_in_eval_mode_is_refused(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))) + torch.rand(2)

    model = half_closed(Noisy(), torch.randn(2, 4))
    with pytest.raises(CertificateError, match="random in eval mode"):
        l0prune.export(model)


def test_an_ungated_model():
    with pytest.raises(NotGated):
        l0prune.export(small())
