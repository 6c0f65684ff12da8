"""Conversion of ONNX graphs to torch.nn layers with the file's weights and names.

A convolution becomes an ``nn.Conv2d``, a product with a matrix of the file an ``nn.Linear``; other
operators are in ``onnx_operators`` or converted by onnx2pytorch.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from l0prune.errors import FileError, first_line
from l0prune.features.onnx_in.network import OnnxNetwork, Step, class_of
from l0prune.features.onnx_in.operators import LARGEST_HOST, OPERATORS

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Graph:
    """Content of a file that a conversion reads.

    Attributes:
        model: the ONNX model, with local functions inlined.
        weights: initializers and constants as arrays, by name.
        inputs, outputs: names of the graph's inputs and outputs.
        ranks: number of dims of each value, by name, if known.
        opset: of the operators.
    """

    model: onnx.ModelProto
    weights: dict[str, np.ndarray[Any, Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ranks: dict[str, int]
    opset: int


def network_of(graph: Graph) -> OnnxNetwork:
    """Convert a graph to a network whose forward takes the graph's inputs.

    Raises:
        FileError: an operator cannot be converted.
    """
    network = class_of(graph.inputs)(graph.inputs, graph.outputs)
    _Conversion(network, graph).run()
    return network


_OF_LISTS = ("Resize", "Upsample", "Pad")
_OF_FUNCTIONS = (*_OF_LISTS, "OneHot", "TopK", "CumSum", "Clip", "Range")


@dataclass
class _Conversion:
    """Converter of a graph's nodes to the steps of a network."""

    network: OnnxNetwork
    graph: Graph
    layers: dict[tuple[Any, ...], str] = field(default_factory=dict)
    parameters: dict[tuple[str, bool], nn.Parameter] = field(default_factory=dict)

    def run(self) -> None:
        """Convert all nodes, then store the arrays of the file that the steps read.

        Raises:
            FileError: an operator cannot be converted.
        """
        nodes = list(self.graph.model.graph.node)
        self.readers = Counter(name for node in nodes for name in node.input)
        self.readers.update(self.graph.outputs)
        self.initializers = {each.name for each in self.graph.model.graph.initializer}
        self.kinds_of_readers: dict[str, set[str]] = defaultdict(set)
        for node in nodes:
            for name in list(node.input)[1:]:
                self.kinds_of_readers[name].add(node.op_type)
        self.by_input = {name: node for node in nodes for name in node.input if name}
        self.transposes = {
            node.output[0]: node.input[0]
            for node in nodes
            if node.op_type == "Transpose"
            and self._is_matrix(node.input[0])
            and attributes(node).get("perm", [1, 0]) == [1, 0]
        }
        self.readings = self._readings(nodes)
        self.done: set[int] = set()
        for node in nodes:
            if id(node) not in self.done and node.op_type != "Constant":
                self._convert(node)
        self.network._steps = self._needed()
        read = {name for step in self.network._steps for name in step.inputs}
        for name in (*self.graph.weights, *self.graph.outputs):
            if name in self.graph.weights and (name in read or name in self.graph.outputs):
                self._keep(name)

    def _readings(self, nodes: Sequence[onnx.NodeProto]) -> dict[str, set[bool]]:
        """Return for each array whether nodes read it as it is, transposed by a Linear, or both.

        The latter cannot be one parameter of an ``nn.Linear`` and of what reads it otherwise.
        """
        found = defaultdict[str, set[bool]](set)
        for node in nodes:
            linear = linear_of(self, node) if node.op_type in ("Gemm", "MatMul") else None
            for place, name in enumerate(node.input):
                if node.output[0] in self.transposes:
                    continue
                turned = linear is not None and place == 1 and linear[1]
                found[self.transposes.get(name, name)].add(turned)
        return found

    def _needed(self) -> list[Step]:
        """Return the steps without those whose results nobody reads."""
        wanted, steps = set(self.graph.outputs), list[Step]()
        for step in reversed(self.network._steps):
            if not wanted.isdisjoint(step.outputs):
                steps.append(step)
                wanted.update(step.inputs)
        return steps[::-1]

    def _convert(self, node: onnx.NodeProto) -> None:
        given = attributes(node)
        label = f"{node.op_type} ({node.name or node.output[0]})"
        layer = _LAYERS.get(node.op_type)
        try:
            if layer is None or not layer(self, node, given):
                self._as_function(node, given)
        except (NotImplementedError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileError(
                f"the operator {label} cannot be converted: {first_line(error)}. {_WAY_ON}"
            ) from error

    def _as_function(self, node: onnx.NodeProto, given: dict[str, Any]) -> None:
        label = f"{node.op_type} ({node.name or node.output[0]})"
        inputs, outputs = tuple(node.input), tuple(node.output)
        if node.op_type in OPERATORS:
            if node.op_type == "Split":
                given["outputs"] = len(outputs)
            operation = partial(OPERATORS[node.op_type], given)
            self.network._steps.append(Step(operation, inputs, outputs, label))
            return
        module, takes = self._from_library(node)
        path = self._place(self._home(node), module)
        if node.op_type == "Resize" and len(takes) > 2:
            takes = (takes[0], "", *takes[2:])  # the roi input, which onnx2pytorch does not support
        while takes and not takes[-1]:
            takes = takes[:-1]
        is_sized = node.op_type in _OF_LISTS
        self.network._steps.append(Step(path, takes, outputs, label, is_sized))

    def _from_library(self, node: onnx.NodeProto) -> tuple[nn.Module, tuple[str, ...]]:
        """Convert a node by onnx2pytorch; return the module and the names of its inputs."""
        import onnx
        from onnx2pytorch.constants import STANDARD_LAYERS
        from onnx2pytorch.convert.operations import convert_operations
        from torch.nn.modules.pooling import _MaxPoolNd

        arrays = {name: self.graph.weights[name] for name in node.input if self._is_array(name)}
        made = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
        alone = onnx.helper.make_graph([node], "node", [], [], initializer=made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ((_, _, module),) = convert_operations(alone, self.graph.opset, enable_pruning=False)
        for each in module.modules():
            if isinstance(each, _MaxPoolNd) and len(node.output) == 1:
                each.return_indices = False
            for leaf, own in list(each._parameters.items()):
                for name, array in arrays.items():  # a weight that others read, too
                    if self.readers[name] > 1 and own is not None and own.shape == array.shape:
                        same = bool((own.detach().numpy() == array).all())
                        setattr(each, leaf, self.parameter(name) if same else own)
        inside = any(isinstance(each, STANDARD_LAYERS) for each in module.modules())
        takes = (n for n in node.input if not (inside and (n in arrays or not n)))
        return module, tuple(takes)

    def _is_array(self, name: str) -> bool:
        return name in self.graph.weights

    def _is_matrix(self, name: str) -> bool:
        return self._is_array(name) and self.graph.weights[name].ndim == 2

    def _home(self, node: onnx.NodeProto, weights: Sequence[str] = ()) -> str:
        """Return the module path for a node, from its weights' names or from its name."""
        for name in weights or [name for name in node.input if self._is_array(name)]:
            path, _, leaf = name.rpartition(".")
            if path and leaf in ("weight", "bias"):
                return path
        name, *_ = node.name.split(";")  # TensorFlow joins the names of fused operators
        scope = [part for part in name.split("/") if part]
        if len(scope) > 1:
            return ".".join(scope[:-1])
        return name or f"{node.op_type}_{node.output[0]}"

    def _place(self, path: str, module: nn.Module) -> str:
        """Add the module at the path, with a number if the name is taken; return its path."""
        *above, last = [part for part in path.split(".") if part] or ["layer"]
        at, taken = self._container(above)
        number, name = 1, last
        while hasattr(at, name):
            held = at._modules.get(name)
            # a plain container at this path: the module takes over its children
            if type(held) is nn.Module and not any(hasattr(module, n) for n in held._modules):
                for child, inner in list(held.named_children()):
                    module.add_module(child, inner)
                break
            number += 1
            name = f"{last}_{number}"
        at.add_module(name, module)
        return ".".join((*taken, name))

    def _keep(self, name: str) -> None:
        """Store an array that steps read: as an array for sizes, else a parameter or a buffer."""
        array = self.graph.weights[name]
        readers = self.kinds_of_readers[name]
        is_short = array.size <= LARGEST_HOST and array.ndim <= 1
        if array.size == 1 or (is_short and array.dtype.kind in "iub"):
            self.network._hosts[name] = array
            return
        if is_short and readers and readers <= set(_OF_FUNCTIONS):
            self.network._hosts[name] = array
            return
        *above, leaf = name.split(".")
        if not above and _is_made_up(name):
            above = ["values"]
        holder, taken = self._container([part for part in above if part])
        leaf = _free_name(holder, leaf, None)
        value = torch.from_numpy(np.array(array))
        is_weight = value.is_floating_point() and bool(value.isfinite().all())
        if is_weight and name in self.initializers:
            holder.register_parameter(leaf, self.parameter(name))
        else:
            holder.register_buffer(leaf, value)
        self.network._places[name] = (".".join(taken), leaf)

    def _container(self, parts: Sequence[str]) -> tuple[nn.Module, list[str]]:
        """Return the module at a path, added if absent, and the parts of its actual path."""
        at: nn.Module = self.network
        taken = []
        for name in parts:
            part = _free_name(at, name, nn.Module)
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
            taken.append(part)
        return at, taken

    def parameter(self, name: str, *, turned: bool = False) -> nn.Parameter:
        """Return the array as a parameter, cached by name; ``turned`` transposes it.

        Vectors of one number are not cached: exporters store equal ones, such as the zero biases of
        several layers, under one name.
        """
        array = self.graph.weights[name]
        made = nn.Parameter(torch.from_numpy(np.array(array.T if turned else array)))
        is_shared = array.ndim > 1 or (array != array[:1]).any()
        return self.parameters.setdefault((name, turned), made) if is_shared else made

    def add_layer(
        self, node: onnx.NodeProto, made: nn.Module, arrays: Sequence[str], read: Sequence[str]
    ) -> None:
        """Append a step that calls the layer on the values ``read``, without its arrays."""
        how = (each.SerializeToString() for each in node.attribute)
        key = (node.op_type, *node.input[1:], *arrays, *how)
        if key not in self.layers:
            self.layers[key] = self._place(self._home(node, arrays), made)
        label = f"{node.op_type} ({node.name or node.output[0]})"
        step = Step(self.layers[key], tuple(read), tuple(node.output)[:1], label)
        self.network._steps.append(step)

    def bias_after(self, node: onnx.NodeProto, size: int) -> tuple[str, onnx.NodeProto] | None:
        """Return the bias array and its Add node if that node is the product's only reader."""
        (out,) = node.output
        after = self.by_input.get(out)
        if self.readers[out] != 1 or after is None or after.op_type != "Add":
            return None
        other = after.input[0] if after.input[1] == out else after.input[1]
        array = self.graph.weights.get(other)
        return (other, after) if array is not None and array.shape == (size,) else None


def _is_made_up(name: str) -> bool:
    """Return whether torch's exporter made up the name, and could give it again."""
    plain = re.sub(r"(_\d+)+$", "", name)
    return plain == "val" or hasattr(torch.ops.aten, plain)


def _free_name(at: nn.Module, name: str, kind: type | None) -> str:
    """Return the name, with underscores appended while another attribute has it."""
    name = name or "value"
    while hasattr(at, name) and not (kind and name in at._modules):
        name += "_"
    return name


_WAY_ON = (
    "Prune the model that the file was exported from, or write the file without this operator; "
    "onnxsim and the exporter's own optimizer fold what is constant."
)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes as numbers, text and arrays."""
    import onnx

    found = {}
    for each in node.attribute:
        value = onnx.helper.get_attribute_value(each)
        if isinstance(value, onnx.TensorProto):
            value = np.array(onnx.numpy_helper.to_array(value))
        elif isinstance(value, bytes):
            value = value.decode()
        found[each.name] = value
    return found


def constant(node: onnx.NodeProto) -> np.ndarray[Any, Any]:
    """Return the array of a Constant node.

    Raises:
        NotImplementedError: the constant is not numeric.
    """
    ((name, value),) = attributes(node).items()
    kind = {"value_float": np.float32, "value_floats": np.float32}.get(name)
    if name.startswith(("value_string", "sparse")):
        raise NotImplementedError(f"a constant given by {name}")
    return np.array(value, dtype=kind)


Layer = Callable[[_Conversion, "onnx.NodeProto", dict[str, Any]], bool]
_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _convolution(c: _Conversion, node: onnx.NodeProto, given: dict[str, Any]) -> bool:
    arrays = [name for name in node.input[1:] if name]
    if not all(map(c._is_array, arrays)):
        raise NotImplementedError("its weight is computed and not an array of the file")
    weight = c.graph.weights[arrays[0]]
    rank = weight.ndim - 2
    pads = given.get("pads", [0] * 2 * rank)
    if given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or rank not in _CONVOLUTIONS:
        return _padded(c, node)
    read = node.input[0]
    if pads[:rank] != pads[rank:]:
        widths = [w for dim in reversed(range(rank)) for w in (pads[dim], pads[rank + dim])]
        read = f"{node.output[0]} padded"
        pad = partial(nn.functional.pad, pad=widths)
        c.network._steps.append(Step(pad, (node.input[0],), (read,), "Pad"))
        pads = [0] * 2 * rank
    groups = given.get("group", 1)
    made = _CONVOLUTIONS[rank](
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        tuple(given.get("strides", [1] * rank)),
        tuple(pads[:rank]),
        tuple(given.get("dilations", [1] * rank)),
        groups,
        bias=len(arrays) > 1,
        device="meta",
    )
    return _filled(c, node, made, arrays, read)


def _padded(c: _Conversion, node: onnx.NodeProto) -> bool:
    """Convert by onnx2pytorch a convolution whose padding depends on the input size."""
    module, _ = c._from_library(node)
    arrays = [name for name in node.input[1:] if name]
    c.add_layer(node, module, arrays, node.input[:1])
    return True


def _filled(
    c: _Conversion, node: onnx.NodeProto, made: nn.Module, arrays: Sequence[str], read: str
) -> bool:
    for leaf, name in zip(("weight", "bias"), arrays, strict=False):
        setattr(made, leaf, c.parameter(name))
    c.add_layer(node, made, arrays, (read,))
    return True


def linear_of(c: _Conversion, node: onnx.NodeProto) -> tuple[str, bool] | None:
    """Return the matrix of a product with one of the file, and whether nn.Linear has it transposed.

    None for other products.
    """
    given, (read, name) = attributes(node), node.input[:2]
    is_plain = not given.get("transA") and {given.get("alpha", 1.0), given.get("beta", 1.0)} == {1}
    of = c.transposes.get(name, name)
    if c._is_array(read) or read in c.transposes or not c._is_matrix(of) or not is_plain:
        return None
    turned = (not given.get("transB", 0)) is (of == name)
    bias = node.input[2] if len(node.input) > 2 else ""
    outputs = c.graph.weights[of].shape[1 if turned else 0]
    if bias and (not c._is_array(bias) or c.graph.weights[bias].shape != (outputs,)):
        return None
    return of, turned


def _linear(c: _Conversion, node: onnx.NodeProto, given: dict[str, Any]) -> bool:
    """Convert a product with a matrix of the file, and a bias added only to it, to nn.Linear."""
    found = linear_of(c, node)
    if found is None or (found[1] and False in c.readings[found[0]]):
        return False
    (name, turned), read = found, node.input[0]
    inputs, outputs = c.graph.weights[name].shape[:: -1 if not turned else 1]
    bias = node.input[2] if len(node.input) > 2 else ""
    after = c.bias_after(node, outputs) if node.op_type == "MatMul" else None
    made = nn.Linear(inputs, outputs, bias=bool(bias or after), device="meta")
    made.weight = c.parameter(name, turned=turned)
    if after is not None:
        bias, add = after
        c.done.add(id(add))
    if bias:
        made.bias = c.parameter(bias)
    arrays = [name, bias] if bias else [name]
    c.add_layer(node, made, arrays, (read,))
    if after is not None:
        last = c.network._steps.pop()
        step = Step(last.operation, last.inputs, tuple(add.output), last.label)
        c.network._steps.append(step)
    return True


def _batch_norm(c: _Conversion, node: onnx.NodeProto, given: dict[str, Any]) -> bool:
    arrays = list(node.input[1:])
    rank = c.graph.ranks.get(node.input[0])
    if rank not in _BATCH_NORMS or not all(map(c._is_array, arrays)):
        return False
    size = c.graph.weights[arrays[0]].shape[0]
    momentum = 1 - given.get("momentum", 0.9)
    made = _BATCH_NORMS[rank](size, given.get("epsilon", 1e-5), momentum)
    for leaf, name in zip(("running_mean", "running_var"), arrays[2:], strict=True):
        setattr(made, leaf, torch.from_numpy(np.array(c.graph.weights[name])))
    return _filled(c, node, made, arrays[:2], node.input[0])


def _layer_norm(c: _Conversion, node: onnx.NodeProto, given: dict[str, Any]) -> bool:
    arrays = [name for name in node.input[1:] if name]
    is_known = all(map(c._is_array, arrays)) and arrays and len(node.output) == 1
    weight = c.graph.weights.get(arrays[0]) if is_known else None
    rank = c.graph.ranks.get(node.input[0])
    axis = given.get("axis", -1)
    if weight is None or rank is None or weight.ndim != rank - axis % rank:
        return False
    sizes = tuple(weight.shape)
    made = nn.LayerNorm(sizes, given.get("epsilon", 1e-5), bias=len(arrays) > 1, device="meta")
    return _filled(c, node, made, arrays, node.input[0])


_LAYERS: dict[str, Layer] = {
    "Conv": _convolution,
    "Gemm": _linear,
    "MatMul": _linear,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
}
