"""Models of other packages are what they were after survey, gate, fit and export."""

from __future__ import annotations

import copy

import pytest
import torch
from exact_families import FAMILIES
from torch import nn

import l0prune
from benchmarks import zoo
from tests.disturbances import answer, changes, state_of

# One module of timm for each kind of network.
TIMM = (
    *("byobnet", "cait", "coat", "convit", "crossvit", "cspnet", "davit", "densenet", "edgenext"),
    *("efficientformer", "efficientnet", "eva", "hgnet", "levit", "mixer", "mobilevit", "mvitv2"),
    *("nfnet", "regnet", "repvit", "resnet", "swin_transformer", "vision_transformer", "xcit"),
)
EVERY = [
    *(("transformers", name) for name in zoo.names("transformers")),
    *(("torchvision", name) for ((name, _), *_) in FAMILIES.values()),
    *(("torchvision", name) for name in ("fcos_resnet50_fpn", "deeplabv3_mobilenet_v3_large")),
    *(("timm", name) for name in TIMM),
]


def check(model: nn.Module, example, *, exports=False) -> None:
    """Compare with a copy that only ran a plain forward, to the bit."""
    model.train()
    next(model.children()).eval()  # a mode of its own
    plain, before = copy.deepcopy(model), state_of(model)
    survey = l0prune.survey(model, *example, own_class=exports)
    assert changes(before, state_of(model)) == []
    l0prune.gate(model, *example, survey=survey)
    if exports:
        l0prune.fit(model, "params=0.9", l0prune.score(model, "magnitude"), progress=False)
        gated = state_of(model)
        l0prune.export(model)
        assert changes(gated, state_of(model)) == []
    l0prune.ungate(model)
    assert changes(before, state_of(model)) == []
    for found, expected in zip(answer(model, example), answer(plain, example), strict=True):
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


class States(nn.Module):
    """Reads all hidden states of a model of transformers."""

    def __init__(self, inner, width):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(width, 3)

    def forward(self, x):
        states = self.inner(x, output_hidden_states=True).hidden_states
        return self.out(torch.cat([state.mean(1) for state in states], -1))


def bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(
        vocab_size=20, num_hidden_layers=2, max_position_embeddings=8, pad_token_id=None, **sizes
    )
    return States(BertModel(config, add_pooling_layer=False), 24), torch.randint(0, 20, (2, 6))


def clip():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    config = CLIPVisionConfig(num_hidden_layers=2, image_size=8, patch_size=4, **sizes)
    return States(CLIPVisionModel(config), 24), torch.randn(2, 3, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("build", [bert, clip])
def test_hidden_states_are_collected_once(build):
    torch.manual_seed(0)
    model, x = build()
    check(model, ((x,), {}))
    assert len(model.inner(x, output_hidden_states=True).hidden_states) == 3
    l0prune.gate(model.eval(), (x,))
    gates = l0prune.gates(model)
    gates.set_open(torch.arange(gates.plan.size) % 4 > 0)
    small = l0prune.export(model)
    torch.testing.assert_close(small.module(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "name"), EVERY)
def test_every_family(which, name):
    model, example = zoo.build(which, name)
    check(model, example, exports=which == "transformers")
