"""What the outputs of a model are called: their keys or fields, else their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def leaf_names(structure: pytree.TreeSpec) -> list[str]:
    """A name for each leaf of what a model returns.

    ``logits`` of a dict or a dataclass, ``output`` of a tensor, ``output_0`` of a tuple.
    """
    leaves = [torch.tensor(number) for number in range(structure.num_leaves)]
    try:
        tree = pytree.tree_unflatten(leaves, structure)
    except Exception:  # a type that can only be made of tensors with dims, such as a cache
        tree = None
    named = {int(leaf): "_".join(path) or "output" for path, leaf in _paths(tree, ())}
    return [named.get(number, f"output_{number}") for number in range(len(leaves))]


def tensor_names(output: Any) -> list[str]:
    """A name for each tensor of an output, in the order in which outputs are compared."""
    leaves, structure = pytree.tree_flatten(output)
    names = leaf_names(structure)
    return [n for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)]


def _paths(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Each tensor in a structure with the keys that lead to it."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _paths(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        fields = getattr(tree, "_fields", [str(number) for number in range(len(tree))])
        start = path if path or hasattr(tree, "_fields") else ("output",)
        for key, value in zip(fields, tree, strict=True):
            yield from _paths(value, (*start, key))
    else:
        held = vars(tree) if hasattr(tree, "__dict__") else {}
        for key, value in held.items():
            yield from _paths(value, (*path, key))
