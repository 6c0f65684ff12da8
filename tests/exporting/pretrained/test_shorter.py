"""Folders of models without whole layers: transformers builds them with as many as are left."""

from functools import partial

import pytest
import torch
import transformers
from decoders import gated, gemma, generated, llama

import l0prune

SECOND = ["model.layers.1.self_attn", "model.layers.1.mlp"]


@pytest.mark.slow
def test_a_folder_says_how_many_layers_there_are(tmp_path):
    model = gated(llama, *SECOND)
    dense = l0prune.export(model)
    assert "AutoModelForCausalLM" in dense.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.num_hidden_layers == 2
    assert len(dense.module.model.layers) == 3
    again = l0prune.from_pretrained(tmp_path)
    assert type(again) is type(loaded) is type(dense.module)
    expected = generated(model, use_cache=True)
    for small in (loaded, again):
        assert [layer.self_attn.layer_idx for layer in small.model.layers] == [0, 1]
    for small in (dense.module, loaded, again):
        torch.testing.assert_close(generated(small, use_cache=True), expected)


@pytest.mark.slow
def test_layers_of_two_kinds_keep_theirs(tmp_path):
    model = gated(partial(gemma, "sliding", "full", "sliding", "full"), *SECOND)
    dense = l0prune.export(model)
    assert "AutoModelForCausalLM" in dense.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    assert loaded.config.layer_types == kinds
    expected = generated(model, use_cache=True)
    for small in (dense.module, loaded, l0prune.from_pretrained(tmp_path)):
        torch.testing.assert_close(generated(small, use_cache=True), expected)


@pytest.mark.slow
def test_what_no_configuration_can_say_is_loaded_by_l0prune_with_as_many_layers(tmp_path):
    model = gated(llama, *SECOND, "model.layers.0.self_attn")
    said = l0prune.export(model).save_pretrained(tmp_path)
    assert "transformers cannot load it by itself: model.layers.0.self_attn" in said
    small = l0prune.from_pretrained(tmp_path)
    assert len(small.model.layers) == 2
    torch.testing.assert_close(generated(small, use_cache=True), generated(model, use_cache=True))
