"""Residual streams that only RMSNorms read: an axis from the token table to the language head."""

from __future__ import annotations

import pytest
import torch
from differences import difference

import l0prune
from benchmarks import zoo
from benchmarks.scramble import scramble

pytest.importorskip("transformers")


# Tied, and with a head of its own.
@pytest.mark.parametrize("name", ["gemma-lm", pytest.param("llama-lm", marks=pytest.mark.slow)])
def test_the_residual_stream_is_cut_exactly(name):
    model, (args, kwargs) = zoo.build("transformers", name)
    survey = l0prune.survey(model, args, kwargs)
    assert {axis.name: axis.size for axis in survey.axes}["model.embed_tokens"] == 32
    assert survey.reachable("params") == 1.0
    with torch.no_grad():
        before = model(*args, **kwargs).logits
        l0prune.gate(model, args, kwargs)
        assert torch.equal(model(*args, **kwargs).logits, before)
    l0prune.ungate(model)
    scramble(model.double(), (args, kwargs))
    dense = l0prune.export(model)
    kept, whole = dense.widths["model.embed_tokens"]
    assert kept < whole
    assert difference(model, dense, args, kwargs) <= 1e-10
