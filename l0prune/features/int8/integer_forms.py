"""Operators that ONNX Runtime has in float32 only, as operators that it has on integers.

A file in eight bits that holds one of them converts to float32 before it and back after it. A
factor is no operator on integers at all: the same integers stand for other numbers in other steps.
A HardSigmoid is that, a sum, and the clipping to the ends of the grid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_SLACK = 1e-6  # of a step: rounding of the ends of a grid
_ALIKE = 1e-4  # of a step: rounding of steps; 255 of them differ by less than one in forty

Array = np.ndarray[Any, Any]


def in_integers(model: ModelProto) -> None:
    """Replace products with constants and HardSigmoids between values in eight bits, in place.

    Args:
        model: a file in eight bits, as ONNX Runtime's quantizer writes it.
    """
    _Forms(model).replace()


class _Forms:
    """The values of a file in eight bits, and the replacement of its operators."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._writers = {name: node for node in model.graph.node for name in node.output}
        self._readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in model.graph.node:
            for name in node.input:
                self._readers[name].append(node)
        self._outputs = {output.name for output in model.graph.output}
        self._gone: set[str] = set()

    def replace(self) -> None:
        """Replace all operators that have a form on integers."""
        for node in [*self._graph.node]:
            if node.op_type in ("Mul", "Div"):
                self._rescale(node)
            elif node.op_type == "HardSigmoid":
                self._add(node)
        left = [node for node in self._graph.node if node.output[0] not in self._gone]
        read = {name for node in left for name in node.input} | self._outputs
        dead = [n for n in left if n.op_type == _DEQUANTIZE and n.output[0] not in read]
        left = [node for node in left if node not in dead]
        del self._graph.node[:]
        self._graph.node.extend(left)
        read = {name for node in left for name in node.input} | self._outputs
        for name in self._tensors.keys() - read:
            self._graph.initializer.remove(self._tensors[name])

    def _rescale(self, node: NodeProto) -> None:
        """Let the readers of a product with a number read the integers of its other factor."""
        value, factor = self._factor(node)
        after = self._quantized(node)
        if value is None or after is None or not factor > 0:
            return
        (step, zero), (other, same) = (map(self._array, each.input[1:3]) for each in (value, after))
        if zero != same or abs(step * factor - other) > _ALIKE * other:
            return
        for each in [*self._readers[after.output[0]]]:
            self._read(each, [value.input[0], *each.input[1:]])
        self._gone.update((node.output[0], after.output[0]))

    def _add(self, node: NodeProto) -> None:
        """Write ``clip(alpha * x + beta)`` as a sum that the grid of the result clips."""
        value, after = self._dequantized(node.input[0]), self._quantized(node)
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        alpha, beta = given.get("alpha", 0.2), given.get("beta", 0.5)
        if value is None or after is None or not (alpha > 0 and beta > 0):
            return
        step, zero = map(self._array, after.input[1:3])
        ends = np.iinfo(zero.dtype)
        least, most = ((np.float32(end) - zero) * step for end in (ends.min, ends.max))
        if least < -_SLACK * step or most > 1 + _SLACK * step:
            return
        name = node.output[0]
        steps = self._constant(f"{name}_steps", self._array(value.input[1]) * np.float32(alpha))
        terms = {
            f"{name}_product": [value.input[0], steps, value.input[2]],
            f"{name}_beta": [
                self._constant(f"{name}_{what}", each)
                for what, each in {
                    "one": np.array(1, zero.dtype),
                    "beta_step": np.array(beta, np.float32),
                    "beta_zero": np.array(0, zero.dtype),
                }.items()
            ],
        }
        for term, read in terms.items():
            made = helper.make_node(_DEQUANTIZE, [], [term], name=f"{term}_{_DEQUANTIZE}")
            self._read(made, read)
            self._writers[term] = made
            self._graph.node.append(made)
        node.op_type = "Add"
        del node.attribute[:]
        self._read(node, [*terms])

    def _factor(self, node: NodeProto) -> tuple[NodeProto | None, float]:
        """Return the value of a product with a number, as the node that dequantizes it."""
        for place, name in enumerate(node.input):
            number = self._number(name)
            if number and (node.op_type == "Mul" or place == 1):
                value = self._dequantized(node.input[1 - place])
                return value, number if node.op_type == "Mul" else 1 / number
        return None, 0.0

    def _number(self, name: str) -> float:
        """Return the single number of a constant, maybe one in eight bits; 0 for anything else."""
        if name in self._tensors:
            found = self._array(name)
        else:
            node = self._writers.get(name)
            if node is None or node.op_type != _DEQUANTIZE or node.input[0] not in self._tensors:
                return 0.0
            whole, step, zero = (self._array(each) for each in node.input)
            found = (whole.astype(np.float32) - zero) * step
        is_one = found.size == 1 and found.ndim <= 1 and found.dtype == np.float32
        return float(found.reshape(())) if is_one else 0.0

    def _dequantized(self, name: str) -> NodeProto | None:
        """Return the node that dequantizes a value in steps of one size; None for others."""
        node = self._writers.get(name)
        is_one = node is not None and node.op_type == _DEQUANTIZE and len(node.input) == 3
        if not is_one or node is None or node.input[0] in self._tensors:
            return None
        return node if self._array(node.input[1]).ndim == 0 else None

    def _quantized(self, node: NodeProto) -> NodeProto | None:
        """Return the node that quantizes the output of a node, where it is its only reader."""
        (name,) = node.output
        readers = self._readers[name]
        if name in self._outputs or len(readers) != 1 or readers[0].op_type != _QUANTIZE:
            return None
        return readers[0]

    def _read(self, node: NodeProto, names: Sequence[str]) -> None:
        for name in node.input:
            self._readers[name] = [each for each in self._readers[name] if each is not node]
        del node.input[:]
        node.input.extend(names)
        for name in names:
            self._readers[name].append(node)

    def _array(self, name: str) -> Array:
        return numpy_helper.to_array(self._tensors[name])

    def _constant(self, name: str, value: Array) -> str:
        self._tensors[name] = numpy_helper.from_array(value, name)
        self._graph.initializer.append(self._tensors[name])
        return name
