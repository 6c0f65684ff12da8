"""A folder for vLLM, read by what its source says and by nothing of ours.

The rules are those of vLLM's ``nemotron_nas.py`` and ``llama.py``, of which a test can run none.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
STACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def expected_shapes(config):
    """The shapes of the parameters of vLLM's class, by its names."""
    hidden, size = config.hidden_size, config.head_dim
    bias = getattr(config, "qkv_bias", config.attention_bias)
    found = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    for number, block in enumerate(config.block_configs):
        at = f"model.layers.{number}"
        if not block.attention.no_op:
            keys = config.num_attention_heads // block.attention.n_heads_in_group
            rows = (config.num_attention_heads + 2 * keys) * size
            found[f"{at}.self_attn.qkv_proj.weight"] = (rows, hidden)
            found[f"{at}.self_attn.o_proj.weight"] = (hidden, config.num_attention_heads * size)
            found[f"{at}.input_layernorm.weight"] = (hidden,)
            if bias:
                found[f"{at}.self_attn.qkv_proj.bias"] = (rows,)
        if not block.ffn.no_op:
            assert not hasattr(block.ffn, "ffn_mult")  # which would round widths up to 256s
            width = block.ffn.intermediate_size
            found[f"{at}.mlp.gate_up_proj.weight"] = (2 * width, hidden)
            found[f"{at}.mlp.down_proj.weight"] = (hidden, width)
            found[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    return found


def loaded(tensors):
    """The file's tensors as vLLM stacks them: q, k, v and gate, up, in this order."""
    parts = {}
    for shard in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ""):
        for name, tensor in tensors.items():
            if shard == next((each for each in STACKED if each in name), ""):
                parts.setdefault(name.replace(shard, STACKED.get(shard, "")), []).append(tensor)
    return {name: torch.cat(of) for name, of in parts.items()}


def rotated(x, config):
    """Rotary positions in the order of GPT-NeoX; x of (batch, heads, positions, head_dim)."""
    base = config.rope_parameters["rope_theta"]
    speeds = base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.arange(x.shape[2])[:, None] * speeds
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def logits(config, weights, ids):
    """What vLLM's forward computes: each norm adds the residual that it is given."""

    def norm(name, x, residual):
        x = x if residual is None else x + residual
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * weights[f"{name}.weight"], x

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    hidden, residual = F.embedding(ids, weights["model.embed_tokens.weight"]), None
    for number, block in enumerate(config.block_configs):
        at, queries = f"model.layers.{number}", config.num_attention_heads
        if not block.attention.no_op:
            hidden, residual = norm(f"{at}.input_layernorm", hidden, residual)
            group = block.attention.n_heads_in_group
            heads = linear(f"{at}.self_attn.qkv_proj", hidden)
            heads = heads.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            q, k, v = heads.split((queries, queries // group, queries // group), dim=1)
            k, v = (each.repeat_interleave(group, dim=1) for each in (rotated(k, config), v))
            mixed = F.scaled_dot_product_attention(rotated(q, config), k, v, is_causal=True)
            hidden = linear(f"{at}.self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
        if not block.ffn.no_op:
            assert residual is not None  # vLLM's norm would give back one value where two are read
            hidden, residual = norm(f"{at}.post_attention_layernorm", hidden, residual)
            gate, up = linear(f"{at}.mlp.gate_up_proj", hidden).chunk(2, dim=-1)
            hidden = linear(f"{at}.mlp.down_proj", F.silu(gate) * up)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(head, norm("model.norm", hidden, residual)[0])


def read(folder, monkeypatch):
    """The configuration as AutoConfig makes it by the folder's code, and the stacked weights."""
    cache = folder.parent
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(cache))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert (config.model_type, *config.architectures) == ("nemotron-nas", "DeciLMForCausalLM")
    weights = loaded(load_file(folder / "model.safetensors"))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert shapes == expected_shapes(config)
    return config, weights


def is_served(module, config, weights, ids):
    with torch.no_grad():
        expected, found = module(input_ids=ids).logits, logits(config, weights, ids)
    return torch.allclose(expected, found, atol=1e-5)


def read_alike(folder):
    """The configuration and stacked weights of a folder that any Llama or Qwen2 has."""
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures in (["LlamaForCausalLM"], ["Qwen2ForCausalLM"])
    group = config.num_attention_heads // config.num_key_value_heads
    config.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    config.attention_bias = config.model_type == "qwen2" or config.attention_bias
    block = SimpleNamespace(
        attention=SimpleNamespace(no_op=False, n_heads_in_group=group),
        ffn=SimpleNamespace(no_op=False, intermediate_size=config.intermediate_size),
    )
    config.block_configs = [block] * config.num_hidden_layers
    weights = loaded(load_file(folder / "model.safetensors"))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert shapes == expected_shapes(config)
    return config, weights
