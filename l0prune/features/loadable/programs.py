"""Programs that load cuts by themselves, by name, and what each of them can say of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from l0prune.capture.configurations import Configured, Field, configuration_of
from l0prune.capture.sizes import Inputs
from l0prune.doors import Registry
from l0prune.errors import UsageError
from l0prune.features.loadable.llama import llama_class, llama_settings, why_no_llama


@dataclass(frozen=True)
class Rules:
    """Sizes of a model that a program can say.

    Attributes:
        configured: the class that it builds, by its configuration of the model.
        by_layer: numbers that may differ by layer; if there are any, branches may go one by one.
        fixed: why numbers stay as they are.
        keeps_first: whether the first branch stays where branches may go one by one.
    """

    configured: Configured
    by_layer: frozenset[Field] = frozenset()
    fixed: Mapping[Field, str] = field(default_factory=dict)
    keeps_first: bool = False


PROGRAMS: Registry[Callable[[nn.Module, Inputs], Rules]] = Registry("program", "programs")
"""Functions of a model and its example inputs, which raise UsageError where none can be loaded."""


def _transformers(model: nn.Module, example: Inputs) -> Rules:
    return Rules(Configured(type(model), configuration_of(model)))


def _vllm(model: nn.Module, example: Inputs) -> Rules:
    if why := why_no_llama(model, example):
        raise UsageError(
            f"vLLM's class for layers that differ, DeciLMForCausalLM, computes what a Llama does: "
            f"{why}. With loadable_by='transformers' layers stay alike, and vLLM loads the result "
            "if it has a class for this model"
        )
    configured = Configured(llama_class(), llama_settings(model))
    return Rules(configured, frozenset({("intermediate_size",)}), keeps_first=True)


PROGRAMS["transformers"], PROGRAMS["vllm"] = _transformers, _vllm
