"""Programs for ExecuTorch: run by its own runtime, compared, and refused where it cannot."""

import pytest
import torch
from timed_network import gated
from torch import nn

import l0prune
from l0prune.errors import L0pruneError, UsageError
from l0prune.exporting import executorch
from l0prune.timing.eager import ExecuTorch
from l0prune.timing.runtimes import AlternatingTimer, runtime_of

# Its own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
IS_HERE = pytest.mark.skipif(
    executorch.is_missing(), reason="ExecuTorch is not installed: pip install executorch"
)


@IS_HERE
@pytest.mark.slow
def test_a_program_computes_what_the_module_does(tmp_path):
    dense = l0prune.export(gated(), verify="float32")
    assert dense.save(tmp_path / "model.pte") == (tmp_path / "model.pte",)
    assert dense.certificate.worst("executorch", "float32") < 1e-5
    run = executorch.loaded((tmp_path / "model.pte").read_bytes())
    x = torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        assert torch.allclose(run([x])[0], dense.module(x), atol=1e-5)


@IS_HERE
@pytest.mark.slow
def test_networks_are_timed_in_it():
    model = gated()
    timer = AlternatingTimer(model, ExecuTorch("cpu", 1), batch=1)
    open_ = l0prune.gates(model).open()
    found = timer.of_slots(l0prune.gates(model).plan.kept(open_.cpu()), 0.01)
    assert min(*found["own"], *found["dense"]) > 0
    assert "torch" in runtime_of("executorch").version
    with pytest.raises(UsageError, match="on the processor"):
        runtime_of("executorch", "meta")


def test_without_it_the_way_on_is_said(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(executorch, "import_module", missing)
    with pytest.raises(UsageError, match=r"pip install 'l0prune\[executorch\]'"):
        executorch.version()
    with pytest.raises(UsageError, match="ExecuTorch is not installed"):
        runtime_of("executorch")


def test_what_it_cannot_translate_is_said(monkeypatch):
    def fails(name):
        def lower(*args, **options):
            raise RuntimeError("no kernel of aten.sort\nand a page of more")

        return type("Module", (), {"to_edge_transform_and_lower": lower, "XnnpackPartitioner": int})

    monkeypatch.setattr(executorch, "_imported", fails)
    exported = executorch.fixed(nn.Linear(2, 2), (torch.zeros(1, 2),), {})
    with pytest.raises(L0pruneError, match=r"cannot translate .*: no kernel of aten.sort\. "):
        executorch.program_of(exported)
