"""Which models of transformers are a Llama: by their outputs, and by what tells them from one."""

import re

import pytest
import torch

from l0prune.features.loadable.llama import as_llama, llama_settings, why_no_llama

transformers = pytest.importorskip("transformers")
EXAMPLE = ((), {"input_ids": torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])})


def built(name, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(name, **sizes | heads | settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
    ],
)
def test_a_llama_by_another_name_is_one(name, settings):
    model = built(name, **settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert why_no_llama(model, EXAMPLE) == ""
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert as_llama(llama_settings(model)).state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("mistral", {"sliding_window": 3}, r"sees 3 tokens only \(sliding_window\)"),
        ("qwen3", {}, r"not those of a Llama \(model.layers.0.self_attn.q_norm"),
        ("gemma", {}, "computes something else with these weights"),
        ("granite", {"embedding_multiplier": 2.0}, "computes something else with these weights"),
        ("gpt2", {"n_embd": 16, "n_head": 4, "n_layer": 1}, "not those of a Llama"),
    ],
)
def test_what_tells_a_model_from_a_llama_is_said(name, settings, why):
    assert re.search(why, why_no_llama(built(name, **settings), EXAMPLE))
