"""Bits that were learned, in the report of a model and of its export."""

import pytest
import torch

pytest.importorskip("l0prune.features.int8")
from few_bits import MENU, quantized

import l0prune
from l0prune.report.content import parsed


@pytest.fixture(scope="module")
def model():
    model, gates = quantized(MENU)
    with torch.no_grad():
        gates.log_alpha[gates.plan.axes[-4].slice][2] = -4.0  # eight bits of the first weight
        gates.log_alpha[gates.plan.axes[-1].slice][1] = -4.0  # four of the last layer's input
    return model


def test_a_report_has_the_bits_of_each_layer(model):
    small = l0prune.export(model)
    assert [*small.widths] == ["0"]
    for report in (l0prune.Report.of(None, model=model), l0prune.Report.of(small)):
        content = parsed(report.content.model_dump_json(), "here")
        found = [(layer.name, layer.weight, layer.input) for layer in content.bits]
        assert found == [("0", 4, 16), ("3", 16, 2)]
        assert [axis.name for axis in content.axes] == ["0"]
        page = report.html()
        assert "Bits of each layer" in page
        assert page.count("3: weights 16, input 2 bits") == 2  # for wide screens and narrow ones


def test_without_learned_bits_there_is_no_picture(model):
    l0prune.gates(model).quantizer.off()
    plain = l0prune.export(model)
    assert plain.ranges is None
    assert "Bits of each layer" not in l0prune.Report.of(plain).html()
