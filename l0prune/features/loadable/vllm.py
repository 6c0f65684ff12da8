"""Folder that vLLM serves: a Llama with layers of different sizes, as a ``DeciLMForCausalLM``.

The rules are from vLLM's source, ``vllm/model_executor/models/nemotron_nas.py`` at commit 00bd1493
of 2026, since vLLM is not installed here: query heads, their size and the hidden size are equal in
all layers; ``block_configs`` says by layer how many queries share a key
(``attention.n_heads_in_group``), the MLP's width (``ffn.intermediate_size``), and which of the two
is absent (``no_op``). A layer without attention reads a residual that an earlier attention began.
An absent part has no norm and no weights; all others are named as in a Llama, each tied tensor
once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.configurations import class_of_transformers, configuration_of
from l0prune.errors import CertificateError, UsageError, in_a_line
from l0prune.exporting.own_class.origin import Trials, fault_of
from l0prune.exporting.own_class.writing import CONFIG
from l0prune.features.loadable.llama import as_llama, llama_settings
from l0prune.files.atomic import PathLike, replaced_folder
from l0prune.files.beside_weights import bring_along
from l0prune.files.manifest import GENERATION
from l0prune.files.smaller_model import WEIGHTS
from l0prune.files.tensor_file import each_once, write_tensors

CODE = "configuration_l0prune.py"
_ATTENTION, _MLP = ("self_attn.", "input_layernorm."), ("mlp.", "post_attention_layernorm.")
_CONFIGURATION = '''"""A LlamaConfig with blocks that differ, whose settings are attributes."""

from transformers import LlamaConfig


class Block(dict):
    def __getattr__(self, name):
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Block(value) if isinstance(value, dict) else value


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **kwargs):
        super().__init__(**kwargs)
        self.block_configs = [Block(each) for each in block_configs]
'''


def write_for_vllm(folder: PathLike, module: nn.Module, trials: Trials) -> str:
    """Write a folder that vLLM serves; return a sentence on how to serve it.

    Before anything is written, the network that vLLM would build, in transformers' layers, is
    compared with the module on ``trials``.

    Raises:
        UsageError: vLLM's configuration cannot express the network; the message says why.
        CertificateError: vLLM's network would compute something else.
        FileError: a file cannot be written.
    """
    if not class_of_transformers(type(module)):
        raise UsageError(_refusal(f"{type(module).__qualname__} is no class of transformers"))
    try:
        tensors, config = _content(module)
    except (KeyError, ValueError) as error:
        raise UsageError(_refusal(in_a_line(error).strip("'"))) from error
    absent = tuple(_absent(config, configuration_of(module)["num_hidden_layers"]))
    fault = fault_of(
        _served(config, tensors), module, trials, lambda n: "" if n.startswith(absent) else n
    )
    if fault:
        raise CertificateError(f"{folder} was not written for vLLM: {fault}")
    settings = getattr(module, "generation_config", None)
    with replaced_folder(folder, CONFIG, {WEIGHTS, CODE, GENERATION}) as scratch:
        write_tensors(scratch / WEIGHTS, tensors, {"format": "pt"})
        (scratch / CODE).write_text(_CONFIGURATION, encoding="utf-8")
        if settings is not None:
            (scratch / GENERATION).write_text(settings.to_json_string(), encoding="utf-8")
        (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        beside = bring_along(module, scratch)
    put_tokenizer = f"Put the tokenizer's files into {folder}."
    return (
        f"`vllm serve {folder} --trust-remote-code` is meant to serve it (not tried: vLLM is not "
        f"installed here). {beside or put_tokenizer}"
    )


def _refusal(why: str) -> str:
    return (
        f"vLLM's class for layers that differ cannot say this network: {why}. Gate the model "
        "with loadable_by='vllm' to cut only what it can"
    )


def _content(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and configuration; ValueError if the configuration cannot express them."""
    state = {name: tensor for name, tensor in module.state_dict().items() if tensor.numel()}
    settings = llama_settings(module)
    blocks = [*_blocks(state, settings["head_dim"])]
    present = [block for block in blocks if not block["attention"]["no_op"]]
    queries = {block["attention"].pop("queries") for block in present}
    if len(queries) != 1:
        raise ValueError(f"its layers have {sorted(queries) or 'no'} query heads")
    first = next(block for block in blocks if not all(part["no_op"] for part in block.values()))
    if first is not present[0]:
        raise ValueError("the first layer that is left has no attention")
    rounding = {
        value
        for path, norm in module.named_modules()
        for name, value in vars(norm).items()
        if "eps" in name and type(value) is float and f"{path}.weight" in state
    }
    if len(rounding) > 1:
        raise ValueError(f"its norms have {len(rounding)} different ε")
    for block in present:
        block["attention"]["n_heads_in_group"] = max(queries) // block["attention"].pop("keys")
    vocabulary, hidden = state["model.embed_tokens.weight"].shape
    tensors, _ = each_once(state)
    kind = "DeciLMForCausalLM"
    return tensors, {
        **settings,
        "architectures": [kind],
        "attention_bias": settings["attention_bias"] and not settings.get("qkv_bias"),
        "auto_map": {"AutoConfig": f"{CODE.removesuffix('.py')}.DeciLMConfig"},
        "block_configs": blocks,
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        "hidden_size": hidden,
        "intermediate_size": max(block["ffn"].get("intermediate_size", 1) for block in blocks),
        "model_type": "nemotron-nas",
        "num_attention_heads": max(queries),
        "num_hidden_layers": len(blocks),
        "num_key_value_heads": max(queries) // present[0]["attention"]["n_heads_in_group"],
        "rms_norm_eps": rounding.pop(),
        "vocab_size": vocabulary,
    }


def _blocks(state: Mapping[str, Tensor], head_dim: int) -> Iterator[dict[str, dict[str, Any]]]:
    numbers = [int(m[1]) for name in state if (m := re.match(r"model\.layers\.(\d+)\.", name))]
    for number in range(max(numbers) + 1):
        at = f"model.layers.{number}"
        attention: dict[str, Any] = {"no_op": f"{at}.self_attn.o_proj.weight" not in state}
        if not attention["no_op"]:
            weights = (state[f"{at}.self_attn.{name}_proj.weight"] for name in "qkv")
            queries, keys, values = (len(weight) / head_dim for weight in weights)
            if not keys == values == int(keys) or queries % keys:
                raise ValueError(
                    f"{at} has {queries:g} query heads, {keys:g} of keys and {values:g} of values "
                    f"by heads of {head_dim}"
                )
            attention |= {"queries": int(queries), "keys": int(keys)}
        mlp: dict[str, Any] = {"no_op": f"{at}.mlp.down_proj.weight" not in state}
        if not mlp["no_op"]:
            mlp["intermediate_size"] = state[f"{at}.mlp.down_proj.weight"].shape[1]
        yield {"attention": attention, "ffn": mlp}


def _absent(config: Mapping[str, Any], layers: int) -> Iterator[str]:
    """Yield the name prefixes of absent parts; the module has so many ``layers``."""
    yield from (f"model.layers.{number}." for number in range(len(config["block_configs"]), layers))
    for number, block in enumerate(config["block_configs"]):
        for part, inside in (("attention", _ATTENTION), ("ffn", _MLP)):
            if block[part]["no_op"]:
                yield from (f"model.layers.{number}.{name}" for name in inside)


class _Nothing(nn.Module):
    """Absent attention or MLP: returns zeros, an attention None as its weights, too."""

    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        self._is_attention = is_attention

    def forward(self, hidden_states: Tensor, **_: object) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self._is_attention else zeros


def _served(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the network that vLLM would build from a folder, in transformers' layers."""
    settings = {n: v for n, v in config.items() if n not in ("auto_map", "block_configs")}
    with torch.device("meta"):
        model = as_llama({**settings, "model_type": "llama"})
        for number, block in enumerate(config["block_configs"]):
            attention, mlp = block["attention"], block["ffn"]
            own = dict(settings, num_hidden_layers=1, model_type="llama")
            own["intermediate_size"] = mlp.get("intermediate_size", 1)
            own["num_key_value_heads"] = own["num_attention_heads"] // attention.get(
                "n_heads_in_group", 1
            )
            layer = as_llama(own).model.layers[0]
            layer.self_attn.layer_idx = number
            if attention["no_op"]:
                layer.self_attn, layer.input_layernorm = _Nothing(True), nn.Identity()
            if mlp["no_op"]:
                layer.mlp, layer.post_attention_layernorm = _Nothing(False), nn.Identity()
            model.model.layers[number] = layer
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    try:
        told = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:  # torch's, which lists the sizes
        raise UsageError(_refusal(str(error).splitlines()[-1].strip())) from error
    model.tie_weights()
    left = [name for name in told.missing_keys if model.get_parameter(name).is_meta]
    if odd := [*told.unexpected_keys, *left]:
        raise UsageError(_refusal(f"{odd[0]} is no weight of a Llama, or is missing"))
    found: nn.Module = model.eval()
    return found
