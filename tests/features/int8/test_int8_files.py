"""Files in eight bits at any widths, and their times under a name of their own."""

import numpy as np
import onnx
import onnxruntime
import pytest
from timed_network import gated

import l0prune
from l0prune.errors import L0pruneWarning
from l0prune.features.int8 import quantizer
from l0prune.features.int8.quantizer import in_int8
from l0prune.features.latency.network_files import INPUTS, Exporter, NetworkFiles
from l0prune.features.latency.runtimes import runtime_of
from l0prune.features.latency.sizes import slots_of
from l0prune.features.latency.template import with_numbered_names


def shapes(model):
    return {t.name: (t.data_type, tuple(t.dims)) for t in model.graph.initializer}


@pytest.mark.slow
def test_files_of_other_widths_are_those_that_the_quantizer_makes_of_an_export(tmp_path):
    model = gated()
    plan = l0prune.gates(model).plan
    files = NetworkFiles(model, 2, tmp_path, in_int8)
    widths = [max(1, axis.size * 5 // 9) for axis in plan.axes]
    path = files.write("other.onnx", plan.kept(slots_of(plan, widths)))
    expected = with_numbered_names(Exporter(model, 2, in_int8).networks([widths])[0].model)
    found = onnx.load(str(path))
    assert [n.op_type for n in found.graph.node] == [n.op_type for n in expected.graph.node]
    assert shapes(found) == shapes(expected)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (answer, *_) = session.run(None, dict(np.load(tmp_path / INPUTS).items()))
    assert len(answer) == 2
    assert {f.owner for f in files.facts if f.operator == "Conv"} >= {"wide", "deep", "back"}


def test_times_of_int8_files_have_a_name_of_their_own(monkeypatch):
    monkeypatch.setattr(quantizer, "has_dot_products", lambda: True)
    runtime = runtime_of("onnxruntime-int8")
    assert (runtime.name, runtime.convert.func) == ("onnxruntime-int8", in_int8)
    assert runtime_of("onnxruntime").convert is None


def test_a_processor_without_dot_products_is_said(monkeypatch):
    monkeypatch.setattr(quantizer, "is_x86", lambda: True)
    monkeypatch.setattr(quantizer, "processor_flags", lambda: ["sse2", "avx2"])
    assert not quantizer.has_dot_products()
    with pytest.warns(L0pruneWarning, match="no VNNI instructions: times of int8 files here"):
        runtime_of("onnxruntime-int8")
    monkeypatch.setattr(quantizer, "processor_flags", lambda: ["avx512f", "avx512_vnni"])
    assert quantizer.has_dot_products()
