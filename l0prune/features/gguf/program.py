"""Cuts that llama.cpp can express, for ``gate(…, loadable_by="gguf")``."""

from __future__ import annotations

from torch import nn

from l0prune.capture.configurations import Configured, Field, configuration_of
from l0prune.capture.sizes import Inputs
from l0prune.features.gguf.network import checked
from l0prune.features.loadable.llama import llama_class, llama_settings
from l0prune.features.loadable.programs import PROGRAMS, Rules

_HEADS: Field = ("head_dim",)
_BY_LAYER: tuple[Field, ...] = (
    ("intermediate_size",),
    ("num_attention_heads",),
    ("num_key_value_heads",),
    _HEADS,
)
_ONE_SIZE = "llama.cpp has one size for the heads of all layers"


def _gguf(model: nn.Module, example: Inputs) -> Rules:
    fixed = {_HEADS: _ONE_SIZE}
    if checked(model).architecture == "qwen3":
        return Rules(Configured(type(model), configuration_of(model)), fixed=fixed)
    return Rules(Configured(llama_class(), llama_settings(model)), frozenset(_BY_LAYER), fixed)


PROGRAMS["gguf"] = _gguf
