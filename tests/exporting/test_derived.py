"""Files of fewer bits beside the one in float32, by whoever registers one."""

import json
from dataclasses import dataclass

import onnx
import pytest
import torch
from round_trips import metadata
from torch import nn

import l0prune
from l0prune.errors import UsageError
from l0prune.exporting.onnx.derived import DERIVED, Derived


@dataclass
class Coarse:
    steps: int
    warnings = ("coarse",)

    def to_dict(self):
        return {"steps": self.steps}


class CoarseFile(Derived):
    keyword, also, name = "steps", ("offset",), "coarse"

    def __init__(self, given, opset, pieces, offset=0):
        if given < 1:
            raise UsageError("steps is a positive number")
        self.opset, self._steps, self._pieces = 19, given + offset, pieces

    def write(self, proven, target, data):
        target.write_bytes(proven.path.read_bytes())
        about = Coarse(self._steps)
        proven.describe(target, coarse=json.dumps(about.to_dict()))
        return about


@pytest.fixture
def small(monkeypatch):
    for name in ("steps", "offset"):
        monkeypatch.setitem(DERIVED, name, CoarseFile)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    return l0prune.export(l0prune.gate(model, (torch.randn(2, 6),)))


def test_a_file_of_ones_own_is_written_and_measured_beside_the_proven_one(small, tmp_path):
    with pytest.warns(l0prune.errors.L0pruneWarning, match="coarse"):
        files = small.save_onnx(tmp_path / "m.onnx", steps=4, offset=2, time=False)
    assert [file.name for file in files] == ["m.onnx", "m.coarse.onnx"]
    assert small.in_fewer_bits == {"coarse": Coarse(6)}
    facts = metadata(files[1])
    assert json.loads(facts["l0prune.coarse"]) == {"steps": 6}
    assert "l0prune.float32.certificate" in facts
    assert {onnx.load(file).opset_import[0].version for file in files} == {19}
    small.save_onnx(tmp_path / "m.onnx", time=False)
    assert small.in_fewer_bits == {}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"offset": 2}, "offset= is about the file that steps= asks for: give steps, too"),
        ({"steps": 0}, "positive"),
        ({"step": 4}, "no option of save_onnx 'step'.*steps"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(small, tmp_path, asked, said):
    with pytest.raises(UsageError, match=said):
        small.save_onnx(tmp_path / "m.onnx", **asked)
    assert not list(tmp_path.iterdir())
