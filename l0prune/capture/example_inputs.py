"""Copies of example inputs, and records of submodules' calls on them.

A forward may write into its inputs: a cache of keys and values grows with every call. An input
that is neither a tensor nor a container that torch knows is stored as a ``Held``: its tensors, and
the object without them, of which each call gets a new copy with the tensors.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from l0prune.capture.compat import pytree
from l0prune.capture.model_checks import evaluating, same_draws
from l0prune.capture.sizes import Inputs, batch_of
from l0prune.capture.undisturbed import code_undisturbed
from l0prune.errors import UsageError, first_line

# Types of values that no call can change.
_DATA = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, eq=False)
class _Shell:
    """Object whose tensors are replaced by the empty tensors ``places``."""

    value: Any
    places: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Held:
    """Object split into its tensors and the rest; a pytree node whose leaves are the tensors."""

    shell: _Shell
    tensors: tuple[Any, ...]

    def opened(self) -> Any:
        """Return a new object with these tensors."""
        pairs = zip(self.shell.places, self.tensors, strict=True)
        return copy.deepcopy(self.shell.value, {id(place): tensor for place, tensor in pairs})


pytree.register_pytree_node(
    Held,
    lambda held: (list(held.tensors), held.shell),
    lambda tensors, shell: Held(shell, tuple(tensors)),
)


class _Noted(TorchFunctionMode):
    """Mode in which deep copies share the original's tensors, and these are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        self.tensors.append(args[0])
        return self.instead(args[0])

    def instead(self, tensor: Tensor) -> Tensor:
        """Return the replacement of a tensor in the copy."""
        return tensor


class _Emptied(_Noted):
    """Mode in which deep copies get empty tensors, and the original's are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Tensor] = []

    def instead(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor."""
        self.places.append(torch.empty(0))
        return self.places[-1]


def keep(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """Return copies of example inputs, with plain tensors instead of tensor subclasses.

    Raises:
        UsageError: an input cannot be copied, or with plain tensors the model computes something
            else than with those of a subclass.
    """
    names = _names(model, args, kwargs)
    values = [
        _kept(value, name) for value, name in zip((*args, *kwargs.values()), names, strict=True)
    ]
    kept = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
    for value, name in zip((*args, *kwargs.values()), names, strict=True):
        kind = next((type(leaf) for leaf in pytree.tree_leaves(value) if _is_special(leaf)), None)
        if kind is not None and not _is_plain(model, (args, dict(kwargs)), kept):
            raise UsageError(
                f"The example input {name} is a {kind.__name__}. With a plain torch.Tensor in its "
                "place the model does not compute the same, and programs and files take no other. "
                "Give a torch.Tensor, and let the model make of it what it needs."
            )
    return kept


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the inputs' parameter names in the model's forward, or else their positions."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_place = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    by_place += [str(number) for number in range(len(by_place), len(args))]
    return [*by_place[: len(args)], *kwargs]


def _kept(value: Any, name: str) -> Any:
    """Return a copy of an input."""

    def keep_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return (leaf.as_subclass(Tensor) if _is_special(leaf) else leaf).detach().clone()
        if isinstance(leaf, _DATA) or callable(leaf):
            return leaf
        with _Emptied() as emptied:
            shell = copy.deepcopy(leaf)
        copies = (tensor.detach().clone() for tensor in emptied.tensors)
        return Held(_Shell(shell, tuple(emptied.places)), tuple(copies))

    try:
        return pytree.tree_map(keep_leaf, value)
    except Exception as error:
        raise UsageError(
            f"The example input {name} (a {type(value).__name__}) cannot be copied, and a model "
            f"may change what it is given, so that each call needs a copy of its own: "
            f"{first_line(error)}. Give tensors, or an object that copy.deepcopy takes."
        ) from error


def _is_special(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and type(leaf) not in (Tensor, nn.Parameter)


def _is_plain(model: nn.Module, given: Inputs, kept: Inputs) -> bool:
    """Return whether the model computes the same on the given inputs and on their copies."""
    if any(tensor.is_meta for tensor in model.parameters()):
        return True
    args, kwargs = given
    with evaluating(model):
        with same_draws(model, seed=0):
            expected = model(*args, **kwargs)
        with same_draws(model, seed=0):
            found = call(model, kept)
    pairs = [tensors_in(output) for output in (expected, found)]
    return len(pairs[0]) == len(pairs[1]) and all(
        torch.equal(a.as_subclass(Tensor).nan_to_num(), b.as_subclass(Tensor).nan_to_num())
        for a, b in zip(*pairs, strict=True)
    )


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call a model with copies of the objects in its inputs; a captured graph with their tensors.

    Other tensors are passed without a copy. The code of the model's classes keeps nothing of it: a
    table in another dtype, or of the smaller sizes, is none for the model's next call.
    """
    args, kwargs = plain(inputs) if isinstance(model, GraphModule) else opened(inputs)
    with code_undisturbed(model):
        return model(*args, **kwargs)


def plain(inputs: Inputs) -> Inputs:
    """Replace each object in the inputs by the list of its tensors, as programs take them."""
    return _mapped(inputs, lambda held: list(held.tensors))


def opened(inputs: Inputs) -> Inputs:
    """Replace each ``Held`` in the inputs by a new copy of its object, as the model takes them."""
    return _mapped(inputs, Held.opened)


def _mapped(inputs: Inputs, change: Callable[[Held], Any]) -> Inputs:
    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Held) else leaf

    args, kwargs = pytree.tree_map(changed, inputs, is_leaf=lambda each: isinstance(each, Held))
    return args, kwargs


def holds_objects(inputs: Inputs) -> bool:
    """Return whether any input is an object, which the model may change."""
    leaves = pytree.tree_leaves(inputs, is_leaf=lambda each: isinstance(each, Held))
    return any(isinstance(leaf, Held) for leaf in leaves)


class Opener:
    """Converter of ``plain`` inputs to the model's inputs, which records written objects.

    Attributes:
        written: indices of the input leaves that are tensors of objects whose tensors the forward
            has replaced, as in a cache. Other objects are data, such as a dataclass of images.
    """

    def __init__(self, example: Inputs) -> None:
        self._names = [*example[1]]
        self._structure = pytree.tree_structure(example)
        self._opened: list[tuple[Any, list[Any]]] = []
        self.written: set[int] = set()

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the model's inputs."""
        leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in self._names}))
        self._opened = []

        def opened(held: Held) -> Any:
            self._opened.append((held.opened(), list(held.tensors)))
            return self._opened[-1][0]

        return _mapped(pytree.tree_unflatten(leaves, self._structure), opened)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record after a forward which objects of these inputs hold other tensors than before."""
        leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in self._names}))
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        for value, before in self._opened:
            with _Noted() as noted:
                copy.deepcopy(value)
            if {*map(id, noted.tensors)} != {*map(id, before)}:
                self.written |= {numbers[id(tensor)] for tensor in before}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in inputs, an output, or any other tree."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def examples_in(inputs: Inputs) -> int:
    """Size of dim 0 of the first tensor that has one; 1 where none has."""
    return batch_of(*inputs) or 1


def examples_given(example: Inputs) -> int:
    """Return the number of examples in a model's inputs; detectors take a list of images."""
    images = _first_list(example)
    return examples_in(example) if images is None else max(len(images), 1)


def first_of(example: Inputs) -> Inputs:
    """Return the first example of a model's inputs, as a batch of one."""
    images = _first_list(example)
    if images is None:
        return first_rows(example)

    def first(value: Any) -> Any:
        is_alike = isinstance(value, list | tuple) and len(value) == len(images)
        return value[:1] if is_alike else value

    args, kwargs = example
    return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}


def first_rows(example: Inputs, number: int = 1) -> Inputs:
    """Return the inputs with the first rows of every tensor that has one row per example."""
    size = examples_in(example)

    def first(leaf: Tensor) -> Tensor:
        return leaf[:number] if leaf.ndim and leaf.shape[0] == size else leaf

    args, kwargs = pytree.tree_map_only(Tensor, first, example)
    return args, kwargs


def _first_list(example: Inputs) -> Sequence[Tensor] | None:
    """Return the first input if it is a list of tensors."""
    args, kwargs = example
    first = next(iter((*args, *kwargs.values())), None)
    is_list = isinstance(first, list | tuple) and all(isinstance(each, Tensor) for each in first)
    return first if is_list else None


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Attributes:
        path: of the submodule; empty for the model itself.
        inputs: what it received, copied before it could write into it.
        output: what it returned.
    """

    path: str
    inputs: Inputs
    output: Any


def record(model: nn.Module, paths: Iterable[str], inputs: Inputs) -> list[Call]:
    """Return all calls of the submodules at ``paths`` in an eval-mode run, in order of return."""
    calls: list[Call] = []
    waiting: dict[str, list[Inputs]] = defaultdict(list)
    handles = []
    for path in paths:

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            waiting[path].append(_copied((args, kwargs)))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            calls.append(Call(path, waiting[path].pop(), _copied(output)))

        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with evaluating(model), same_draws(model):
            call(model, _copied(inputs))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def filled(inputs: Inputs, rows: int = 2) -> Inputs:
    """Fill tensors without rows with random ones: those of a detector that found nothing."""
    generator = torch.Generator().manual_seed(0)

    def fill(leaf: Tensor) -> Tensor:
        if not leaf.ndim or leaf.shape[0]:
            return leaf
        return torch.randn(rows, *leaf.shape[1:], generator=generator).to(leaf)

    args, kwargs = pytree.tree_map_only(Tensor, fill, inputs)
    return args, kwargs


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)
