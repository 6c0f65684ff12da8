"""What a model has to be for l0prune to look into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export.unflatten import InterpreterModule, UnflattenedModule
from torch.fx import GraphModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from l0prune.errors import UsageError


def check_module(model: Any) -> None:
    """Raise UsageError for what is no module, or one whose insides nobody can change.

    Says what to give instead.
    """
    why = _objection(model)
    if why:
        raise UsageError(f"l0prune takes an nn.Module as you wrote it. {why}")


def _objection(model: Any) -> str:
    if not isinstance(model, nn.Module):
        return (
            f"This is a {type(model).__name__}; l0prune.load_model(...) builds a module from a "
            "file or a name."
        )
    if isinstance(model, torch.jit.ScriptModule):
        return "This one is compiled by TorchScript: give the module that it was made from."
    if isinstance(model, torch._dynamo.OptimizedModule):
        return "This one is compiled: gate the module itself, and give torch.compile the gated one."
    if isinstance(model, GraphModule) and "eval" in vars(model):
        return (
            "This is the graph of an ExportedProgram, which has no modes for training and testing: "
            "give the module that was exported."
        )
    if any(isinstance(each, InterpreterModule | UnflattenedModule) for each in model.modules()):
        return (
            "In this one there is what torch.export.unflatten made, which cannot be copied: give "
            "the module that was exported."
        )
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(t, UninitializedParameter | UninitializedBuffer) for t in tensors):
        return "This one has lazy layers without sizes yet: call it once on an example first."
    return ""
