"""Sizes of inputs that a graph leaves free: of the batch, and others such as a text's length.

Those beside the batch are given in torch.export's own format: for each input the dims that are
free, by number, each with a name (``{"input_ids": {1: "seq"}}``), a ``Dim``, or ``Dim.AUTO``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from l0prune.capture.compat import pytree
from l0prune.errors import UsageError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_AUTO = tuple(kind for kind in (Dim.AUTO, Dim.DYNAMIC))


@dataclass(frozen=True)
class FreeSizes:
    """Dims of a model's inputs, except the batch, that may be of any size.

    Attributes:
        dims: for each tensor or other leaf of the inputs, in their order, the names of its free
            dims by number. Dims of one name are equally large.
    """

    dims: tuple[Mapping[int, str], ...] = ()

    def __bool__(self) -> bool:
        return any(self.dims)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once."""
        return tuple(dict.fromkeys(name for dims in self.dims for name in dims.values()))

    def of(self, leaf: int) -> Mapping[int, str]:
        """The free dims of the leaf with this number."""
        return self.dims[leaf] if self.dims else {}

    def sizes(self, example: Inputs) -> dict[str, int]:
        """Return the example's size at each free dim, by name."""
        leaves = pytree.tree_leaves(example)
        return {
            name: int(leaf.shape[dim])
            for leaf, dims in zip(leaves, self.dims, strict=False)
            for dim, name in dims.items()
        }

    def only(self, names: Sequence[str] | frozenset[str]) -> FreeSizes:
        """Return the free sizes of these names."""
        kept = ({dim: n for dim, n in dims.items() if n in names} for dims in self.dims)
        return FreeSizes(tuple(kept))

    def to_json(self) -> list[dict[str, str]]:
        """Return plain data; ``from_json`` reads it back."""
        return [{str(dim): name for dim, name in dims.items()} for dims in self.dims]

    @staticmethod
    def from_json(data: Sequence[Mapping[str, str]]) -> FreeSizes:
        """Inverse of ``to_json``."""
        return FreeSizes(tuple({int(dim): name for dim, name in dims.items()} for dims in data))


ALL_FIXED = FreeSizes()  # but the batch


def free_sizes(model: nn.Module, example: Inputs, dynamic_shapes: Any) -> FreeSizes:
    """Read a user's free sizes in torch.export's format: a dict by input, or a tuple.

    Raises:
        UsageError: it names an input or a dim that is not there, or the example is too small.
    """
    if dynamic_shapes is None:
        return FreeSizes()
    try:
        inputs = _by_name(model, example)
    except TypeError as error:
        raise UsageError(f"the example is none that the model's forward takes: {error}") from error
    given = dynamic_shapes
    if not isinstance(given, Mapping):
        given = dict(zip(inputs, given, strict=False))
    unknown = [name for name in given if name not in inputs]
    if unknown:
        raise UsageError(
            f"dynamic_shapes names {unknown[0]!r}, which is no input of the example; there are "
            f"{', '.join(map(str, inputs))}"
        )
    found: dict[int, dict[int, str]] = {}
    for name, value in inputs.items():
        for leaf, path in _leaves(value, given.get(name), str(name)):
            if id(leaf) not in found or found[id(leaf)] == {}:
                found[id(leaf)] = _dims(leaf, path, name)
    dims = tuple(found.get(id(leaf), {}) for leaf in pytree.tree_leaves(example))
    free = FreeSizes(dims)
    _check_example(free, example)
    return free


def named_inputs(model: nn.Module, inputs: Inputs) -> dict[str, Tensor] | None:
    """Return a model's inputs by name; None if its forward takes others, or not all are tensors."""
    try:
        found = _by_name(model, inputs)
    except TypeError:
        return None
    return found if all(isinstance(value, Tensor) for value in found.values()) else None


def _by_name(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Return each input by its name, those in ``**kwargs`` too; a TypeError for other inputs."""
    signature = inspect.signature(model.forward)
    found = signature.bind(*inputs[0], **inputs[1]).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


def _leaves(value: Any, spec: Any, name: str) -> list[tuple[Any, Any]]:
    """Return each leaf of an input with its spec; a list specifies a registered class's fields."""
    if is_registered(value):
        value = fields_of(value)
    if isinstance(value, Mapping) and (spec is None or isinstance(spec, Mapping)):
        return [p for k, v in value.items() for p in _leaves(v, (spec or {}).get(k), name)]
    if isinstance(value, list | tuple) and (spec is None or isinstance(spec, list | tuple)):
        specs = list(spec) if spec is not None else [None] * len(value)
        if len(specs) != len(value):
            raise UsageError(
                f"dynamic_shapes has {len(specs)} entries for {name!r}, which holds {len(value)}"
            )
        return [p for v, s in zip(value, specs, strict=True) for p in _leaves(v, s, name)]
    return [(value, spec)]


def _dims(leaf: Any, spec: Any, name: str) -> dict[int, str]:
    """Return the names of a tensor's free dims except the batch, by number."""
    if spec is None:
        return {}
    if not isinstance(leaf, Tensor):
        raise UsageError(f"dynamic_shapes gives dims of {name!r}, which is no tensor")
    items = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
    found: dict[int, str] = {}
    for dim, what in items:
        if not isinstance(dim, int) or not -leaf.ndim <= dim < leaf.ndim:
            raise UsageError(
                f"dynamic_shapes names dim {dim!r} of {name!r}, which has {leaf.ndim} dims"
            )
        called = _name(what, f"{name}_{dim % leaf.ndim}")
        if called and dim % leaf.ndim:  # the batch is free anyway
            found[dim % leaf.ndim] = called
    return found


def _name(what: Any, default: str) -> str:
    """Return the name of a free dim; empty for one that is not free."""
    if what is None or what is Dim.STATIC or (isinstance(what, int) and not isinstance(what, bool)):
        return ""
    if isinstance(what, str):
        return what
    if any(what is kind for kind in _AUTO):
        return default
    if isinstance(what, Dim) and type(what).__name__ == "Dim":
        return what.__name__
    raise UsageError(
        f"dynamic_shapes has {what!r} for a dim: give a name, a Dim, Dim.AUTO or None; "
        "one size that follows from another needs no name of its own"
    )


def _check_example(free: FreeSizes, example: Inputs) -> None:
    """Raise UsageError if torch.export would fix a size, or sizes of one name differ."""
    known: dict[str, int] = {}
    for leaf, dims in zip(pytree.tree_leaves(example), free.dims, strict=True):
        for dim, name in dims.items():
            size = int(leaf.shape[dim])
            if known.setdefault(name, size) != size:
                raise UsageError(
                    f"{name} is {known[name]} in one place of the example and {size} in another"
                )
            if size < 2:
                raise UsageError(
                    f"{name} is {size} in the example; to be free it has to be at least 2 there"
                )


def is_registered(value: Any) -> bool:
    """Return whether the value is of a class that a user has registered with torch's pytrees."""
    return type(value) in pytree.SUPPORTED_NODES and type(value) not in pytree.BUILTIN_TYPES


def fields_of(value: Any) -> Any:
    """Return the fields of a value of a registered class, as torch.export lists them."""
    return pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]


@dataclass(frozen=True)
class Batches:
    """Allowed sizes of a batch.

    Attributes:
        least: the smallest one.
        multiple: number of which all are multiples, such as the frames of a clip if a model takes
            frames.
    """

    least: int = 1
    multiple: int = 1

    def __contains__(self, size: int) -> bool:
        return size >= self.least and size % self.multiple == 0

    def __str__(self) -> str:
        if self.multiple == 1:
            return f"{self.least} or more"
        start = f", from {self.least}" if self.least > self.multiple else ""
        return f"multiples of {self.multiple}{start}"

    def first(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch sizes of ``groups`` steps each, as far as they are allowed."""
        return tuple(n * self.multiple for n in groups if n * self.multiple in self)

    def several(self) -> Batches:
        """Return the batches without the smallest, for which torch.export specializes."""
        return Batches(2 * self.multiple, self.multiple)

    @property
    def dim(self) -> Any:
        """Return the batches as a ``torch.export.Dim``."""
        if self.multiple == 1:
            return Dim("batch", min=self.least if self.least > 1 else None)
        return self.multiple * Dim("_batch", min=max(self.least // self.multiple, 1))


ANY = Batches()


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Size of dim 0 of the first tensor input; 0 where there is none."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return 0


def widened(
    args: tuple[Any, ...], kwargs: dict[str, Any], batches: Batches = ANY
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs, doubled if the batch is the smallest: torch.export fixes a size of 1."""
    size = batch_of(args, kwargs)
    if size != batches.multiple:
        return args, kwargs

    def twice(leaf: Any) -> Any:
        is_batched = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size
        return torch.cat([leaf, leaf]) if is_batched else leaf

    wide_args, wide_kwargs = pytree.tree_map(twice, (args, kwargs))
    return wide_args, wide_kwargs


def batch_shapes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batches: Batches | None = ANY,
    free: FreeSizes = ALL_FIXED,
) -> Any:
    """Return ``dynamic_shapes`` for torch.export, with one symbolic batch for all batched inputs.

    torch.export infers the relations between the ``free`` sizes.
    """
    size, batch = batch_of(args, kwargs), {0: batches.dim} if batches else {}

    numbers = count()

    def shape(leaf: Any) -> Any:
        number = next(numbers)
        if not isinstance(leaf, Tensor):
            return None
        dims: dict[int, Any] = dict.fromkeys(free.of(number), Dim.AUTO)
        return dims | (batch if leaf.ndim and leaf.shape[0] == size else {})

    return shapes_in((args, kwargs), model, shape)


def shapes_in(example: Inputs, model: nn.Module, shape: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the ``dynamic_shapes`` of torch.export that have ``shape(leaf)`` for each leaf.

    An object of a class that is registered with torch becomes a list of its fields.
    """

    def of(value: Any) -> Any:
        return mapped(fields_of(value)) if is_registered(value) else shape(value)

    def mapped(value: Any) -> Any:
        return pytree.tree_map(of, value, is_leaf=is_registered)

    args, kwargs = (mapped(each) for each in example)
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments
