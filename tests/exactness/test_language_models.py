"""Residual streams that only RMSNorms read: an axis from the token table to the language head."""

from __future__ import annotations

import pytest
import torch
from differences import ROUNDED, difference

import l0prune
from benchmarks import zoo
from benchmarks.scramble import scramble

pytest.importorskip("transformers")


# Tied, and with a head of its own.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-lm", "llama-lm"])
def test_the_residual_stream_is_cut_exactly(name):
    model, (args, kwargs) = zoo.build("transformers", name)
    survey = l0prune.survey(model, args, kwargs, own_class=False)
    assert {axis.name: axis.size for axis in survey.axes}["model.embed_tokens"] == 32
    assert survey.reachable("params") == 1.0
    with torch.no_grad():
        before = model(*args, **kwargs).logits
        l0prune.gate(model, args, kwargs)
        assert torch.equal(model(*args, **kwargs).logits, before)
    l0prune.ungate(model)
    scramble(model.double(), (args, kwargs))
    small = l0prune.export(model)
    kept, whole = small.widths["model.embed_tokens"]
    assert kept < whole
    assert difference(model, small, args, kwargs) <= 1e-10


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
def test_a_cut_decoder_generates_what_the_gated_one_does(name):
    """Gated with its default config, which returns a cache; its class stays, so it generates."""
    model, (args, kwargs) = zoo.build("transformers", f"{name}-lm")
    model.config.use_cache = True
    kind = type(model)
    scramble(model, (args, kwargs), branches=False)  # without one a class goes on otherwise
    assert l0prune.gates(model).plan.parts == ("",)
    small = l0prune.export(model)
    assert type(small.module) is kind
    tokens, mask = kwargs["input_ids"], torch.ones_like(kwargs["input_ids"])
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for use_cache in (True, False):
        expected = model.generate(tokens, use_cache=use_cache, **how)
        assert torch.equal(small.module.generate(tokens, use_cache=use_cache, **how), expected)
        assert len(expected[0]) > tokens.shape[1]


# All kinds of norms, heads and caches between them; the others are in the coverage table.
@pytest.mark.parametrize("name", ["bert", "swin", "falcon", "qwen3-lm"])
@pytest.mark.slow
def test_transformers_keep_their_class(name):
    model, (args, kwargs) = zoo.build("transformers", name)
    kind = type(model)
    scramble(model, (args, kwargs))
    small = l0prune.export(model)
    assert type(small.module) is kind
    assert difference(model, small, args, kwargs) <= ROUNDED
