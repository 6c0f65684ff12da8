"""Weights of an int8 file that compensate the errors of quantization, layer by layer.

In the order of the graph, each layer's weights become those on its grid whose output, on the
layer's input in the int8 file, is nearest to the layer's output in the file in float32: least
squares (``least_squares``), rounded feature by feature (``rounding``), with the bias that removes
the mean of the remaining error (Nagel et al. 2019, arXiv 1906.04721, section 4.2). Steps stay. An
output whose new weights are not nearer on held-out examples keeps the old ones, with the new bias.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from l0prune.features.int8.calibration import divided
from l0prune.features.int8.quantizer import Feed, read_by
from l0prune.features.int8.rounding import rounded
from l0prune.files.onnx_session import session_of
from l0prune.selection.least_squares import Moments, left_of, solve
from l0prune.selection.matrices import Product, aten, product_of

_ROWS = 1 << 14  # rows of a layer's input, over all calls
_MOST = 2500  # features; with more, the bias alone is replaced
_INT32 = 2**31 - 1

Array = np.ndarray[Any, Any]


def compensated(single: ModelProto, made: ModelProto, feeds: Sequence[Feed]) -> ModelProto:
    """Return a file in eight bits whose weights and biases compensate the rounding.

    Layers are Conv, Gemm and MatMul with a weight in eight bits that nothing else reads.

    Args:
        single: the file in float32, whose nodes have the same names.
        made: the file in eight bits.
        feeds: examples of the inputs.
    """
    copied = ModelProto()
    copied.CopyFrom(made)
    exact, rough = _Values(single, feeds), _Values(copied, feeds)
    held = {id(feed) for feed in divided(feeds)[1]}
    generator = torch.Generator().manual_seed(0)
    for layer in _layers(single, copied):
        moments = (Moments(), Moments())
        values = zip(feeds, rough.of(layer.reads), exact.of(layer.writes), strict=True)
        for feed, x, y in values:
            moments[id(feed) in held].add(*layer.rows(x, y, _ROWS // len(feeds), generator))
        seen, unseen = moments
        layer.repair(seen if seen.count else unseen, unseen)
    return copied


class _Values:
    """Values of a file on some feeds, computed on demand and kept until their last reader ran.

    A value that is asked for must not depend on weights that change later.
    """

    def __init__(self, model: ModelProto, feeds: Sequence[Feed]) -> None:
        self._model = model
        self._known = {name: [feed[name] for feed in feeds] for name in feeds[0]}
        self._pending = Counter(name for node in model.graph.node for name in {*read_by(node)})

    def of(self, name: str) -> list[Array]:
        """Return the value of a name, for each feed."""
        if name not in self._known:
            self._compute(name)
        return self._known[name]

    def _compute(self, name: str) -> None:

        nodes = self._missing(name)
        self._pending.subtract(read for node in nodes for read in {*read_by(node)})
        made = [output for node in nodes for output in node.output if self._pending[output] > 0]
        made += [] if name in made else [name]
        read = {each for node in nodes for each in read_by(node)}
        given = [each for each in self._known if each in read]
        graph = helper.make_graph(
            nodes,
            "part",
            [_described(each, self._known[each][0]) for each in given],
            [helper.make_empty_tensor_value_info(each) for each in made],
            [tensor for tensor in self._model.graph.initializer if tensor.name in read],
        )
        part = helper.make_model(
            graph,
            opset_imports=self._model.opset_import,
            ir_version=self._model.ir_version,
            functions=self._model.functions,
        )
        session = session_of(part.SerializeToString())
        columns = [self._known[each] for each in given]
        calls = [dict(zip(given, call, strict=True)) for call in zip(*columns, strict=True)]
        found = [session.run(made, call) for call in calls]
        self._known |= dict(zip(made, map(list, zip(*found, strict=True)), strict=True))
        for each in [e for e in self._known if self._pending[e] <= 0 and e != name]:
            del self._known[each]

    def _missing(self, name: str) -> list[NodeProto]:
        """Return the nodes that must still run for a value, in the order of the file."""
        wanted, nodes = {name}, []
        for node in reversed(self._model.graph.node):
            if not wanted.isdisjoint(node.output):
                nodes.append(node)
                wanted.update(read for read in read_by(node) if read not in self._known)
        return nodes[::-1]


def _described(name: str, value: Array) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None)


@dataclass(frozen=True)
class _Layer:
    """A layer whose weight is in eight bits.

    Attributes:
        reads: name of the input in the file in eight bits.
        writes: name of the output in the one in float32.
        weight: in float32, as ``product`` takes it.
        whole: the weight in eight bits, in the file.
        steps: quantization steps of ``whole``, of the same shape.
        is_transposed: whether ``whole`` is the transpose of what ``product`` takes.
        bias: in the file, in float32 or whole numbers; None for none.
        bias_steps: quantization steps of the bias; 1 in float32.
        product: the layer as a product of matrices.
        arguments: of the operator, after its input.
        pads: around the input, as torch takes them.
    """

    reads: str
    writes: str
    weight: Tensor
    whole: TensorProto
    steps: Array
    is_transposed: bool
    bias: TensorProto | None
    bias_steps: Array
    product: Product
    arguments: tuple[Any, ...]
    pads: tuple[int, ...]

    def _matrix(self, values: Array) -> Tensor:
        tensor = torch.from_numpy(values.astype(np.float64))
        return self.product.matrix(tensor.mT if self.is_transposed else tensor)

    def rows(
        self, x: Array, y: Array, most: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return rows of the input and of the output of a call, as ``Moments.add`` takes them.

        With too many features for moments, the input has none, and the output is the residual of
        the weight in eight bits.
        """
        read, written = torch.from_numpy(x), torch.from_numpy(y)
        if self.weight.dim() == 2:
            read, written = read.flatten(0, -2), written.flatten(0, -2)
        else:
            read = F.pad(read, self.pads)
        count, chosen = written.numel() // written.shape[1], None
        if count > most:
            chosen = torch.randperm(count, generator=generator)[:most]
        inputs = self.product.inputs((read, *self.arguments), chosen)
        outputs = self.product.outputs(written, chosen)
        if inputs.shape[2] > _MOST:
            weight = self._matrix(numpy_helper.to_array(self.whole) * self.steps).float()
            return inputs[..., :0], outputs - inputs @ weight
        return inputs, outputs

    def repair(self, seen: Moments, held: Moments) -> None:
        """Write better weights and a better bias into the file.

        Args:
            seen, held: moments of rows; ``held`` decide which weights are better.
        """
        before, has_bias, both = (
            numpy_helper.to_array(self.whole),
            self.bias is not None,
            seen + held,
        )
        weight = self._matrix(before * self.steps)
        if both.x.shape[1]:
            steps, largest = self._matrix(self.steps), int(np.abs(before.astype(np.int16)).max())
            best = solve(seen, held, self.product.matrix(self.weight.double()), has_bias=has_bias)
            gram, *_ = both.about(mean=has_bias)
            whole, about = rounded(best.weight, gram, steps, largest), held.about(mean=has_bias)
            is_nearer = left_of(about, whole * steps) < left_of(about, weight)
            weight = torch.where(is_nearer[:, None], whole * steps, weight)
            made = self.product.unmatrix((weight / steps).round())
            made = made.mT if self.is_transposed else made
            self._write(self.whole, made.reshape(before.shape).numpy().astype(before.dtype))
        else:
            weight = weight[:, :0]
        if self.bias is not None:
            bias = both.bias(weight).flatten().numpy() / self.bias_steps
            given = numpy_helper.to_array(self.bias)
            if given.dtype.kind == "i":
                bias = np.clip(np.round(bias), -_INT32, _INT32)
            self._write(self.bias, bias.reshape(given.shape).astype(given.dtype))

    def _write(self, tensor: TensorProto, value: Array) -> None:
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), tensor.name))


def _layers(single: ModelProto, made: ModelProto) -> Iterator[_Layer]:
    """Yield the layers that can be repaired, in the order of the graph."""
    file, twins = _Tensors(made), {node.name: node for node in made.graph.node}
    weights = {tensor.name: tensor for tensor in single.graph.initializer}
    for node in single.graph.node:
        twin = twins.get(node.name)
        if twin is None or node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        weight, found = weights.get(node.input[1]), file.own(twin.input[1])
        bias: tuple[TensorProto | None, Array] | None = None, np.ones(())
        if len(twin.input) > 2:
            bias = file.own(twin.input[2])
        if weight is None or found is None or found[0].data_type != TensorProto.INT8 or not bias:
            continue
        plain = torch.from_numpy(numpy_helper.to_array(weight).copy())
        operator = _operator(node, plain)
        if operator is not None:
            product, arguments, pads = operator
            yield _Layer(
                reads=twin.input[0],
                writes=node.output[0],
                weight=arguments[0],
                whole=found[0],
                steps=found[1],
                is_transposed=arguments[0] is not plain,
                bias=bias[0],
                bias_steps=bias[1],
                product=product,
                arguments=arguments,
                pads=pads,
            )


class _Tensors:
    """Constants of a file in eight bits."""

    def __init__(self, model: ModelProto) -> None:
        nodes = model.graph.node
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._makers = {n.output[0]: n for n in nodes if n.op_type == "DequantizeLinear"}
        self._readers = Counter(name for node in nodes for name in read_by(node))

    def own(self, name: str) -> tuple[TensorProto, Array] | None:
        """Return the stored tensor of a value, and its steps; None where others read it, too."""
        maker = self._makers.get(name)
        whole = name if maker is None else maker.input[0]
        if whole not in self._tensors or {self._readers[each] for each in (name, whole)} != {1}:
            return None
        tensor = self._tensors[whole]
        if maker is None:
            return tensor, np.ones(())
        steps = numpy_helper.to_array(self._tensors[maker.input[1]])
        along = [1] * len(tensor.dims)
        if steps.size > 1:  # one step for all may be a scalar, or a vector of one
            axis = next((a.i for a in maker.attribute if a.name == "axis"), 1)
            along[axis] = -1
        return tensor, np.broadcast_to(steps.reshape(along), tuple(tensor.dims))


def _operator(
    node: NodeProto, weight: Tensor
) -> tuple[Product, tuple[Any, ...], tuple[int, ...]] | None:
    """Return a node as a product, its arguments after the input, and the input's padding."""
    given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if node.op_type != "Conv":
        plain = {given.get("alpha", 1.0), given.get("beta", 1.0)} == {1.0}
        if weight.dim() != 2 or given.get("transA", 0) or not plain:
            return None
        matrix = weight.mT if given.get("transB", 0) else weight
        product = product_of(aten.mm.default, (None, matrix), lambda each: each is matrix)
        return None if product is None else (product, (matrix,), ())
    dims = weight.dim() - 2
    if given.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    pads = given.get("pads", [0] * 2 * dims)
    around = tuple(p for dim in reversed(range(dims)) for p in (pads[dim], pads[dims + dim]))
    zeros, ones = [0] * dims, [1] * dims
    stride, dilation = given.get("strides", ones), given.get("dilations", ones)
    arguments = (weight, None, stride, zeros, dilation, False, zeros, given.get("group", 1))
    product = product_of(aten.convolution.default, (None, *arguments), lambda each: each is weight)
    return None if product is None else (product, arguments, around)
