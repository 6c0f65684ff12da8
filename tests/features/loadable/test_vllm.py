"""The folder for vLLM, read by the rules of its source."""

import json

import pytest
import torch
from vllm_reader import is_served, read, read_alike, transformers

import l0prune
from l0prune.errors import CertificateError, UsageError
from l0prune.features.loadable.vllm import write_for_vllm

TEXT = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])}


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
    assert is_served(model, config, weights, TEXT["input_ids"])
    weights["model.layers.1.self_attn.qkv_proj.weight"].mul_(1.1)
    assert not is_served(model, config, weights, TEXT["input_ids"])


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
    assert is_served(small.module, config, weights, TEXT["input_ids"])
    assert json.loads(config.to_json_string())["block_configs"][1]["attention"] == {"no_op": True}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.slow
def test_layers_alike_are_an_ordinary_folder_of_their_class(name, tmp_path):
    model = built(name)
    with pytest.warns(match="layers keep one width"):
        l0prune.gate(model, (), TEXT, loadable_by="transformers", progress=False)
    gates = l0prune.gates(model)
    for layer in range(2):
        gates.set_open(f"model.layers.{layer}.mlp.gate_proj", range(13))
    if name == "llama":
        gates.set_open("model.layers.0.self_attn.q_proj.heads", [1])
        gates.set_open("model.layers.1.self_attn.q_proj.heads", [2])
    for part in ("self_attn", "mlp"):
        gates.set_open(f"model.layers.0.{part}", [])
    small = l0prune.export(model, verify="float32", progress=False)
    assert "So does" in small.save_pretrained(tmp_path)
    config, weights = read_alike(tmp_path)
    assert (config.num_hidden_layers, config.intermediate_size) == (1, 13)
    assert is_served(small.module, config, weights, TEXT["input_ids"])
    weights["model.layers.0.self_attn.qkv_proj.weight"].mul_(1.1)
    assert not is_served(small.module, config, weights, TEXT["input_ids"])


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
