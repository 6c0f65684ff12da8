"""The folder for vLLM, read by what its source says and by nothing of ours.

The rules are those of vLLM's ``nemotron_nas.py`` and ``llama.py``, of which a test can run none.
"""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import l0prune
from l0prune.errors import CertificateError, UsageError
from l0prune.features.loadable.vllm import write_for_vllm

transformers = pytest.importorskip("transformers")
TEXT = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])}
STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
STACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def built(name, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
    config = transformers.AutoConfig.for_model(name, **sizes | heads | settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases begin with zeros, norms with ones
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return model


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


def is_served(module, config, weights):
    with torch.no_grad():
        expected, found = module(**TEXT).logits, logits(config, weights, TEXT["input_ids"])
    return torch.allclose(expected, found, atol=1e-5)


def cut(model, path, rows):
    """Let a Linear of a model have these rows and columns."""
    layer = model.get_submodule(path)
    layer.weight = torch.nn.Parameter(layer.weight[: rows[0], : rows[1]])


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_is_what_vllm_reads(tied, tmp_path, monkeypatch):
    model = built("llama", tie_word_embeddings=tied)
    for layer, width in enumerate((7, 13)):
        at = f"model.layers.{layer}.mlp"
        cut(model, f"{at}.gate_proj", (width, 24))
        cut(model, f"{at}.up_proj", (width, 24))
        cut(model, f"{at}.down_proj", (24, width))
    said = write_for_vllm(tmp_path / "served", model, [("", ((), TEXT))])
    assert "--trust-remote-code" in said
    config, weights = read(tmp_path / "served", monkeypatch)
    assert [block.ffn.intermediate_size for block in config.block_configs] == [7, 13]
    assert is_served(model, config, weights)
    weights["model.layers.1.self_attn.qkv_proj.weight"].mul_(1.1)
    assert not is_served(model, config, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama", {}), ("qwen2", {}), ("mistral", {"sliding_window": None})],
)
def test_what_was_gated_for_it_is_served(name, settings, tmp_path, monkeypatch):
    model = built(name, **settings)
    with pytest.warns(match="but for intermediate_size, of which each has its own"):
        l0prune.gate(model, (), TEXT, loadable_by="vllm")
    gates = l0prune.gates(model)
    gates.set_open("model.embed_tokens", range(18))
    for layer in range(2):
        gates.set_open(f"model.layers.{layer}.mlp.gate_proj", range(13))
        gates.set_open(f"model.layers.{layer}.self_attn.q_proj.heads", [1])
    gates.set_open("model.layers.0.mlp", [])
    gates.set_open("model.layers.1.self_attn", [])
    small = l0prune.export(model)
    small.save_vllm(tmp_path / "served")
    config, weights = read(tmp_path / "served", monkeypatch)
    assert [block.attention.no_op for block in config.block_configs] == [False, True]
    assert [block.ffn.no_op for block in config.block_configs] == [True, False]
    assert (config.hidden_size, config.num_attention_heads) == (18, 2)
    assert config.block_configs[1].ffn.intermediate_size == 13
    assert is_served(small.module, config, weights)
    assert json.loads(config.to_json_string())["block_configs"][1]["attention"] == {"no_op": True}


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"1.self_attn.q_proj": (12, 24), "1.self_attn.o_proj": (24, 12)}, r"\[3, 6\] query heads"),
        ({"0.self_attn.v_proj": (8, 24)}, "layers.0 has 6 query heads, 3 of keys and 2 of values"),
        ({"0.self_attn.o_proj": (0, 0)}, "the first layer that is left has no attention"),
        ({"0.mlp.up_proj": (9, 24)}, "mlp.up_proj"),
    ],
)
def test_sizes_that_it_cannot_say_are_refused(sizes, why, tmp_path):
    model = built("llama")
    for path, rows in sizes.items():
        cut(model, f"model.layers.{path}", rows)
    with pytest.raises(UsageError, match=rf"{why}(.|\n)*loadable_by='vllm'"):
        write_for_vllm(tmp_path / "served", model, [])
    assert not (tmp_path / "served").exists()


def test_another_class_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Linear is no class of transformers"):
        write_for_vllm(tmp_path / "served", torch.nn.Linear(2, 2), [])


def test_a_network_that_computes_something_else_is_not_written(tmp_path):
    model = built("gemma")
    with pytest.raises(CertificateError, match="was not written for vLLM"):
        write_for_vllm(tmp_path / "served", model, [("", ((), TEXT))])
    assert not (tmp_path / "served").exists()
