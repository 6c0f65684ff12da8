"""Tensors in a model's outputs by name, and those that a user names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from l0prune.capture.compat import pytree
from l0prune.errors import UsageError
from l0prune.plan.globs import listed


def leaf_names(structure: pytree.TreeSpec) -> list[str]:
    """Return a name for each leaf of a model's output.

    ``logits`` of a dict or a dataclass, ``output`` of a tensor, ``output_0`` of a tuple.
    """
    leaves = [torch.tensor(number) for number in range(structure.num_leaves)]
    try:
        tree = pytree.tree_unflatten(leaves, structure)
    except Exception:  # a type that needs tensors with dims, such as a cache
        tree = None
    named = {int(leaf): "_".join(path) or "output" for path, leaf in _paths(tree, ())}
    return [named.get(number, f"output_{number}") for number in range(len(leaves))]


def named_tensors(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Return name and tensor of each tensor of an output, in the order of comparison."""
    leaves, structure = pytree.tree_flatten(output)
    named = zip(leaf_names(structure), leaves, strict=True)
    return [(name, leaf) for name, leaf in named if isinstance(leaf, torch.Tensor)]


def tensor_names(output: Any) -> list[str]:
    """Return a name for each tensor of an output, in the order of comparison."""
    return [name for name, _ in named_tensors(output)]


def chosen_outputs(output: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """Return the tensors of an output that are named: by name, by its first part, or a glob.

    Raises:
        UsageError: a name is none of them.
    """
    found = named_tensors(output)
    for name in names:
        if not any(_is_named(each, name) for each, _ in found):
            known = listed([each for each, _ in found])
            raise UsageError(f"outputs={name!r} is no output of this model; there are {known}")
    return [tensor for each, tensor in found if any(_is_named(each, name) for name in names)]


def _is_named(output: str, name: str) -> bool:
    return fnmatchcase(output, name) or output.startswith(f"{name}_")


def _paths(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the path of keys and the tensor for each tensor in a structure."""
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
