"""Detection of transformers models that compute the same as a Llama, of any class."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.configurations import configuration_of, configured
from l0prune.capture.example_inputs import call
from l0prune.capture.model_checks import evaluating
from l0prune.capture.sizes import Inputs

_NOT_SAID = ("_name_or_path", "architectures", "model_type", "transformers_version")
_ROUNDING = 1e-4  # relative to the largest output; other functions differ by far more


def llama_class() -> Any:
    """Return transformers' Llama with a head for the next token."""
    return importlib.import_module("transformers").LlamaForCausalLM


def llama_settings(model: Any) -> dict[str, Any]:
    """Return the settings of a LlamaConfig for a model, with the sizes of its configuration.

    ``qkv_bias`` is added if only q, k and v have a bias in the attention, which a LlamaConfig
    cannot express: its ``attention_bias`` is for all four.
    """
    data, names = configuration_of(model), model.state_dict().keys()
    known = llama_class().config_class().to_dict().keys() - set(_NOT_SAID)
    found = {name: data[name] for name in sorted(known) if name in data}
    found["head_dim"] = data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"]
    found["attention_bias"] = any(name.endswith("q_proj.bias") for name in names)
    if found["attention_bias"] and not any(name.endswith("o_proj.bias") for name in names):
        found["qkv_bias"] = True
    return found


def as_llama(settings: dict[str, Any]) -> Any:
    """Build the Llama of these settings, with arbitrary weights."""
    biased = settings["attention_bias"] or settings.get("qkv_bias", False)
    model = configured(llama_class(), {**settings, "attention_bias": biased})
    if settings.get("qkv_bias"):
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn.o_proj.register_parameter("bias", None)
    return model


def why_no_llama(model: Any, example: Inputs) -> str:
    """Return the reason why a model is no Llama with its weights; empty if it is one."""
    if window := configuration_of(model).get("sliding_window"):
        return f"its attention sees {window} tokens only (sliding_window)"
    try:
        llama = as_llama(llama_settings(model))
        told = llama.load_state_dict(model.state_dict(), strict=False, assign=True)
    except (KeyError, RuntimeError, ValueError) as error:
        return f"its configuration or weights are not those of a Llama ({error})"
    if odd := [*told.unexpected_keys, *told.missing_keys]:
        return f"its weights are not those of a Llama ({odd[0]})"
    expected, found = (_first_output(each, example) for each in (model, llama))
    if expected.is_meta:
        return ""
    scale = expected.abs().max()
    is_same = torch.allclose(expected, found, rtol=0, atol=_ROUNDING * float(scale))
    return "" if is_same else "its forward computes something else with these weights"


def _first_output(model: nn.Module, example: Inputs) -> Tensor:
    with evaluating(model):
        leaves = pytree.tree_leaves(call(model, example))
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor))
