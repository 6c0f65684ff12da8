"""torch.export of a module, whose attributes it leaves alone and whose outputs are tensors alone.

torch.export takes tensors, numbers and containers that it knows for outputs. A decoder of
transformers also returns a ``DynamicCache``, unless it is told not to. Such an object is how the
model's own code goes on, and no result of it: a captured graph does without. What a forward writes
into its modules' attributes (the anchors of the last size, the last mask) is a fake tensor without
values while it is traced, and must not be there when the user calls the model next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from l0prune.capture.compat import STACK_OF_A_NODE, CallStack, pytree, replaced
from l0prune.capture.example_inputs import Opener, holds_objects
from l0prune.capture.inlining import inline_transforms
from l0prune.capture.masked_writes import fill_by_mask
from l0prune.capture.sizes import Inputs
from l0prune.capture.symbolic_patches import SymbolicPatches, restore_recurrent_calls
from l0prune.capture.threads import one_at_a_time

_DATA = (Tensor, bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)


@contextmanager
def tensor_outputs_only(model: nn.Module, example: Inputs) -> Iterator[Opener]:
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


_CONTAINERS = (dict, list, set)


def exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> ExportedProgram:
    """``torch.export.export`` for any size, after which the module holds what it held before.

    The program has no transforms of torch.func, but what they amount to. Its arguments are called
    as those of the module that this one ``stands_for``, if it does.

    Raises:
        CaptureError: the program would not compute what the module does.
    """
    with one_at_a_time():
        stacks = replaced(*STACK_OF_A_NODE, CallStack)
        with restore_attributes(module), stacks, SymbolicPatches():
            program = torch.export.export(module, args, kwargs, **options)
        _name_arguments(program, module, args, kwargs)
        restore_recurrent_calls(program)
        fill_by_mask(program)
        inline_transforms(program)
    return program


def _name_arguments(
    program: ExportedProgram, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call the arguments of a module around another one, ``*args``, as that one does."""
    inner = module
    while isinstance(around := getattr(inner, "stands_for", None), nn.Module):
        inner = around
    called = program.module_call_graph[0].signature
    if inner is module or called is None:
        return
    known = signature(inner.forward).parameters.values()
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in known if each.kind in kinds][: len(args)]
    if len(names) == len(args):
        called.forward_arg_names = [*names, *kwargs]


@contextmanager
def restore_attributes(model: nn.Module) -> Iterator[None]:
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
    """Contents of a container, in which a tensor stands for its identity."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]
