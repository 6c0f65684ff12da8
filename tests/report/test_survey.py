"""The survey: counts that torch agrees with, every layer accounted for, no change to the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import surveyed
import torch
import torchvision
from counting import flops
from networks import CASES, Fn
from processes import exit_codes
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import l0prune
from l0prune.errors import CaptureError, UsageError
from l0prune.plan.layout import axes_of


@pytest.mark.parametrize(
    "name",
    ["mlp", "grouped", "depth_multiplier", "transposed_conv", "separate_projections",
     "fused_by_hand", "multi_head_attention", "encoder_layer", "raw_parameters", "einsum"],
)  # fmt: skip
@pytest.mark.one_in(10)
def test_counts_agree_with_torch_on_small_networks(name):
    module, shape, _ = CASES[name]
    x = torch.randn(shape)
    assert 2 * l0prune.survey(module, (x,)).macs * shape[0] == flops(module, x)


def test_a_product_with_a_piece_of_a_weight_costs_what_the_piece_does():
    model = Fn(
        lambda m, x: m.b((m.a(x) @ m.rows[:8]).relu() @ m.columns[:, 2:].T),
        a=nn.Linear(10, 8), b=nn.Linear(3, 2),
        rows=nn.Parameter(torch.randn(16, 6)), columns=nn.Parameter(torch.randn(3, 8)),
    )  # fmt: skip
    x = torch.randn(2, 10)
    assert 2 * l0prune.survey(model, (x,)).macs * 2 == flops(model, x)


@pytest.mark.slow
def test_every_weight_is_prunable_or_pinned():
    model = torchvision.models.get_model("mobilenet_v3_small")
    found = l0prune.survey(model, (torch.randn(2, 3, 64, 64),))
    pinned = {pin.where for pin in found.pins}

    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            for dim in (0, 1):
                free = bool(axes_of(found.plan.tensors[name][dim]))
                alone = parameter.shape[dim] == 1
                assert free or alone or f"{name} dim {dim}" in pinned


def test_json_and_text_tell_the_same():
    module, shape, _ = CASES["concat"]
    found = l0prune.survey(module, torch.randn(shape))
    data = json.loads(found.to_json())
    assert [axis["name"] for axis in data["axes"]] == ["a", "b"]
    text = str(found)
    assert all(axis["name"] in text for axis in data["axes"])


def test_it_is_shown_in_a_line_and_in_a_notebook():
    module, shape, _ = CASES["concat"]
    found = l0prune.survey(module, torch.randn(shape))
    line = f"Survey({found.params:,} params, {found.macs:,} MACs; {found.plan.size} gates on 2 axes"
    assert repr(found).startswith(line)
    html = found._repr_html_()
    assert html.startswith("<pre")
    assert "Every layer" in html


@pytest.mark.parametrize("name", ["<b>"])
def test_names_are_escaped_in_a_notebook(name):
    layers = nn.ModuleDict({name: nn.Linear(4, 5), "last": nn.Linear(5, 2)})
    model = Fn(lambda self, x: self.layers["last"](self.layers[name](x).relu()), layers=layers)
    html = l0prune.survey(model, torch.randn(2, 4))._repr_html_()
    assert "layers.&lt;b&gt;" in html
    assert name not in html


@pytest.mark.parametrize("name", ["[/x]", "[red]a", "[link=file:///etc]b"])
@pytest.mark.one_in(3)
def test_names_with_brackets_are_shown_as_they_are(name):
    layers = nn.ModuleDict({name: nn.Linear(4, 5), "last": nn.Linear(5, 2)})
    model = Fn(lambda self, x: self.layers["last"](self.layers[name](x).relu()), layers=layers)
    assert name in str(l0prune.survey(model, torch.randn(2, 4)))


def test_parameters_that_eval_never_uses_are_named():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.extra = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x):
            y = torch.relu(self.a(x))
            return (self.b(y), self.extra(y)) if self.training else self.b(y)

    found = l0prune.survey(Auxiliary(), torch.randn(2, 4))
    assert found.unused == ("extra.weight", "extra.bias")


@pytest.mark.slow
def test_a_model_that_cannot_be_captured_says_where():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            if self.a(x).sum() > 0:
                return x
            return -x

    with pytest.raises(CaptureError, match=r"test_survey\.py:\d+") as error:
        l0prune.survey(Branching(), torch.randn(2, 4))
    assert "if self.a(x).sum() > 0" in str(error.value)
    assert "data-dependent" in str(error.value)


@pytest.mark.slow
def test_a_size_that_data_decide_without_a_bound_is_refused():
    class Repeating(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(torch.repeat_interleave(x, (x[:, 0] > 0).sum() + torch.arange(2), 0))

    with pytest.raises(CaptureError, match=r"values of the input decide how large .*\.py:\d+"):
        l0prune.survey(Repeating(), torch.randn(2, 4))


def test_an_example_without_tensors():
    with pytest.raises(UsageError, match="hold no tensor"):
        l0prune.survey(nn.Linear(2, 2), (3,))


def test_weights_that_the_forward_computes_are_accounted_for():
    layers = [orthogonal(nn.Linear(10, 8)), nn.ReLU(), orthogonal(nn.Linear(8, 3))]
    found = l0prune.survey(nn.Sequential(*layers), (torch.randn(4, 10),))
    assert found.axes == ()
    reasons = {pin.where: pin.reason for pin in found.pins if "(computed weight)" in pin.where}
    assert {where.partition(".")[0] for where in reasons} == {"0", "2"}
    assert any("aten.linalg_householder_product" in reason for reason in reasons.values())


@pytest.mark.parametrize("what", ["model.pt", None])
def test_what_is_no_module_is_refused(what):
    with pytest.raises(UsageError, match="load_model"):
        l0prune.survey(what, (torch.randn(2, 3),))


def test_an_example_of_the_wrong_dtype_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(CaptureError, match="int64"):
        l0prune.survey(model, (torch.ones(2, 4, dtype=torch.int64),))


def test_a_stream_that_stays_whole_counts_as_such():
    """Of 9·8 + 8·6 + 6·8 + 8·3 = 192 weights all can be cut on one side, and all lie on it."""
    layers = {"i": (9, 8), "a": (8, 6), "b": (6, 8), "o": (8, 3), "p": (3, 2), "q": (2, 2)}
    layers = {name: nn.Linear(*sizes, bias=False) for name, sizes in layers.items()}

    def by(over):
        run = lambda m, x: m.q(m.p(m.o((y := m.i(x)) + m.b(m.a(over(y)).relu())).relu()))  # noqa: E731
        return l0prune.survey(Fn(run, **layers), (torch.randn(2, 9),), own_class=False)

    free, found = by(torch.sigmoid), by(lambda y: y.softmax(-1))
    assert free.whole == ()
    assert free.params_on_whole_streams == 0
    (stream,) = found.whole
    assert (stream.where, stream.size) == ("i.weight dim 0", 8)
    assert stream.tensors == ("i.weight", "a.weight", "b.weight", "o.weight")
    assert "softmax" in stream.reason
    assert found.params_on_whole_streams == 192 / 202
    assert found.reachable("params") > 0.9  # which hides it
    assert "1 stream between layers stays whole, and 95.0% of the params have a side on it" in str(
        found
    ).replace("\n", " ")
    data = json.loads(found.to_json())
    assert data["params_on_whole_streams"] == 192 / 202
    assert [each["where"] for each in data["whole_streams"]] == ["i.weight dim 0"]
    assert data["whole_streams"][0]["params"] == 192 / 202


@pytest.mark.slow
def test_reachable_is_the_share_that_an_axis_can_take():
    model = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), nn.Conv2d(5, 2, 1, bias=False))
    found = l0prune.survey(model, (torch.randn(2, 3, 4, 4),))
    assert found.reachable("params") == found.reachable("macs") == 1
    pinned = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), nn.Softmax(1), nn.Conv2d(5, 2, 1))
    assert l0prune.survey(pinned, (torch.randn(2, 3, 4, 4),)).reachable("macs") == 0


def forked(path, names):
    """By a process that was forked from another one than this."""
    assert exit_codes([(surveyed.write, path, names)]) == [0]


def started(path, names):
    script = f"import pathlib, surveyed; surveyed.write(pathlib.Path({str(path)!r}), {names})"
    paths = os.pathsep.join([os.getcwd(), str(Path(__file__).parents[1])])
    own = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", script], env=own, check=True)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(forked, marks=pytest.mark.skipif(
            os.environ.get("PYTHONHASHSEED", "random") != "random", reason="all hash alike",
        )),
        started,
    ],
)  # fmt: skip
@pytest.mark.slow
def test_every_process_makes_the_same_plan(tmp_path, start):
    """Strings hash to other numbers in each; what was gated in one is exported in another."""
    names = ("layer_norm_stream", "multi_head_attention", "weight_norm")
    start(tmp_path / "plans", names)
    number, _, there = (tmp_path / "plans").read_text().partition("\n")
    assert int(number) != hash("axis")
    assert there == surveyed.plans(names)
    assert there.count('"sites"') == 3


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_any_neurons_are_surveyed():
    found = l0prune.survey(nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 4)), torch.randn(3, 6))
    assert [layer.name for layer in found.layers] == ["0", "1"]
    assert "0" in str(found)
