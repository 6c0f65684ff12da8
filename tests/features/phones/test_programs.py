"""Programs for ExecuTorch and LiteRT: run by their own runtimes, compared, refused by name."""

import pytest
import torch
from timed_network import gated
from torch import nn

import l0prune
from l0prune.errors import CertificateError, L0pruneError, UsageError
from l0prune.exporting import programs
from l0prune.exporting.programs import FORMATS
from l0prune.features.latency.runtimes import AlternatingTimer, runtime_of
from l0prune.features.phones.formats import ExecuTorch
from l0prune.features.phones.runtimes import Program

# Their own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore")
INSTALLED = [
    pytest.param(
        ending,
        marks=pytest.mark.skipif(
            programs.is_missing(kind),
            reason=f"{kind.label} is not installed: pip install 'l0prune[{kind.name}]'",
        ),
    )
    for ending, kind in FORMATS.items()
]


@pytest.mark.slow
@pytest.mark.parametrize("ending", INSTALLED)
def test_a_program_computes_what_the_module_does(ending, tmp_path):
    kind, path = FORMATS[ending], tmp_path / f"model{ending}"
    small = l0prune.export(gated(), verify="float32")
    assert small.save(path) == (path,)
    assert small.certificate.worst(kind.name, "float32") < 1e-5
    x = torch.randn(1, 3, 12, 12)
    (found,) = kind.loaded(path.read_bytes(), 1)(((x,), {}))
    with torch.no_grad():
        assert torch.allclose(found, small.module(x), atol=1e-5)


class Named(nn.Module):
    """Gives a mapping, whose keys are in no order."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.down(self.up(x).relu())
        return {"logits": y, "hidden": (y + 1, y + 2), "all": y + 3}


@pytest.mark.slow
@pytest.mark.parametrize("ending", INSTALLED)
def test_outputs_with_names_come_in_the_order_of_the_module(ending, tmp_path):
    kind, path = FORMATS[ending], tmp_path / f"model{ending}"
    model = l0prune.gate(Named().eval(), torch.randn(2, 4))
    l0prune.gates(model).set_open("up", [0, 3, 4])
    small = l0prune.export(model, verify="float32")
    small.save(path)
    x = torch.randn(1, 4)
    found = kind.loaded(path.read_bytes(), 1)(((x,), {}))
    y = small.module(x)["logits"]
    for number, each in enumerate(found):
        torch.testing.assert_close(each, y + number, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ending", INSTALLED)
def test_networks_are_timed_in_it(ending):
    model, kind = gated(), FORMATS[ending]
    timer = AlternatingTimer(model, Program(kind, "cpu", 1), batch=1)
    gates = l0prune.gates(model)
    found = timer.of_slots(gates.plan.kept(gates.open().cpu()), 0.01)
    assert min(*found["own"], *found["dense"]) > 0
    assert "torch" in runtime_of(kind.name).version
    with pytest.raises(UsageError, match="on the processor"):
        runtime_of(kind.name, "meta")


@pytest.mark.parametrize("ending", FORMATS)
def test_without_it_the_way_on_is_said(ending, monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda package: None)
    kind = FORMATS[ending]
    with pytest.raises(UsageError, match=rf"pip install 'l0prune\[{kind.name}\]'"):
        runtime_of(kind.name)
    with pytest.raises(UsageError, match=f"{kind.label} is not installed"):
        programs.made(kind, nn.Linear(2, 2), (torch.zeros(1, 2),), {})


class Odd(ExecuTorch):
    """A format whose programs add to each output."""

    packages = ("torch",)

    def __init__(self, off):
        self.off = off

    def made(self, network, args, kwargs):
        if self.off is None:
            raise RuntimeError("no kernel of aten.sort\nand a page of more")
        self.network = network
        return b"program"

    def loaded(self, content, threads):
        def run(inputs):
            if self.off < 0:
                raise ValueError("out of memory")
            return [self.network(*inputs[0]).detach() + self.off]

        return run


def test_what_is_not_the_same_is_not_written(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    small = l0prune.export(l0prune.gate(model, torch.randn(2, 4)), verify="float32")
    path = tmp_path / "model.pte"
    for off, error, said in (
        (None, L0pruneError, r"cannot translate the model: no kernel of aten.sort\."),
        (-1, L0pruneError, "cannot run the file that was made, so it was not written: out of mem"),
        (0.1, CertificateError, "executorch in float32"),
    ):
        monkeypatch.setitem(FORMATS, ".pte", Odd(off))
        with pytest.raises(error, match=said):
            small.save(path)
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(FORMATS, ".pte", Odd(0.0))
    assert small.save(path) == (path,)
    assert path.read_bytes() == b"program"
