"""torch.export of a module, without outputs that are no data.

torch.export accepts tensors, numbers and known containers as outputs. A decoder of transformers
also returns a ``DynamicCache`` by default. Such an object is state for the model's next call and no
result: a captured graph omits it.
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
from torch.export import ExportedProgram
from torch.fx import GraphModule

from l0prune.capture.caches import without_cached_tensors
from l0prune.capture.compat import STACK_OF_A_NODE, CallStack, pytree, replaced
from l0prune.capture.example_inputs import Opener, holds_objects
from l0prune.capture.inlining import inline_transforms
from l0prune.capture.masked_writes import fill_by_mask
from l0prune.capture.raw_reads import mark_raw_reads, take_out_marks
from l0prune.capture.sizes import Inputs
from l0prune.capture.symbolic_patches import SymbolicPatches, restore_recurrent_calls
from l0prune.capture.threads import one_at_a_time
from l0prune.capture.undisturbed import undisturbed

_DATA = (Tensor, bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)


@contextmanager
def tensor_outputs_only(model: nn.Module, example: Inputs) -> Iterator[Opener]:
    """Make the model return None for objects that are no data, and take ``plain`` inputs.

    Outputs are only replaced beside tensors; inputs have the structure of the example's ``plain``.
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
    """Return whether an output is state and no data; a dataclass holds results."""
    return leaf is not None and not isinstance(leaf, _DATA) and not is_dataclass(leaf)


def exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> ExportedProgram:
    """Run ``torch.export.export`` with ``SymbolicPatches``, leaving the module undisturbed.

    Transforms of torch.func are replaced by equivalent operators. The program's arguments are
    named as those of the module that this one ``stands_for``, if any.

    Raises:
        CaptureError: the program would not compute what the module does.
    """
    with one_at_a_time():
        stacks = replaced(*STACK_OF_A_NODE, CallStack)
        marks, caches = mark_raw_reads(module), without_cached_tensors(module)
        with undisturbed(module), stacks, marks, caches, SymbolicPatches():
            program = torch.export.export(module, args, kwargs, **options)
        take_out_marks(program)
        _name_arguments(program, module, args, kwargs)
        restore_recurrent_calls(program)
        fill_by_mask(program)
        inline_transforms(program)
    return program


def _name_arguments(
    program: ExportedProgram, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Name the arguments of a wrapper, ``*args``, as those of the module that it wraps."""
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
