"""Small files of networks of any widths, all of which read one file of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from l0prune.timing.sizes import Size
from l0prune.timing.template import Template, Weight, with_names

WEIGHTS = "weights.bin"
_PAGE = 4096  # bytes; where each tensor begins, so that it can be mapped into memory

Count = Callable[[Size], int]
"""What a size is for one choice of slots."""


@dataclass
class Resizer:
    """Writes files of one template at any widths into a folder.

    Attributes:
        made: the template.
        offsets: where each of its weights begins in the file of weights, in bytes.
    """

    made: Template
    offsets: dict[str, int]

    @classmethod
    def write(cls, made: Template, values: ModelProto, most: Count, folder: Path) -> Resizer:
        """Write the file of weights, as large as the dense network's, and the dense network.

        Args:
            made: the template.
            values: a file whose weights are taken, over and over if they are fewer.
            most: counts the widths of the dense network.
            folder: where they are written.
        """
        arrays = {tensor.name: tensor for tensor in with_names(values).graph.initializer}
        offsets: dict[str, int] = {}
        with open(folder / WEIGHTS, "wb") as file:
            for weight in made.weights:
                file.write(b"\0" * (-file.tell() % _PAGE))
                offsets[weight.name] = file.tell()
                array = numpy_helper.to_array(arrays[weight.name])
                file.write(np.resize(array, prod(_counted(weight.dims, most))).tobytes())
        return cls(made, offsets)

    def model(self, count: Count) -> ModelProto:
        """The file for the widths by which ``count`` counts; its weights lie in ``WEIGHTS``."""
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
            _set(graph.node[number], name, [count(size) for size in sizes])
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
        return result


def _elsewhere(weight: Weight, dims: list[int], offset: int) -> TensorProto:
    """A tensor whose numbers lie in the file of weights."""
    tensor = TensorProto(name=weight.name, data_type=weight.dtype, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    length = prod(dims) * _item_size(weight)
    for key, value in (("location", WEIGHTS), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _set(node: NodeProto, name: str, numbers: list[int]) -> None:
    for attribute in node.attribute:
        if attribute.name == name and attribute.type == AttributeProto.INT:
            attribute.i = numbers[0]
        elif attribute.name == name:
            attribute.ints[:] = numbers


def _item_size(weight: Weight) -> int:
    return int(np.dtype(helper.tensor_dtype_to_np_dtype(weight.dtype)).itemsize)


def _counted(sizes: Iterable[Size], count: Count) -> list[int]:
    return [count(size) for size in sizes]
