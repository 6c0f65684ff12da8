"""The int8 file of a network trained with fake quantization, with the ranges of that training.

The file has a QuantizeLinear and a DequantizeLinear exactly where training quantized a value: ONNX
Runtime fuses the operators between them into operators on integers. So the file computes the same
as the fake-quantized network, up to the rounding of its sums.

Learned bits may be other than eight. Values of up to eight bits are in bytes, which runtimes
multiply, and are clipped to their grid before. From opset 21 on, which has these types, weights of
up to four bits are in INT4, and values of more than eight bits are in 16 bits. In older files the
latter stay in float32, rounded to their grid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from l0prune.errors import L0pruneError
from l0prune.exporting.onnx.profile import owner_of
from l0prune.features.int8.quantizer import is_x86
from l0prune.features.int8.ranges import LEVELS, SMALLEST, QuantizedLayer, Ranges
from l0prune.plan.globs import listed

_SHIFT = 128  # from uint8 to int8
_LARGEST_BIAS = np.float32(2**30)  # as an integer
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_BYTE, _NIBBLE = 8, 4  # bits
_LARGEST_BYTE = 127
_LEVELS_16 = 2**16 - 1
_MORE_TYPES = 21  # opset from which on there are INT4 and INT16

Array = np.ndarray[Any, Any]


def quantized(model: ModelProto, ranges: Ranges, there: Set[str]) -> ModelProto:
    """Return the file in eight bits.

    Args:
        model: the file in float32, as the exporter writes it, with BatchNorm folded.
        ranges: of the training.
        there: names of the weights that the network still has.

    Raises:
        L0pruneError: a layer that was trained in eight bits is not found in the file, or has no
            range.
    """
    copied = ModelProto()
    copied.CopyFrom(model)
    return _Writer(copied, ranges).written(there)


@dataclass
class _Writer:
    model: ModelProto
    ranges: Ranges
    made: list[NodeProto] = field(default_factory=list)
    # names of values on a grid, by point and name
    on_grid: dict[tuple[int, str], str] = field(default_factory=dict)
    # names of step and zero, by point
    grids: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.tensors = {each.name: each for each in graph.initializer}
        self.users: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self.outputs = {each.name for each in graph.output}
        self.instead: dict[str, str] = {}
        opset = next(each.version for each in self.model.opset_import if not each.domain)
        self.has_more_types = opset >= _MORE_TYPES

    def written(self, there: Set[str]) -> ModelProto:
        """Rewrite the graph of the model, node by node, and return the model."""
        graph = self.model.graph
        found = self._layers()
        self._check(found.values(), there)
        dropped, of_sums = set[str](), self._sums(found)
        for node in graph.node:
            value = str(node.output[0])
            layer = found.get(value)
            if layer is not None:
                self._layer(node, layer)
                if layer.writes is not None:
                    dropped.add(self._write(value, layer.writes))
            elif value not in dropped:
                self._copy(node)
            if value in of_sums:
                self.instead[value] = self._put(self.instead.get(value, value), of_sums[value])
        del graph.node[:]
        graph.node.extend(self.made)
        read = {name for node in self.made for name in node.input} | self.outputs
        for name in self.tensors.keys() - read:
            graph.initializer.remove(self.tensors[name])
        del graph.value_info[:]
        return self.model

    def _check(self, found: Collection[QuantizedLayer], there: Set[str]) -> None:
        """Raise L0pruneError where a layer is missing in the file, or has no range."""
        missing = [
            each.path
            for each in self.ranges.scheme.layers
            if each.weight in there and each.path not in {layer.path for layer in found}
        ]
        if missing:
            raise L0pruneError(
                f"{listed(missing)} learned in eight bits, and the ONNX file has no such layer to "
                "put them on: leave opset out, by which torch's former exporter writes the file, "
                "or take the file in float32"
            )
        counts = self.ranges.counts
        unseen = sorted(
            {
                layer.path
                for layer in found
                for point in (layer.reads, layer.writes)
                if point is not None and not counts[point]
            }
        )
        if unseen:
            raise L0pruneError(
                f"no step of the training has shown what range {listed(unseen)} has in eight "
                "bits. Train more steps with quantize='int8', or without it"
            )

    def _layers(self) -> dict[str, QuantizedLayer]:
        """Return the quantized layers by the output name of their node."""
        by_weight = {layer.weight: layer for layer in self.ranges.scheme.layers}
        by_path = {layer.path: layer for layer in self.ranges.scheme.layers}
        found = {}
        for node in self.model.graph.node:
            if node.op_type in _PRODUCTS and node.input[1] in self.tensors:
                layer = by_weight.get(node.input[1]) or by_path.get(owner_of(node))
                if layer is not None:
                    found[node.output[0]] = layer
        return found

    def _sums(self, found: Mapping[str, QuantizedLayer]) -> dict[str, int]:
        """Return the points of sums by the sum's name, after a ReLU that follows.

        Where one of two operands was removed, the other is the sum.
        """
        points = {}
        for value, layer in found.items():
            if layer.adds_to is None:
                continue
            for kind in ("Add", "Relu"):
                users = self.users.get(value, [])
                if [user.op_type for user in users] == [kind]:
                    value = str(users[0].output[0])
            points[value] = layer.adds_to
        return points

    def _copy(self, node: NodeProto) -> None:
        names = [self.instead.get(name, name) for name in node.input]
        del node.input[:]
        node.input.extend(names)
        self.made.append(node)

    def _constant(self, name: str, value: Array, *, is_short: bool = False) -> str:
        tensor = numpy_helper.from_array(value, name)
        if is_short:
            numbers = value.reshape(-1).tolist()
            tensor = helper.make_tensor(name, TensorProto.INT4, value.shape, numbers)
        self.model.graph.initializer.append(tensor)
        return name

    def _step_and_zero(self, point: int) -> list[str]:
        if point not in self.grids:
            step, zero = self.ranges.grid(point)
            if self.ranges.levels(point) > LEVELS:
                whole = np.array(zero, np.uint16)
            else:
                whole = np.array(zero, np.uint8) if is_x86() else np.array(zero - _SHIFT, np.int8)
            given: dict[str, Array] = {"step": np.array(step, np.float32), "zero": whole}
            self.grids[point] = [self._constant(f"point_{point}_{n}", v) for n, v in given.items()]
        return self.grids[point]

    def _put(self, value: str, point: int) -> str:
        """Quantize a value on the grid of a point; return the name of the result."""
        key = (point, value)
        if key not in self.on_grid:
            name, levels = f"{value}_on_{point}", self.ranges.levels(point)
            if levels > LEVELS and not self.has_more_types:
                self._rounded(value, point, name)
            else:
                if levels not in (LEVELS, _LEVELS_16):
                    value = self._clipped(value, point, f"{name}_clipped")
                given, whole = self._step_and_zero(point), f"{name}_whole"
                self.made.append(helper.make_node("QuantizeLinear", [value, *given], [whole]))
                self.made.append(helper.make_node("DequantizeLinear", [whole, *given], [name]))
            self.on_grid[key] = name
        return self.on_grid[key]

    def _clipped(self, value: str, point: int, name: str) -> str:
        """Clip a value to the ends of a grid that has fewer levels than its type."""
        step, zero = self.ranges.grid(point)
        ends = (-zero * step, (self.ranges.levels(point) - zero) * step)
        named = [
            self._constant(f"{name}_{what}", np.array(end, np.float32))
            for what, end in zip(("least", "most"), ends, strict=True)
        ]
        self.made.append(helper.make_node("Clip", [value, *named], [name]))
        return name

    def _rounded(self, value: str, point: int, name: str) -> None:
        """Round a value to the grid of a point, in float32."""
        step, _ = self.ranges.grid(point)
        by = self._constant(f"{name}_step", np.array(step, np.float32))
        clipped = self._clipped(value, point, f"{name}_clipped")
        for kind, read, made in (
            ("Div", [clipped, by], f"{name}_in_steps"),
            ("Round", [f"{name}_in_steps"], f"{name}_whole"),
            ("Mul", [f"{name}_whole", by], name),
        ):
            self.made.append(helper.make_node(kind, read, [made]))

    def _layer(self, node: NodeProto, layer: QuantizedLayer) -> str:
        """Write a layer with quantized operands; return the name of its output."""
        read, weight, *rest = node.input
        read = self.instead.get(read, read)
        if layer.quantizes:
            read = self._put(read, layer.reads)
        bias = next((self._array(each) for each in rest if each in self.tensors), None)
        value, name = self._array(weight), str(node.output[0])
        axis = 0 if node.op_type == "Conv" or _is_transposed(node) else value.ndim - 1
        steps = self._steps(value, axis, layer)
        bits, of_read = self._bits(layer), self.ranges.grid(layer.reads)[0]
        is_short = self.has_more_types and bits <= _NIBBLE and self.ranges.bits is not None
        apart: Array | None = None
        if bits > _BYTE or self.ranges.levels(layer.reads) != LEVELS or is_short:
            # In such steps a bias would be too coarse, and ONNX Runtime rounds a layer's bias.
            apart, bias, rest = bias, None, rest if bias is None else []
        if bits < _BYTE and not is_short:
            steps = steps / (_LARGEST_BYTE // (2 ** (bits - 1) - 1))  # for the bias; as exact
        if bias is not None:
            steps = np.maximum(steps, np.abs(bias.reshape(-1)) / of_read / _LARGEST_BIAS)
        steps = np.maximum(steps, SMALLEST).astype(np.float32)
        given = self._weight(f"{name}_weight", value, steps, axis, bits, is_short)
        if bias is not None:
            of_bias = (of_read * steps).astype(np.float32)
            whole = np.round(bias.reshape(-1) / of_bias).astype(np.int32)
            rest = [self._dequantized(f"{name}_bias", whole, of_bias, 0)]
        del node.input[:]
        node.input.extend([read, given, *rest])
        self.made.append(node)
        if apart is not None:
            self._add(node, apart, [-1] + [1] * (value.ndim - 2 if node.op_type == "Conv" else 0))
        return name

    def _add(self, node: NodeProto, bias: Array, shape: Sequence[int]) -> None:
        """Add a bias to the output of a layer, in float32."""
        name = str(node.output[0])
        given = self._constant(f"{name}_bias", bias.reshape(shape))
        node.output[0] = f"{name}_without_bias"
        self.made.append(helper.make_node("Add", [node.output[0], given], [name]))

    def _number(self, layer: QuantizedLayer) -> int:
        return self.ranges.scheme.layers.index(layer)

    def _bits(self, layer: QuantizedLayer) -> int:
        bits = self.ranges.bits
        return _BYTE if bits is None else bits.weights[self._number(layer)]

    def _steps(self, value: Array, axis: int, layer: QuantizedLayer) -> Array:
        """Return the quantization step of each output channel of a weight."""
        rows = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
        bits, largest = self.ranges.bits, self.ranges.largest
        ends = largest if bits is None else bits.ends[self._number(layer)]
        found: Array = np.abs(rows).max(1) / np.maximum(np.array(ends, np.float32), 1)
        return found

    def _weight(
        self, name: str, value: Array, steps: Array, axis: int, bits: int, is_short: bool
    ) -> str:
        """Write a weight rounded to its grid; return the name of the value to multiply with."""
        along = [1] * value.ndim
        along[axis] = -1
        whole = np.round(value / steps.reshape(along))
        if bits <= _BYTE:
            return self._dequantized(name, whole.astype(np.int8), steps, axis, is_short=is_short)
        if self.has_more_types:
            return self._dequantized(name, whole.astype(np.int16), steps, axis)
        return self._constant(name, (whole * steps.reshape(along)).astype(np.float32))

    def _array(self, name: str) -> Array:
        return numpy_helper.to_array(self.tensors[name])

    def _dequantized(
        self, name: str, whole: Array, steps: Array, axis: int, *, is_short: bool = False
    ) -> str:
        zeros = np.zeros(len(steps), whole.dtype)
        given = {"whole": whole, "steps": steps, "zeros": zeros}
        names = [
            self._constant(f"{name}_{what}", value, is_short=is_short and value is not steps)
            for what, value in given.items()
        ]
        self.made.append(helper.make_node("DequantizeLinear", names, [name], axis=axis))
        return name

    def _write(self, value: str, point: int) -> str:
        """Quantize a layer's output; return the name of a clipped output that it replaces."""
        (low, high), users = self.ranges.scheme.bounds[point], self.users.get(value, [])
        is_clipped = (low, high) != (-np.inf, np.inf) and value not in self.outputs
        is_clipped &= [user.op_type in ("Relu", "Clip") for user in users] == [True]
        clipped = users[0].output[0] if is_clipped else ""
        is_output = value in self.outputs
        if is_output:
            self.made[-1].output[0] = f"{value}_in_float"
        on_grid = self._put(f"{value}_in_float" if is_output else value, point)
        for name in filter(None, (value, clipped)):
            self.instead[name] = on_grid
            if name in self.outputs:
                self.made.append(helper.make_node("Identity", [on_grid], [name]))
        return clipped


def _is_transposed(node: NodeProto) -> bool:
    given: Mapping[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return bool(given.get("transB", 0))
