"""State that a forward returns for the next call: a cache of keys and values.

torch.export takes tensors, numbers and containers that it knows for outputs. A decoder of
transformers also returns a ``DynamicCache``, unless it is told not to. Such an object is how the
model's own code goes on, and no result of it: a captured graph does without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from l0prune.capture.free_sizes import Inputs
from l0prune.capture.held_inputs import Opener, holds_objects

_DATA = (Tensor, bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)


@contextmanager
def without_state(model: nn.Module, example: Inputs) -> Iterator[Opener]:
    """Within the context the model returns None for objects that are no data, beside tensors.

    And for objects in its inputs it takes their tensors, as of ``plain`` of the example.
    """
    held, forward, opener = vars(model), model.forward, Opener(example)
    opens = holds_objects(example) and not isinstance(model, GraphModule)
    before = held.get("forward")

    @functools.wraps(forward)
    def results(*args: Any, **kwargs: Any) -> Any:
        if not opens:
            return _without(forward(*args, **kwargs))
        own_args, own_kwargs = opener.open(args, kwargs)
        output = forward(*own_args, **own_kwargs)
        opener.look(args, kwargs)
        return _without(output)

    results.__signature__ = _with_names(forward, example[1])  # type: ignore[attr-defined]
    held["forward"] = results
    try:
        yield opener
    finally:
        if before is None:
            del held["forward"]
        else:
            held["forward"] = before


def _with_names(forward: Callable[..., Any], given: Iterable[str]) -> Signature:
    """Return a forward's signature with a parameter for each input that is given by name.

    torch's guards do not find a list that a forward takes by its ``**kwargs``.
    """
    found = signature(forward).parameters
    named = [p for p in found.values() if p.kind is not Parameter.VAR_KEYWORD]
    if len(named) < len(found):
        named += [Parameter(n, Parameter.KEYWORD_ONLY) for n in given if n not in found]
    return Signature(named)


def _without(output: Any) -> Any:
    leaves = pytree.tree_leaves(output)
    if not any(map(_is_state, leaves)) or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return output
    return pytree.tree_map(lambda leaf: None if _is_state(leaf) else leaf, output)


def _is_state(leaf: Any) -> bool:
    """Not a dataclass, either: somebody wrote that to return results in."""
    return leaf is not None and not isinstance(leaf, _DATA) and not is_dataclass(leaf)
