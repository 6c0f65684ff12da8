"""The file of a smaller model in float16 or bfloat16, and its comparison with float32.

It is not certified itself. It is compared with the file in float32, which is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import torch
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx.numpy_helper import from_array, to_array
from onnx_ir.passes.common import TopologicalSortPass

from l0prune.capture.example_inputs import examples_in
from l0prune.errors import L0pruneError, UsageError, first_line
from l0prune.exporting.certify.dtypes import cast
from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.derived import DERIVED, Derived, InFloat32, check_in_one
from l0prune.exporting.onnx.differences import Differences, Outputs, as_texts, differences
from l0prune.exporting.onnx.external import LARGEST, move_out
from l0prune.exporting.onnx.file import rename_values
from l0prune.exporting.onnx.times import Times, as_text, times_beside
from l0prune.exporting.pieces import ExportedPart
from l0prune.files.onnx_session import session_of
from l0prune.progress.stages import stage

_FIRST_OF_BFLOAT16 = 22  # opset; before it convolutions do not take bfloat16
_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_LARGE = 0.1  # errors above this give a warning


@dataclass(frozen=True)
class Half:
    """Comparison of a file in 16 bits with the file in float32 that it was made from.

    Attributes:
        dtype: ``float16`` or ``bfloat16``.
        errors: by output, the root mean square of the difference over that of the output, where
            each operator computes in float32 and its result is rounded; None for whole numbers.
        agreement: by output, the share of examples (or places) with the same largest score.
        compared: examples, those of the certificate.
        too_large: weights beyond the range of float16, which are clipped to it.
        bytes: of the file, weights included, and of the one in float32.
        times: of the two files in turns; ``dense`` are those of the one in float32. None where
            ONNX Runtime has no such operators for this processor, or nothing was to be timed.
        beside_dense: of the dense network's file in float32 and of this one; None if unknown.
        is_run: whether ONNX Runtime has its operators for this processor.
    """

    dtype: str
    errors: Mapping[str, float | None]
    agreement: Mapping[str, float]
    compared: int
    too_large: tuple[str, ...]
    bytes: tuple[int, int]
    times: Times | None
    beside_dense: Times | None = None
    is_run: bool = True

    @property
    def warnings(self) -> list[str]:
        """Return warnings about weights and errors of the file; empty if there are none."""
        found = []
        if self.too_large:
            found.append(
                f"these weights are larger than float16 can hold, and were cut to 65,504: "
                f"{', '.join(self.too_large[:3])}. Take bfloat16"
            )
        worst = max((e for e in self.errors.values() if e is not None), default=0.0)
        if worst > _LARGE:
            other = ", or bfloat16, which has float32's range" * (self.dtype == "float16")
            found.append(
                f"{self.dtype} changes the outputs by {worst:.0%}. The usual causes are values "
                f"that 16 bits cannot hold and differences of large sums: serve float32{other}"
            )
        return found

    def __str__(self) -> str:
        parts = as_texts(self.errors, self.agreement)
        size = f"{self.bytes[0] / max(1, self.bytes[1]):.0%} of the bytes"
        times = as_text(self.times, self.beside_dense) or "not timed"
        if not self.is_run:
            times = "not run: ONNX Runtime has no such operators for this processor"
        return f"{'; '.join(parts)} ({self.compared} examples); {size}; {times}"

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return asdict(self)


class HalfFile(Derived):
    """File in 16 bits beside one in float32, as ``exporting/onnx/derived.py`` has it."""

    keyword, also = "dtype", ("half_io",)

    def __init__(
        self,
        given: str | torch.dtype,
        opset: int | None,
        pieces: Sequence[ExportedPart],
        half_io: bool = False,
    ) -> None:
        """Take what an export is to be written as.

        Args:
            given: ``float16`` or ``bfloat16``.
            opset: that was asked for; None for the exporter's own choice.
            pieces: of the export.
            half_io: whether inputs and outputs are in this dtype, too.

        Raises:
            UsageError: the dtype is unknown, operators take it in later opsets only, or the model
                is captured in parts.
        """
        dtype = str(given).removeprefix("torch.")
        if dtype not in _TYPES:
            raise UsageError(f"dtype={dtype!r}: beside float32 a file is in {' or '.join(_TYPES)}")
        way_on = "convert each of them (onnxruntime.transformers.float16)"
        check_in_one(pieces, f"a file in {dtype}", way_on)
        if dtype == "bfloat16":
            opset = opset or _FIRST_OF_BFLOAT16
            if opset < _FIRST_OF_BFLOAT16:
                raise UsageError(
                    f"opset {opset} has no convolutions in bfloat16: give {_FIRST_OF_BFLOAT16} or "
                    "more, or leave opset out"
                )
        self.name, self.opset, self._half_io = dtype, opset, half_io

    def write(self, proven: InFloat32, target: Path, data: Path) -> Half:
        """Write the file from the one in float32, and compare the two.

        Args:
            proven: the file in float32.
            target: path of the file in 16 bits.
            data: path of its weights, beside ``target``, if those of ``proven`` are in a separate
                file.

        Raises:
            UsageError: the weights are too many for the converter.
            L0pruneError: ONNX Runtime rejects the file.
        """
        dtype, single = self.name, onnx.load(str(proven.path))
        if single.ByteSize() > LARGEST:
            raise UsageError(
                f"a file of more than 2 GB in float32 is not converted to {dtype}: ONNX Runtime's "
                "converter holds it in one message. Export without dtype"
            )
        with stage(f"converting the file to {dtype}"):
            made, too_large = in_half(single, dtype, half_io=self._half_io)
            converted = onnx_ir.from_proto(made)
            if proven.is_apart:
                move_out(converted, data)
            target.write_bytes(onnx_ir.to_proto(converted).SerializeToString())
        with stage(f"comparing the file in {dtype} with the one in float32"):
            errors, agreement = _differences(single, dtype, proven.piece)
        is_run = _is_run(target, proven.threads)
        times, beside_dense = None, None
        if is_run and proven.is_timed:
            with stage("timing the file in 16 bits beside the one in float32"):
                found = (target, proven.path, proven.dense, proven.piece, proven.threads)
                times, beside_dense = times_beside(*found)
        about_it = Half(
            dtype=dtype,
            errors=errors,
            agreement=agreement,
            compared=sum(examples_in(answer.inputs) for answer in proven.piece.answers),
            too_large=tuple(too_large),
            bytes=(made.ByteSize(), single.ByteSize()),
            times=times,
            beside_dense=beside_dense,
            is_run=is_run,
        )
        proven.describe(target, **{dtype: json.dumps(about_it.to_dict())})
        return about_it


DERIVED["dtype"] = DERIVED["half_io"] = HalfFile


def in_half(
    single: ModelProto, dtype: str, *, half_io: bool = False
) -> tuple[ModelProto, list[str]]:
    """Convert a file to 16 bits by ONNX Runtime's converter; also return weights out of range.

    The converter knows float16, and which operators have to stay in float32. For bfloat16 the
    types in its result are replaced, and weights are rounded from float32.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    source = ModelProto()
    source.CopyFrom(single)
    made = convert_float_to_float16(source, keep_io_types=False)
    before, too_large = dict(_tensors(single.graph)), []
    for key, tensor in _tensors(made.graph):
        if tensor.data_type != TensorProto.FLOAT16:
            continue
        if dtype == "float16":
            wide = to_array(before[key]) if key in before else np.zeros(())
            size = np.abs(wide[np.isfinite(wide)])
            too_large += [key] if (size > np.finfo(np.float16).max).any() else []
        else:
            values = to_array(before.get(key, tensor)).astype(_NUMPY[dtype])
            tensor.CopyFrom(from_array(values, tensor.name))
    if dtype != "float16":
        _retype(made.graph, _TYPES[dtype])
    if not half_io:
        _cast_at_borders(made.graph, _TYPES[dtype])
    del made.metadata_props[:]  # facts about the file in float32
    sorted_ = onnx_ir.from_proto(made)
    TopologicalSortPass()(sorted_)
    return onnx_ir.to_proto(sorted_), too_large


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g


def _tensors(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield the constants of a graph and its subgraphs, by name or by the node's output."""
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield f"{node.output[0]}:{attribute.name}", attribute.t
        for inner in _subgraphs(node):
            yield from _tensors(inner)


def _retype(graph: GraphProto, to: int) -> None:
    """Replace float16 by another type, in place, in all but the constants."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = to
    for node in graph.node:
        for attribute in node.attribute:
            names = ("to", "dtype")
            if attribute.name in names and attribute.i == TensorProto.FLOAT16:
                attribute.i = to
        for inner in _subgraphs(node):
            _retype(inner, to)


def _cast_at_borders(graph: GraphProto, half: int) -> None:
    """Make the inputs and outputs of a graph float32, in place, by casts."""
    first: list[NodeProto] = []
    last: list[NodeProto] = []
    for values, nodes in ((graph.input, first), (graph.output, last)):
        for value in values:
            if value.type.tensor_type.elem_type != half:
                continue
            name, inside = value.name, f"{value.name}_{TensorProto.DataType.Name(half).lower()}"
            rename_values(graph, {name: inside})
            value.name, value.type.tensor_type.elem_type = name, TensorProto.FLOAT
            ends = (name, inside, half) if nodes is first else (inside, name, TensorProto.FLOAT)
            nodes.append(helper.make_node("Cast", ends[:1], ends[1:2], to=ends[2]))
    given = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(given)


def rounded(single: ModelProto, dtype: str) -> ModelProto:
    """Return a file that computes in float32 and rounds the result of each operator to 16 bits."""
    made = onnx.shape_inference.infer_shapes(single)
    for _, tensor in _tensors(made.graph):
        if tensor.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                values = to_array(tensor).astype(_NUMPY[dtype]).astype(np.float32)
            tensor.CopyFrom(from_array(values, tensor.name))
    _round_results(made.graph, _TYPES[dtype], frozenset())
    return made


def _round_results(graph: GraphProto, half: int, known: Collection[str]) -> None:
    values = (*graph.input, *graph.output, *graph.value_info)
    floats = {
        *known,
        *(v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT),
    }
    nodes = []
    for node in graph.node:
        for inner in _subgraphs(node):
            _round_results(inner, half, floats)
        nodes.append(node)
        for number, name in enumerate(node.output):
            if name in floats:
                node.output[number] = f"{name}_exact"
                ends = (f"{name}_exact", f"{name}_rounded", name)
                nodes.append(helper.make_node("Cast", ends[:1], ends[1:2], to=half))
                nodes.append(helper.make_node("Cast", ends[1:2], ends[2:], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def _differences(single: ModelProto, dtype: str, piece: ExportedPart) -> Differences:
    """Return errors and agreement under rounding, on the certificate's inputs."""
    names = [each.name for each in single.graph.output]
    found: list[Sequence[Outputs]] = []
    for model in (single, rounded(single, dtype)):
        # The optimizer would remove a cast and its reverse.
        session = session_of(model.SerializeToString(), optimizes=False)
        given = [each.name for each in session.get_inputs()]
        answers = []
        for answer in piece.answers:
            leaves = piece.read(cast(answer.inputs, torch.float32))
            arrays = (torch.as_tensor(leaf).numpy() for leaf in leaves)
            feed = dict(zip(given, arrays, strict=True))
            if model is not single:
                feed = {name: _rounded_array(array, dtype) for name, array in feed.items()}
            answers.append(session.run(None, feed))
        found.append(answers)
    return differences(names, *found)


def _rounded_array(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    return array.astype(_NUMPY[dtype]).astype(array.dtype) if array.dtype == np.float32 else array


def _is_run(target: Path, threads: int) -> bool:
    """Return whether ONNX Runtime has a file's operators in 16 bits for this processor.

    Raises:
        L0pruneError: ONNX Runtime rejects the file for another reason.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoOperator

    try:
        collect.Network(target, threads, collect.CPU)
    except NoOperator:
        return False
    except Exception as error:  # of ONNX Runtime's classes
        raise L0pruneError(
            f"ONNX Runtime cannot run the file in 16 bits, so it was not written: "
            f"{first_line(error)}. The one in float32 is fine: leave dtype out"
        ) from error
    return True
