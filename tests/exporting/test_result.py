"""How an export is shown."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import l0prune
from l0prune.errors import L0pruneError


@dataclass
class Scores:
    scores: Tensor


torch.export.register_dataclass(Scores)


def exported():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2))
    l0prune.gate(model, (torch.randn(2, 6),), exclude="*.in")
    l0prune.fit(model, "macs=0.5", l0prune.score(model, "magnitude"))
    return l0prune.export(model)


def test_it_is_shown_in_a_line_and_in_a_notebook():
    dense = exported()
    number = r"\de[-+]\d\d"
    params = rf"{dense.params} of 362 params \({dense.params / 362:.1%}\)"
    macs = rf"{dense.macs} of 320 MACs \({dense.macs / 320:.1%}\)"
    errors = rf"largest error {number} in float64, {number} in float32"
    assert re.fullmatch(rf"Export\(Sequential: {params}, {macs}; {errors}\)", repr(dense))
    html = dense._repr_html_()
    assert html.startswith("<pre")
    for text in ("Cut", "Certificate", "float64", f"{dense.params}", "362"):
        assert text in html


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 40), nn.Linear(40, 2)

    def forward(self, x):
        return Scores(self.b(self.a(x).relu()))


def test_an_output_that_a_pt2_cannot_name_is_refused_there_alone(tmp_path):
    model = l0prune.gate(Scored(), (torch.randn(2, 6),))
    small = l0prune.export(model)
    with pytest.raises(L0pruneError, match=r"not written: .*Scores.*serialized_type_name"):
        small.save(tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())
    (file,) = small.save_onnx(tmp_path / "m.onnx")
    assert [file] == list(tmp_path.iterdir())
