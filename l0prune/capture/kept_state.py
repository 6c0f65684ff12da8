"""State that a forward returns for the next call: a cache of keys and values.

torch.export takes tensors, numbers and containers that it knows for outputs. A decoder of
transformers also returns a ``DynamicCache``, unless it is told not to. Such an object is how the
model's own code goes on, and no result of it: a captured graph does without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_DATA = (Tensor, bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)


@contextmanager
def without_state(model: nn.Module) -> Iterator[None]:
    """Within the context the model returns None for objects that are no data, beside tensors."""
    held, forward = vars(model), model.forward
    before = held.get("forward")

    @functools.wraps(forward)
    def results(*args: Any, **kwargs: Any) -> Any:
        return _without(forward(*args, **kwargs))

    held["forward"] = results
    try:
        yield
    finally:
        if before is None:
            del held["forward"]
        else:
            held["forward"] = before


def _without(output: Any) -> Any:
    leaves = pytree.tree_leaves(output)
    if not any(map(_is_state, leaves)) or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return output
    return pytree.tree_map(lambda leaf: None if _is_state(leaf) else leaf, output)


def _is_state(leaf: Any) -> bool:
    """Not a dataclass, either: somebody wrote that to return results in."""
    return leaf is not None and not isinstance(leaf, _DATA) and not is_dataclass(leaf)
