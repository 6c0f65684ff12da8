"""State that a forward returns for the next call: a cache of keys and values.

torch.export takes tensors, numbers and containers that it knows for outputs. A decoder of
transformers also returns a ``DynamicCache``, unless it is told not to. Such an object is how the
model's own code goes on, and no result of it: a captured graph does without.

What torch decides by a size, decided such that the graph is right for other sizes too.

Into how many pieces a tensor is split is a number, also where its size and that of a piece are
symbols: ``torch.cat(x.split(4, 2), 0).split(x.size(0), 0)`` makes as many as there were. torch asks
for them in a way of which its symbols do not know that. And ``torch.cdist`` multiplies matrices
where there are more than 25 points, which takes less time, and computes the same less exactly.
Recurrent layers are traced step by step (``recurrent``).

What a forward writes into its modules' attributes, which tracing would leave there.

Detectors keep the anchors of the last size that they saw, attention its last mask. Traced, such a
tensor is a fake one without values, and the next call of the user's model would find it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from l0prune.capture import recurrent
from l0prune.capture.compat import size_expression
from l0prune.capture.held_inputs import Opener, holds_objects
from l0prune.capture.inlining import write_out_transforms
from l0prune.capture.quiet import alone
from l0prune.capture.recurrent import as_torchs_own
from l0prune.capture.sizes import Inputs

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


_IF_MANY = "use_mm_for_euclid_dist_if_necessary"
_MANY = 25  # torch's own number


class AnySize(TorchFunctionMode):
    """Within the context, symbolic sizes stay symbols in these functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, or one that computes the same."""
        instead = _INSTEAD.get(func)
        if instead is None:
            return func(*args, **(kwargs or {}))
        return instead(func, *args, **(kwargs or {}))


def _split(
    func: Callable[..., Any],
    tensor: Tensor,
    split_size_or_sections: Any = None,
    dim: int = 0,
    **by: Any,
) -> Any:
    """Pieces of one size."""
    size = by.get("split_size", split_size_or_sections)
    if isinstance(size, int | SymInt) and _is_symbolic(tensor.shape[dim], size):
        number = _number(tensor.shape[dim] // size)
        if number and _is_equal(number * size, tensor.shape[dim]):
            return tensor.split([size] * number, dim)
    return func(tensor, size, dim)


def _chunk(func: Callable[..., Any], tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    """As many pieces."""
    size = tensor.shape[dim] // chunks if _is_symbolic(tensor.shape[dim]) else 0
    if _is_symbolic(size) and _is_equal(size * chunks, tensor.shape[dim]):
        return tensor.split([size] * chunks, dim)
    return func(tensor, chunks, dim)


def _cdist(
    func: Callable[..., Any],
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = _IF_MANY,
) -> Any:
    """The distances between points, of which there may be any number."""
    points = (x1.shape[-2], x2.shape[-2])
    if compute_mode == _IF_MANY and _is_symbolic(*points):
        are_many = any(not _is_symbolic(size) and size > _MANY for size in points)
        compute_mode = f"{'use' if are_many else 'donot_use'}_mm_for_euclid_dist"
    return func(x1, x2, p=p, compute_mode=compute_mode)


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.split: _split,
    Tensor.split: _split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.cdist: _cdist,
    **recurrent.INSTEAD,
}


def _is_symbolic(*sizes: Any) -> bool:
    return any(isinstance(size, SymInt) and _number(size) is None for size in sizes)


def _number(size: int | SymInt) -> int | None:
    """The number that a size is, if it is one."""
    if not isinstance(size, SymInt):
        return size
    expression = size_expression(size)
    return int(expression) if expression.is_number else None


def _is_equal(size: int | SymInt, other: int | SymInt) -> bool:
    """Are both the same for all values of their symbols?"""
    return bool(size_expression(size) == size_expression(other))


_CONTAINERS = (dict, list, set)


def exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> ExportedProgram:
    """``torch.export.export`` for any size, after which the module holds what it held before.

    The program has no transforms of torch.func, but what they amount to.

    Raises:
        CaptureError: the program would not compute what the module does.
    """
    with alone():
        with as_it_was(module), AnySize():
            program = torch.export.export(module, args, kwargs, **options)
        as_torchs_own(program)
        write_out_transforms(program)
    return program


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Afterwards every attribute of every module, and every plain container, holds the same."""
    before = [(vars(module), _held(module)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, held in before:
            for name in attributes.keys() - held.keys():
                del attributes[name]
            for name, (value, contents) in held.items():
                attributes[name] = value
                if type(value) in _CONTAINERS and _items(value) != _items(contents):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(contents)


def _held(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute's value, and of a container a copy."""
    return {
        name: (value, value.copy() if type(value) in _CONTAINERS else None)
        for name, value in vars(module).items()
    }


def _items(container: Any) -> list[Hashable]:
    """What tells two containers apart; tensors are compared by who they are."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]
