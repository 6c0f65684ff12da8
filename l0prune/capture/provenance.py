"""Origin of a node in a captured graph: source line, module path and class."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.fx import Node

_LIBRARY = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(os.path.dirname(__file__))
_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")


def within(path: str, name: str) -> str:
    """Return the name in the whole model of ``name`` inside the submodule at ``path``."""
    return f"{path}.{name}" if path and name else path or name


def is_within(name: str, path: str) -> bool:
    """Return whether a module or tensor of this name is the one at ``path``, or inside it."""
    return not path or f"{name}.".startswith(f"{path}.")


def origin_of(node: Node) -> dict[str, Any]:
    """Return the entries of a node's meta about its origin, for nodes that replace it."""
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def source_of(node: Node) -> str:
    """``file.py:line`` of the user's code that made this node; empty if unknown."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith('File "')]
    for line in reversed(lines):
        path, _, rest = line.removeprefix('File "').partition('", line ')
        is_library = path.startswith(("torch/", "<", _LIBRARY, _HERE))
        if not is_library and not any(each in path for each in ("/torch/", "/onnx2pytorch/")):
            return f"{os.path.basename(path)}:{rest.split(',')[0]}"
    return ""


def modules_of(node: Node) -> list[str]:
    """Return the paths of the modules whose forwards made this node, the root first.

    Nodes of a module's further calls have ``@1`` and so on in the path.
    """
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str)]
    return [path.replace("slice(None, None, None)", "") for path in paths]


def module_of(node: Node) -> str:
    """Path of the module whose forward made this node; empty for the root or if unknown."""
    return (modules_of(node) or [""])[-1]


def without_call(path: str) -> str:
    """The path of a module without the number of its call."""
    return path.partition("@")[0]


def class_of(node: Node) -> str:
    """Class of the module whose forward made this node; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    kinds = [kind for _, kind in stack.values()]
    kind = kinds[-1] if kinds else ""
    return kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
