"""Small random networks of families of transformers, cut by what their configurations can say."""

import warnings

import pytest
import torch

import l0prune
from l0prune.errors import L0pruneWarning

transformers = pytest.importorskip("transformers")
TOKENS = 48
IDS = torch.tensor([[17, 3, 8, 4, 5, 41, 9], [20, 33, 24, 3, 5, 6, 7]])
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 3, "head_dim": 4}
OF_GPT = {"n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 64}
OF_T5 = {"d_model": 24, "d_kv": 4, "d_ff": 40, "num_layers": 3, "num_heads": 6}
# Of each family: its Auto class, and its own settings.
FAMILIES = {
    "llama": ("CausalLM", GROUPED),
    "mistral": ("CausalLM", GROUPED),
    "qwen2": ("CausalLM", {"num_key_value_heads": 3}),
    "qwen3": ("CausalLM", GROUPED),
    "gemma": ("CausalLM", GROUPED),
    "gemma2": ("CausalLM", GROUPED),
    "gemma3_text": ("CausalLM", GROUPED),
    "phi": ("CausalLM", {}),
    "phi3": ("CausalLM", {"num_key_value_heads": 3}),
    "gpt2": ("CausalLM", OF_GPT),
    "gpt_neox": ("CausalLM", {}),
    "gpt_neo": (
        "CausalLM",
        {"num_layers": 3, "num_heads": 6, "attention_types": [[["global"], 3]]},
    ),
    "opt": ("CausalLM", {"ffn_dim": 40, "word_embed_proj_dim": 24}),
    "olmo": ("CausalLM", {"num_key_value_heads": 3}),
    "olmo2": ("CausalLM", {"num_key_value_heads": 3}),
    "granite": ("CausalLM", {"num_key_value_heads": 3}),
    "smollm3": ("CausalLM", {"num_key_value_heads": 3}),
    "bert": ("MaskedLM", {}),
    "roberta": ("MaskedLM", {}),
    "distilbert": ("MaskedLM", {"dim": 24, "n_layers": 3, "n_heads": 6, "hidden_dim": 40}),
    "t5": ("Seq2SeqLM", OF_T5),
}


def built(name):
    torch.manual_seed(0)
    auto, settings = FAMILIES[name]
    config = transformers.AutoConfig.for_model(name, **SIZES | settings)
    return getattr(transformers, f"AutoModelFor{auto}").from_config(config).eval()


def inputs(name):
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :4]} if name == "t5" else {})


def smaller(name):
    """Cut to about two thirds of the widths and heads, without one layer where layers can go."""
    model = built(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", L0pruneWarning)
        l0prune.gate(model, (), inputs(name), loadable_by="transformers", progress=False)
    bank = l0prune.gates(model)
    plan = bank.plan
    for axis in plan.axes:
        if axis.kind != "branch":
            allowed = plan.allowed.get(axis.name, range(1, axis.size + 1))
            wanted = max([each for each in allowed if each <= 2 * axis.size / 3], default=axis.size)
            bank.set_open(axis.name, range(axis.size - wanted, axis.size))
    kinds = {axis.name: axis.kind for axis in plan.axes}
    layers = [group for group in plan.together if kinds[group[0]] == "branch"]
    # of T5 one of the decoder: transformers sizes its cache by the layers of the encoder
    for branch in layers[-2] if len(layers) > 1 else ():
        bank.set_open(branch, [])
    return l0prune.export(model, verify="float32", progress=False)
