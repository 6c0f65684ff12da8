"""Every layer is listed, with an axis or a reason on both of its sides."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import torchvision
from models import Tied
from networks import CASES, Fn
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrizations import orthogonal

import l0prune
from l0prune.plan.layout import Cat, Const, Prod, Slots, outer
from l0prune.report.layers import UNUSED
from l0prune.report.survey import join_numbered, list_names, mask_numbers


def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return transformers.GPT2Model(config), torch.randint(5, 90, (2, 12))


def vision(name, side=64, **options):
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **options)
        return model, torch.randn(2, 3, side, side)


MODELS = {
    "resnet18": lambda: vision("resnet18"),
    "mobilenet_v3_small": lambda: vision("mobilenet_v3_small"),
    "vit_b_16": lambda: vision("vit_b_16", side=224),
    "densenet121": lambda: vision("densenet121"),
    "googlenet": lambda: vision("googlenet", init_weights=False),
    "gpt2": gpt2,
}


LARGE = {"densenet121", "googlenet"}


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] if m in LARGE else []) for m in MODELS]
)
@pytest.mark.one_in(4)
def test_nothing_is_unlisted(name):
    model, x = MODELS[name]()
    found = l0prune.survey(model, (x,))
    kinds = nn.Linear | _ConvNd | nn.Embedding
    every = {n for n, module in model.named_modules() if isinstance(module, kinds)}
    modules = {n for n, _ in model.named_modules()}
    assert {layer.name for layer in found.layers if layer.name in modules} == every
    listed = {f"{layer.name}.weight" for layer in found.layers} | {x.name for x in found.layers}
    matrices = {n for n, p in model.named_parameters() if sum(s > 1 for s in p.shape) > 1}
    assert matrices <= listed
    for layer in found.layers:
        for side in (layer.input, layer.output):
            assert side.axes or side.reason, layer
            assert bool(side.reason) == (side.share < 1), layer
            assert "no weight writes" not in side.reason
            assert "no operator that" not in side.reason
    weighted = sum(layer.params for layer in found.layers)
    assert weighted <= found.params
    assert sum(layer.macs for layer in found.layers) <= found.macs
    assert json.loads(found.to_json())["layers"][0]["name"] == found.layers[0].name
    assert len(str(found).splitlines()) < 400


def layers(model, *shape):
    return {layer.name: layer for layer in l0prune.survey(model, (torch.randn(shape),)).layers}


def test_sides_name_their_axes_or_the_module_in_the_way():
    model = nn.Sequential(nn.Linear(10, 8), nn.Softmax(-1), nn.Linear(8, 6), nn.Linear(6, 3))
    found = layers(model, 2, 5, 10)
    assert found["0"].input.axes == ("0.in",)
    assert found["0"].output.reason == "a softmax or running sum goes over it in Softmax at 1"
    assert found["2"].input.reason == "a softmax or running sum goes over it in Softmax at 1"
    assert found["2"].output.axes == found["3"].input.axes == ("2",)
    assert found["3"].output.reason == "it feeds the model's output"
    assert (found["2"].params, found["2"].macs) == (8 * 6 + 6, 5 * 8 * 6)
    assert (found["2"].params_reachable, found["3"].macs_reachable) == (1, 1)


@pytest.mark.slow
def test_a_side_that_is_covered_in_part():
    model = Fn(
        lambda m, x: m.c(torch.cat([m.a(x), m.b(x).softmax(1)], 1)).mean((2, 3)),
        a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(3, 2, 1), c=nn.Conv2d(8, 4, 1, bias=False),
    )  # fmt: skip
    side = layers(model, 2, 3, 4, 4)["c"].input
    assert (side.size, side.axes, side.share) == (8, ("a",), 0.75)
    assert "softmax" in side.reason
    found = l0prune.survey(model, (torch.randn(2, 3, 4, 4),))
    of_c = next(layer for layer in found.layers if layer.name == "c")
    assert of_c.params_reachable == of_c.macs_reachable == 0.75


def test_grouped_and_transposed_convolutions():
    found = layers(CASES["grouped"][0], *CASES["grouped"][1])
    for layer in found.values():
        assert layer.input.axes or layer.input.reason
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 6, 2, groups=2), nn.Conv2d(6, 6, 1, groups=6),
        nn.Conv2d(6, 2, 1),
    )  # fmt: skip
    found = layers(model, 2, 3, 4, 4)
    assert (found["1"].input.size, found["1"].output.size) == (8, 6)
    assert (found["2"].input.size, found["2"].output.size) == (6, 6)
    assert found["2"].input == found["2"].output
    assert found["2"].input.axes == found["1"].output.axes == found["3"].input.axes


@pytest.mark.slow
def test_bare_weights_embeddings_and_tied_ones():
    found = layers(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2, 5, 32)
    raw = found["self_attn.in_proj_weight"]
    assert raw.kind == "weight of MultiheadAttention"
    assert raw.output.share == 1
    assert raw.macs == 5 * 32 * 96
    assert found["self_attn.out_proj"].macs == 5 * 32 * 32

    listed = l0prune.survey(Tied(), (torch.randint(0, 20, (2, 5)),)).layers
    tied = {layer.name: layer for layer in listed}
    assert "chosen by the input's values" in tied["embed"].input.reason
    assert (tied["embed"].macs, tied["head"].macs) == (0, 5 * 20 * 12)
    assert (tied["embed"].params, tied["head"].params) == (20 * 12, 0)


@pytest.mark.slow
def test_sides_of_a_recurrent_layer_and_its_own_work():
    model = Fn(
        lambda m, x: m.b(m.lstm(m.a(x))[0]),
        a=nn.Linear(5, 12), lstm=nn.LSTM(12, 16, 2, batch_first=True), b=nn.Linear(16, 4),
    )  # fmt: skip
    sides = layers(model, 2, 7, 5)
    first = sides["lstm.weight_ih_l0"]
    assert first.input.axes == ("a",)
    assert first.output.axes == ("lstm",)
    for name in ("ih_l0", "hh_l0", "ih_l1", "hh_l1"):
        layer = sides[f"lstm.weight_{name}"]
        assert layer.macs == 7 * layer.shape[0] * layer.shape[1]


def test_a_bare_kernel_reads_channels_and_not_its_height():
    model = Fn(
        lambda m, x: m.head(F.conv2d(F.conv2d(x, m.full).relu(), m.apart, groups=8).mean((2, 3))),
        full=nn.Parameter(torch.randn(8, 1, 3, 3)), apart=nn.Parameter(torch.randn(8, 1, 3, 3)),
        head=nn.Linear(8, 3),
    )  # fmt: skip
    sides = layers(model, 2, 1, 9, 9)
    assert sides["full"].input.reason == "it is a single slot"
    assert sides["full"].output.axes == ("full",)
    assert sides["apart"].input.axes == sides["apart"].output.axes == ("full",)


def test_what_eval_never_touches_says_so():
    model = Fn(
        lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 6), b=nn.Linear(6, 2), extra=nn.Linear(6, 2)
    )
    layer = layers(model, 2, 4)["extra"]
    assert not layer.used
    assert layer.input.reason == layer.output.reason == UNUSED
    assert UNUSED in str(l0prune.survey(model, (torch.randn(2, 4),)))


@pytest.mark.slow
def test_an_unknown_operator_is_named_with_its_line_and_what_to_do():
    model = Fn(lambda m, x: m.b(torch.cdist(m.a(x), m.a(x))), a=nn.Linear(10, 8), b=nn.Linear(2, 3))
    found = layers(model, 2, 10)
    assert "operator aten.cdist at networks.py:" in found["a"].output.reason
    assert '@l0prune.infer.registry.rule("aten.cdist")' in found["a"].output.reason
    assert "operator aten.cdist at networks.py:" in found["b"].input.reason
    text = str(l0prune.survey(model, (torch.randn(2, 10),)))
    assert text.count("docs/extending.md") == 1


def test_weights_that_the_forward_computes_have_reasons():
    model = nn.Sequential(orthogonal(nn.Linear(10, 8)), nn.ReLU(), nn.Linear(8, 3))
    layer = layers(model, 2, 10)["0"]
    assert (layer.kind, layer.shape) == ("Linear", (8, 10))
    assert layer.output.reason.startswith("a triangle of it is taken (0.parametrizations.weight")
    assert layer.macs == 80


def test_leading_factors():
    groups, inner = Slots(0, 0, 3), Slots(1, 0, 4)
    assert outer(Prod((groups, inner)), 3) == Prod((groups,))
    assert outer(groups, 3) == groups
    assert outer(Cat((Prod((groups, inner)), Prod((Const(2), inner)))), 5) == Cat(
        (Prod((groups,)), Prod((Const(2),)))
    )


def test_numbered_names_become_one():
    names = [f"layer{a}.{b}.conv1" for a in (1, 2, 3) for b in (0, 1)]
    assert join_numbered(names) == "layer{1..3}.{0,1}.conv1"
    assert mask_numbers("layer1.0.conv1") != mask_numbers("layer1.0.conv2")
    assert list_names([*names, "stem", "head"]) == "layer{1..3}.{0,1}.conv1 + stem + head"
    assert list_names(["a", "b", "c", "d"]) == "a + b + c and 1 more"
    assert join_numbered(["f.0", "f.3", "f.7", "f.9", "f.12"]) == "f.{0,3,…,12}"
