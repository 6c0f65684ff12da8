"""Template of an ONNX file at any widths, found by comparing files of several widths.

The files have the same nodes; every number in which they differ (the dims of a weight, the shape
that a Reshape is given, the groups of a convolution) is the size of a layout of the plan. So a
file for other widths is written in milliseconds. Its weights are the first numbers of the dense
ones, in one file that all networks read, since time does not depend on their values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

from l0prune.exporting.onnx.profile import owner_of
from l0prune.features.latency.facts import INPUT, NodeFacts, facts_of_node, number_of
from l0prune.features.latency.sizes import SMALL, Numbers, Size, SizeFinder, constant
from l0prune.plan.layout import Layout

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
_INLINE = 64  # elements, at most, of constant-size tensors that keep their values: scales and such


class NoTemplate(Exception):
    """The files differ by more than sizes."""


@dataclass(frozen=True)
class Weight:
    """Float or quantized tensor; its values are the first ones of the dense tensor."""

    name: str
    dims: tuple[Size, ...]
    dtype: int


@dataclass(frozen=True)
class Integers:
    """Integer tensor, row-major: sizes, or if ``values`` is None the numbers from 0 on."""

    name: str
    dims: tuple[Size, ...]
    dtype: int
    values: tuple[Size, ...] | None


@dataclass
class Template:
    """Nodes and tensors of an ONNX file, with layouts instead of sizes.

    Attributes:
        model: the file's nodes; sizes in it are those of the first file compared.
        weights, integers: the file's tensors.
        attributes: integer attributes that depend on the widths, by node and name.
    """

    model: ModelProto
    weights: list[Weight] = field(default_factory=list)
    integers: list[Integers] = field(default_factory=list)
    attributes: dict[tuple[int, str], tuple[Size, ...]] = field(default_factory=dict)
    facts: list[NodeFacts] = field(default_factory=list)


def common_template(models: Sequence[ModelProto], finder: SizeFinder) -> Template:
    """Return the template that files of several widths have in common."""
    plain = [with_numbered_names(model) for model in models]
    first = plain[0]
    if any(_structure(model.graph) != _structure(first.graph) for model in plain[1:]):
        raise NoTemplate(f"they have other nodes{_difference(models)}")
    made = Template(first)
    hints = _hints(models[0], finder)
    tensors = [{t.name: t for t in model.graph.initializer} for model in plain]
    scaled = _scaled(first.graph)
    for name, tensor in tensors[0].items():
        alike = [each[name] for each in tensors]
        dims = tuple(_find_all(finder, [tuple(t.dims) for t in alike], hints.get(name)))
        if tensor.data_type in _INTEGERS and name not in scaled:
            made.integers.append(Integers(name, dims, tensor.data_type, _values(finder, alike)))
        elif any(not dim.is_constant for dim in dims) or _count(tensor.dims) > _INLINE:
            made.weights.append(Weight(name, dims, tensor.data_type))
    for number, nodes in enumerate(zip(*(model.graph.node for model in plain), strict=True)):
        for attributes in zip(*(_sorted(node) for node in nodes), strict=True):
            values = [_integers(attribute) for attribute in attributes]
            if len(set(values)) > 1:
                found = tuple(_find_all(finder, values))
                made.attributes[number, attributes[0].name] = found
    made.facts = list(_facts(models[0], plain, finder, made))
    return made


_ENDLESS = 2**31 - 1  # the end of a Slice: no size


def as_dense(model: ModelProto, sizes: Mapping[int, int], constants: Collection[int]) -> ModelProto:
    """Return the file of a cut network as that of the dense one, with tensors but not their values.

    Args:
        model: a file in which each dim is told by its size alone (``unmistakable_widths``).
        sizes: size of each of these dims in the dense network, by that in the file.
        constants: other integers that are known to be in it.

    Raises:
        NoTemplate: an integer in it is neither.
    """

    def dense(number: int) -> int:
        if abs(number) <= SMALL or abs(number) >= _ENDLESS or number in constants:
            return number
        if number not in sizes:
            raise NoTemplate(f"nothing is known that has the size {number}")
        return sizes[number]

    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.initializer[:]
    scaled = _scaled(model.graph)
    for tensor in model.graph.initializer:
        dims = [dense(dim) for dim in tensor.dims]
        own = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=dims)
        if tensor.data_type in _INTEGERS and tensor.name not in scaled:
            values = numpy_helper.to_array(tensor)
            if values.size <= _INLINE:  # else positions
                values = np.array([dense(int(each)) for each in values.flat], values.dtype)
            own = numpy_helper.from_array(np.resize(values, dims), tensor.name)
        result.graph.initializer.append(own)
    for node in result.graph.node:
        for attribute in node.attribute:
            if numbers := _integers(attribute):
                _set(attribute, [dense(number) for number in numbers])
    return result


def _scaled(graph: GraphProto) -> set[str]:
    """Return the names of quantized tensors, whose integers are weights and no sizes."""
    return {
        name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.input
    }


def _difference(models: Sequence[ModelProto]) -> str:
    """Describe the first node that not all files have, with its module."""
    counts = [Counter((owner_of(n), n.op_type) for n in model.graph.node) for model in models]
    for owner, kind in {key: None for count in counts for key in count}:
        if len({count[owner, kind] for count in counts}) > 1:
            return f": not all have the {kind} in {owner or 'the model itself'}"
    return ", or the same ones in another order"


def _find_all(
    finder: SizeFinder, numbers: Sequence[Numbers], hints: Sequence[Layout] | None = None
) -> Iterator[Size]:
    """Yield the ``Size`` of each number; ``numbers`` has a row for each file."""
    if len({len(row) for row in numbers}) > 1:
        raise NoTemplate("lists of numbers have other lengths")
    columns = list(zip(*numbers, strict=True))
    if hints is None or len(hints) != len(columns):
        hints = [None] * len(columns)  # type: ignore[list-item]
    for column, hint in zip(columns, hints, strict=True):
        size = finder.find(column, hint)
        if size is None:
            raise NoTemplate(f"nothing is known that has the sizes {column}")
        yield size


def _hints(model: ModelProto, finder: SizeFinder) -> dict[str, Sequence[Layout]]:
    """Return the layouts of tensors that keep their name from the model, by numbered name."""
    known = finder.plan.tensors
    return {
        _tensor_name(number, position): known[own]
        for number, node in enumerate(model.graph.node)
        for position, name in enumerate(node.input)
        if (own := name.removesuffix("_quantized")) in known
    }


def _tensor_name(node: int, position: int) -> str:
    return f"w{number_of(node)}_{position}"


def _values(finder: SizeFinder, alike: Sequence[TensorProto]) -> tuple[Size, ...] | None:
    arrays = [numpy_helper.to_array(tensor) for tensor in alike]
    if all(np.array_equal(a, arrays[0]) for a in arrays):
        return tuple(constant(int(value)) for value in arrays[0].flat)
    if len({array.shape for array in arrays}) == 1:
        return tuple(_find_all(finder, [tuple(map(int, array.flat)) for array in arrays]))
    return None  # positions: which ones does not matter to time


def _integers(attribute: AttributeProto) -> Numbers:
    if attribute.type == AttributeProto.INT:
        return (attribute.i,)
    return tuple(attribute.ints) if attribute.type == AttributeProto.INTS else ()


def _sorted(node: NodeProto) -> list[AttributeProto]:
    return sorted(node.attribute, key=lambda attribute: attribute.name)


def _structure(graph: GraphProto) -> list[tuple[Any, ...]]:
    """Return the nodes with their inputs and attributes, after ``with_numbered_names``."""
    return [
        (node.domain, node.op_type, *node.input, *(a.name for a in _sorted(node)))
        for node in graph.node
    ] + [(value.name,) for value in graph.output]


def with_numbered_names(model: ModelProto) -> ModelProto:
    """Return a copy whose nodes, values and tensors are called by number, as profiles need.

    Node 12 is ``n00012_``, its first output ``n00012_0``, the tensor that it reads as its second
    input ``w00012_1``: each node has its own, since exporters share those that happen to be equal.
    Inputs of the graph keep their names.
    """
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    for node in graph.node:
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            raise NoTemplate(f"it has branches or loops ({node.op_type})")
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    own: list[TensorProto] = []
    new: dict[str, str] = {}
    for number, node in enumerate(graph.node):
        node.name = f"n{number_of(number)}_"
        new |= {name: f"{node.name}{i}" for i, name in enumerate(node.output) if name}
        del node.metadata_props[:]
    for number, node in enumerate(graph.node):
        for position, name in enumerate(node.input):
            if name in tensors:
                own.append(_renamed(tensors[name], _tensor_name(number, position)))
                node.input[position] = own[-1].name
            else:
                node.input[position] = new.get(name, name)
        node.output[:] = [new.get(name, name) for name in node.output]
    del graph.initializer[:]
    graph.initializer.extend(own)
    for value in graph.output:
        value.name = new.get(value.name, value.name)
    for given in graph.input:
        del given.metadata_props[:]
    del graph.value_info[:]
    del graph.metadata_props[:]
    del result.metadata_props[:]
    return result


def _renamed(tensor: TensorProto, name: str) -> TensorProto:
    result = TensorProto()
    result.CopyFrom(tensor)
    result.name = name
    del result.metadata_props[:]
    return result


def _facts(
    named: ModelProto, models: Sequence[ModelProto], finder: SizeFinder, made: Template
) -> Iterator[NodeFacts]:
    """Yield the facts of each node; tensors of unknown shape are left out."""
    known = [_known_shapes(model) for model in models]
    writer = {given.name: INPUT for given in models[0].graph.input}
    wide = {t.name for t in models[0].graph.initializer if len(t.dims) > 1}
    nodes = models[0].graph.node
    for number, (node, original) in enumerate(zip(nodes, named.graph.node, strict=True)):
        names = [name for name in (*node.input, *node.output) if name]
        tensors = [
            finder.dims([shapes[name] for shapes in known])
            for name in names
            if all(name in shapes for shapes in known)
        ]
        following = {name: sizes for (of, name), sizes in made.attributes.items() if of == number}
        fixed = [a for a in _sorted(node) if a.name not in following]
        numbers = tuple(size for sizes in following.values() for size in sizes)
        yield facts_of_node(
            (
                node.op_type,
                owner_of(original),
                not wide.isdisjoint(node.input),
                tuple(dict.fromkeys(writer[name] for name in node.input if name in writer)),
            ),
            tensors,
            fixed,
            numbers if len(tensors) == len(names) else (None,),
        )
        writer |= dict.fromkeys(node.output, number)


def _known_shapes(model: ModelProto) -> dict[str, Numbers]:
    """Return the known shapes of a file's values; free dims of inputs count as 1."""
    stripped = ModelProto()
    stripped.CopyFrom(model)
    del stripped.graph.initializer[:]
    for tensor in model.graph.initializer:
        if tensor.data_type in _INTEGERS:
            stripped.graph.initializer.append(tensor)
        else:
            kind = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            stripped.graph.input.append(kind)
    for given in stripped.graph.input:
        for dim in given.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = 1
    for value in stripped.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(stripped, data_prop=True).graph
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    return shapes


def _count(dims: Sequence[int]) -> int:
    return int(np.prod(dims, dtype=np.int64))


WEIGHTS = "weights.bin"
_PAGE = 4096  # bytes: each tensor begins at a multiple, so that it can be mapped into memory

Count = Callable[[Size], int]
"""Function that evaluates a size for one choice of slots."""


@dataclass
class Resizer:
    """Maker of ONNX models of one template at any widths.

    ``offsets`` are those of the weights in the file of weights, in bytes.
    """

    made: Template
    offsets: dict[str, int]

    @classmethod
    def write(cls, made: Template, values: ModelProto, most: Count, folder: Path) -> Resizer:
        """Write the file of weights at the dense network's sizes, which ``most`` evaluates.

        Its numbers are those of ``values``, repeated if these are fewer.
        """
        arrays = {tensor.name: tensor for tensor in with_numbered_names(values).graph.initializer}
        offsets: dict[str, int] = {}
        with open(folder / WEIGHTS, "wb") as file:
            for weight in made.weights:
                file.write(b"\0" * (-file.tell() % _PAGE))
                offsets[weight.name] = file.tell()
                array = numpy_helper.to_array(arrays[weight.name])
                file.write(np.resize(array, prod(map(most, weight.dims))).tobytes())
        return cls(made, offsets)

    def model(self, count: Count) -> ModelProto:
        """Return the model at the sizes that ``count`` gives, with weights in ``WEIGHTS``."""
        result = ModelProto()
        result.CopyFrom(self.made.model)
        graph = result.graph
        kept = {w.name for w in self.made.weights} | {i.name for i in self.made.integers}
        own = [tensor for tensor in graph.initializer if tensor.name not in kept]
        del graph.initializer[:]
        graph.initializer.extend(own)
        for weight in self.made.weights:
            dims = [count(dim) for dim in weight.dims]
            graph.initializer.append(_elsewhere(weight, dims, self.offsets[weight.name]))
        for each in self.made.integers:
            dims = [count(dim) for dim in each.dims]
            numbers = range(prod(dims)) if each.values is None else map(count, each.values)
            graph.initializer.append(helper.make_tensor(each.name, each.dtype, dims, list(numbers)))
        for (number, name), sizes in self.made.attributes.items():
            (attribute,) = (a for a in graph.node[number].attribute if a.name == name)
            _set(attribute, [count(size) for size in sizes])
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
        return result


def _elsewhere(weight: Weight, dims: list[int], offset: int) -> TensorProto:
    """Return a tensor with external data, in the file of weights."""
    tensor = TensorProto(name=weight.name, data_type=weight.dtype, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    length = prod(dims) * np.dtype(helper.tensor_dtype_to_np_dtype(weight.dtype)).itemsize
    for key, value in (("location", WEIGHTS), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _set(attribute: AttributeProto, numbers: list[int]) -> None:
    if attribute.type == AttributeProto.INT:
        attribute.i = numbers[0]
    else:
        attribute.ints[:] = numbers
