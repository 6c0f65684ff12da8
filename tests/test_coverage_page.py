"""The rows of the coverage page, and the sizes to ask for."""

import pytest
import torch
from networks import Fn, conv
from torch import nn

from benchmarks import coverage_page
from benchmarks.coverage_page import section, sizes, with_section
from benchmarks.free_dims import askable, possible

ROW = {
    "model": "small", "step": "done", "kinds": {"neuron": 1}, "params_share": 1.0,
    "macs_share": 1.0, "plan_s": 1.0, "float64": 0.0, "onnx": 0.0, "peak_mib": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ({}, "-"),
        ({"batches": ["1 or more"]}, "batch"),
        ({"batches": ["1 or more"], "free": ["height", "width"]}, "batch, height, width"),
        ({"batches": ["2 only"]}, "batch: 2 only"),
        ({"batches": ["1 or more", "2 or more"]}, "batch, batch: 2 or more"),
    ],
)
def test_sizes_that_are_free(recorded, shown):
    assert sizes(ROW | recorded) == shown
    lines = section("small", [ROW | recorded], []).splitlines()
    head, _, row = (line.split(" | ") for line in lines if "|" in line)
    assert len(head) == len(row)
    assert row[head.index("free sizes")] == shown


def test_the_section_of_one_zoo_is_made_anew(monkeypatch):
    loaded = ROW | {"loss": 1.0, "loaded_by": "l0prune.resize", "loaded_error": 0.0}
    monkeypatch.setattr(coverage_page, "rows", lambda path: [loaded] * ("-small" in path.name))
    head, other, old = "# Head\n", "## timm\n\nrows\n", "## small\n\nold\n"
    made = section("small", [loaded], [loaded])
    assert "| yes | l0prune.resize |" in made
    assert with_section(f"{head}\n{old}\n{other}", "small") == f"{head}\n{made}\n{other}"
    assert with_section(f"{head}\n{other}", "small") == f"{head}\n{other}\n{made}"


def test_sizes_to_ask_for():
    image, ids = torch.randn(2, 3, 8, 9), torch.ones(2, 5, dtype=torch.int64)

    class Pair(nn.Module):
        def forward(self, image, ids, mask=None):
            return ids

    shapes = askable(Pair(), (image, ids), {"mask": ids})
    assert shapes == {
        "image": {2: "height", 3: "width"}, "ids": {1: "ids_1"}, "mask": {1: "ids_1"},
    }  # fmt: skip


class Flat(nn.Module):
    """Reads images of any height and one width."""

    def __init__(self):
        super().__init__()
        self.net = Fn(lambda m, x: m.b(m.a(x).mean(2).flatten(1)), a=conv(3, 4), b=nn.Linear(36, 2))

    def forward(self, image):
        return self.net(image)


def test_what_the_code_fixes_is_left_out():
    assert possible(Flat(), (torch.randn(2, 3, 8, 9),), {}) == {"image": {2: "height"}}


def test_what_takes_too_long_is_not_waited_for():
    assert possible(Flat(), (torch.randn(2, 3, 8, 9),), {}, limit=1e-3) is None
