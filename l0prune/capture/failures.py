"""Why torch.export could not follow a model, in words of the user's code."""

from __future__ import annotations

import os
import re
import traceback

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_LIBRARY = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(os.path.dirname(__file__))


def explained(error: Exception, model: nn.Module) -> str:
    """Explain a torch.export failure: its cause and line of the user's source."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((_LIBRARY, _HERE, "<"))]
    where = f' at {theirs[-1].filename}:{theirs[-1].lineno}, "{theirs[-1].line}"' if theirs else ""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    known = "".join(
        f"{cause} " for cause in (_scripted(model), _packed(error), _unregistered(error)) if cause
    )
    return (
        f"{known}torch.export could not follow the model{where}: {type(error).__name__}: "
        f"{first.strip()}\n"
        "Usual causes: the example input has another shape or dtype than the model expects, or "
        "forward() branches on tensor values. Check that model(*args) runs on this example; "
        "data-dependent branches have to leave forward() or be written with torch.where."
    )


def _scripted(model: nn.Module) -> str:
    """Name the module that torch.export cannot look into; empty if there is none."""
    scripted = (n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule))
    name = next(scripted, "")
    return (
        f"{name} is compiled by TorchScript, into which torch.export cannot look: put the module "
        "in its place that it was made from."
        if name
        else ""
    )


def _packed(error: Exception) -> str:
    """Describe packed sequences at the failure; empty if there are none."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(isinstance(v, PackedSequence) for frame in frames for v in frame.f_locals.values()):
        return (
            "The forward packs sequences (pack_padded_sequence), so that the values of their "
            "lengths decide the sizes inside, which no one graph can have: let it run the "
            "recurrent layers on the padded batch."
        )
    return ""


def _unregistered(error: Exception) -> str:
    """Describe how to register the class of an output with torch; empty for other failures."""
    found = re.match(r"Found <class '(?P<name>[^']+)'> in output, which is not", str(error))
    if not found:
        return ""
    name = found["name"].rpartition(".")[2]
    return (
        f"The forward returns a {name}, which torch cannot take apart: if it is a dataclass, call "
        f"torch.export.register_dataclass({name}) once, before; or return a tuple or a dict."
    )
