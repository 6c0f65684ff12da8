"""Static quantization of an ONNX file to eight bits, by ONNX Runtime's quantizer.

Weights are int8 with a scale for each output; activations are uint8 on x86, whose instructions
multiply uint8 by int8, and int8 elsewhere. Quantized values pass a QuantizeLinear and a
DequantizeLinear, which ONNX Runtime fuses into operators on integers. An LSTM has no such form: it
takes the range of its input, and of its state at each step, in each call (DynamicQuantizeLSTM).
"""

from __future__ import annotations

import platform
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from l0prune.capture.compat import replaced
from l0prune.capture.threads import muted
from l0prune.errors import L0pruneError, first_line, warn
from l0prune.exporting.onnx.collect import processor_flags
from l0prune.exporting.onnx.profile import owner_of
from l0prune.features.int8.integer_forms import in_integers

Feed = dict[str, np.ndarray[Any, Any]]
"""Inputs of one call of a file, by name."""

FIRST_OPSET = 13  # before it there is no scale for each output
MULTIPLYING = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
RECURRENT = "LSTM"
LAYERS = MULTIPLYING | {RECURRENT}
MINMAX, ENTROPY = "minmax", "entropy"
PERCENTILES = {f"percentile {share:g}": share for share in (99.999, 99.99, 99.9)}
METHODS = (MINMAX, *PERCENTILES, ENTROPY)
_BINS = 2048
_LARGEST = np.finfo(np.float32).max / 4  # beyond it, no range around 0 is finite in float32
_MOVING = frozenset(
    ("Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice")
)
_UNLIKE = 8  # the least would have five of eight bits
_MANY = 500  # values for which no range is searched by entropy: one takes about a tenth of a second
_COARSE = 256  # bins for the search by entropy, about
_HIDDEN = "HiddenGemm"  # operator that no quantizer knows


def is_x86() -> bool:
    """Return whether this processor is of the x86 family."""
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def has_dot_products() -> bool:
    """Return whether this processor multiplies and adds bytes in one instruction.

    On x86 that is VNNI. Without it sums of two products saturate, so that weights get 7 bits.
    True where the system does not list the flags.
    """
    flags = processor_flags()
    return not (flags and is_x86()) or any(re.search("vnni|amx_int8", flag) for flag in flags)


@dataclass
class Quantizer:
    """Quantizer of one file in float32, with its calibrated ranges.

    Attributes:
        model: the file, as ONNX Runtime's preprocessing leaves it.
        nodes: names of the nodes that can be quantized, by operator.
        ranges: of all values, by method of calibration, as ONNX Runtime's quantizer takes them.
        unfit: names of the nodes that stay in float32: those with values that no range holds, as
            masks of attentions, which are -inf where nothing may be read, or float32's least
            number; and those of outputs that one scale would be too coarse for (``unlike_joined``).
        is_joined: whether there are some of the latter.
        paths: of the nodes' modules, by name, as far as known: ONNX Runtime's preprocessing drops
            what the exporter says about nodes.
    """

    model: ModelProto
    nodes: dict[str, list[str]]
    ranges: Mapping[str, Any] = field(repr=False)
    unfit: Sequence[str] = ()
    is_joined: bool = False
    paths: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, path: Path, feeds: Sequence[Feed], folder: Path, methods: Collection[str] = METHODS
    ) -> Quantizer:
        """Prepare a file for quantization, and calibrate it.

        Args:
            path: of the file.
            feeds: calibration inputs.
            folder: for temporary files.
            methods: of calibration.

        Raises:
            L0pruneError: ONNX Runtime cannot do it.
        """
        from onnxruntime.quantization import quant_pre_process  # loads slowly, as do the next ones
        from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

        plain, ready = folder / "plain.onnx", folder / "ready.onnx"
        model = onnx.load(str(path))
        pool_means(model)
        name_nodes(model)
        paths = {node.name: owner_of(node) for node in model.graph.node}
        onnx.save(model, str(plain))
        with muted(), explained("prepare"):
            try:
                with _no_stray_files():
                    quant_pre_process(str(plain), str(ready))
            except Exception:  # its inference of symbolic shapes does not know every operator
                quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
            model = onnx.load(str(ready))
            name_nodes(model)
            onnx.save(model, str(ready))
            ranges, values = _ranges(ready, feeds, folder, methods)
        unfit = [n.name for n in model.graph.node if not values.isdisjoint((*n.input, *n.output))]
        unfit += (joined := unlike_joined(model, ranges[MINMAX]))
        recurrent, nodes = recurrent_in(model), dict[str, list[str]]()
        for node in model.graph.node:
            is_known = node.op_type in QLinearOpsRegistry or node.op_type in QDQRegistry
            if (is_known or node.name in recurrent) and node.name not in unfit:
                nodes.setdefault(node.op_type, []).append(node.name)
        return cls(model, nodes, ranges, unfit, bool(joined), paths)

    def layer_of(self, name: str) -> str:
        """Return the path of a node's module; the node's name where that is unknown."""
        return self.paths.get(name) or name

    def quantized(self, method: str = MINMAX, kept: Collection[str] = ()) -> ModelProto:
        """Return the quantized file.

        Args:
            method: of calibration, one of ``METHODS``.
            kept: names of nodes that stay in float32.

        Raises:
            L0pruneError: ONNX Runtime cannot do it.
        """
        from onnxruntime.quantization import QDQQuantizer, QuantType

        recurrent = [name for name in self.nodes.get(RECURRENT, ()) if name not in kept]
        copied = with_ranges_of_each_call(self.model, recurrent)
        with muted(), explained("quantize"):
            quantizer = QDQQuantizer(
                copied,
                per_channel=True,
                reduce_range=not has_dot_products(),
                weight_qType=QuantType.QInt8,
                activation_qType=QuantType.QUInt8 if is_x86() else QuantType.QInt8,
                tensors_range=self.ranges[method],
                nodes_to_quantize=[],
                nodes_to_exclude=[*kept, *self.unfit],
                op_types_to_quantize=[kind for kind in self.nodes if kind != RECURRENT],
                extra_options={},
            )
            quantizer.quantize_model()
            in_integers(quantizer.model.model)
            return in_order(quantizer.model.model)


def recurrent_in(model: ModelProto) -> set[str]:
    """Return the names of the LSTMs whose weights are constants that nothing else reads."""
    readers = Counter(name for node in model.graph.node for name in node.input)
    constants = {tensor.name for tensor in model.graph.initializer if readers[tensor.name] == 1}
    return {
        node.name
        for node in model.graph.node
        if node.op_type == RECURRENT
        and constants.issuperset(node.input[1:3])
        and not any(each.name == "layout" and each.i for each in node.attribute)
    }


def with_ranges_of_each_call(model: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return a copy of a file with layers in eight bits whose inputs get their range in each call.

    Args:
        model: the file in float32.
        names: of nodes, which are LSTMs, MatMuls by a constant, or Gemms.

    Raises:
        L0pruneError: ONNX Runtime cannot do it.
    """
    from onnxruntime.quantization import QuantizationMode, QuantType  # loads slowly
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer

    copied = ModelProto()
    copied.CopyFrom(model)
    if not names:
        return copied
    whole = [n for n in copied.graph.node if n.op_type == "Gemm" and n.name not in names]
    for node in whole:
        node.op_type = _HIDDEN  # the quantizer splits all Gemms
    with muted(), explained("quantize"):
        quantizer = ONNXQuantizer(
            copied,
            per_channel=True,
            reduce_range=not has_dot_products(),
            mode=QuantizationMode.IntegerOps,
            static=False,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=None,
            # a Gemm becomes a MatMul of this name, and an Add
            nodes_to_quantize=[*names, *(f"{name}_MatMul" for name in names)],
            nodes_to_exclude=[],
            op_types_to_quantize=["MatMul", RECURRENT],
            extra_options={"MatMulConstBOnly": True},
        )
        quantizer.quantize_model()
        for node in quantizer.model.model.graph.node:
            if node.op_type == "DynamicQuantizeLSTM":
                node.name = node.name.removesuffix("_quant")
            elif node.op_type == _HIDDEN:
                node.op_type = "Gemm"
        return in_order(quantizer.model.model)


def unlike_joined(model: ModelProto, ranges: Any) -> list[str]:
    """Return the nodes that join values of unlike sizes into an output, and that move it there.

    A detector joins the corners of boxes and the scores of classes: in one scale the scores, of 1
    at most beside hundreds, would all be 0.

    Args:
        model: the file.
        ranges: of its values, by name.
    """
    readers: dict[str, list[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.name)
    outputs, last = {each.name for each in model.graph.output}, set[str]()
    for node in reversed(model.graph.node):
        if node.op_type in {*_MOVING, "Concat"} and all(
            name in outputs or last.issuperset(readers.get(name, ())) for name in node.output
        ):
            last.add(node.name)
    found, unlike = [], set[str]()
    for node in model.graph.node:
        known = (ranges[name].range_value for name in node.input if name in ranges)
        sizes = [size for pair in known if (size := float(np.abs(pair).max()))]
        is_unlike = bool(sizes) and max(sizes) > _UNLIKE * min(sizes) and node.op_type == "Concat"
        if node.name in last and (is_unlike or not unlike.isdisjoint(node.input)):
            found.append(node.name)
            unlike.update(node.output)
    return found


def in_order(model: ModelProto) -> ModelProto:
    """Return a file with the nodes in topological order, as ONNX requires.

    The quantizer appends the nodes that it adds.
    """
    import onnx_ir

    sorted_ = onnx_ir.from_proto(model)
    sorted_.graph.sort()
    return onnx_ir.to_proto(sorted_)


def in_int8(model: ModelProto, inputs: Feed, *, is_standard: bool = False) -> ModelProto:
    """Return a file in eight bits for timing only: its ranges are those of one call.

    Args:
        model: the file in float32.
        inputs: of the call.
        is_standard: whether only operators of ONNX itself are in it, and LSTMs stay in float32.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, str(path))
        quantizer = Quantizer.of(path, [inputs], Path(folder), (MINMAX,))
        kept = quantizer.nodes.get(RECURRENT, ()) if is_standard else ()
        return quantizer.quantized(kept=kept)


def int8_for_times(*, is_standard: bool = False) -> Callable[[ModelProto, Feed], ModelProto]:
    """Return ``in_int8``; warn if times of int8 here do not hold elsewhere."""
    if not has_dot_products():
        warn(
            "this processor has no VNNI instructions: times of int8 files here say nothing of "
            "those on one that has. Measure on a machine like the one that will serve"
        )
    return partial(in_int8, is_standard=is_standard)


@contextmanager
def _no_stray_files() -> Iterator[None]:
    """Keep the inference of symbolic shapes from saving the file that it fails at where we are."""
    from onnxruntime.tools import symbolic_shape_infer

    silent = SimpleNamespace(**{**vars(onnx), "save_model": lambda *args, **kwargs: None})
    with replaced(symbolic_shape_infer, "onnx", silent):
        yield


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise errors of ONNX Runtime's quantizer within the context as L0pruneError."""
    try:
        yield
    except Exception as error:  # of many classes
        raise L0pruneError(
            f"ONNX Runtime's quantizer cannot {what} this network: {type(error).__name__}: "
            f"{first_line(error)}. The file in float32 is fine: leave int8 out"
        ) from error


def pool_means(model: ModelProto) -> None:
    """Replace means over all positions of feature maps by GlobalAveragePool, in place.

    Torch's exporter writes ReduceMean, which ONNX Runtime has in float32 only: one in the middle
    of a network costs a conversion to float32 and back.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    dims = _dims(model)
    for node in model.graph.node:
        if node.op_type != "ReduceMean":
            continue
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        axes = given.get("axes")
        if len(node.input) == 2 and node.input[1] in tensors:
            axes = numpy_helper.to_array(tensors[node.input[1]]).tolist()
        rank = dims.get(node.input[0], 0)
        places = set(range(2, rank))
        if (
            places
            and axes
            and {axis % rank for axis in axes} == places
            and given.get("keepdims", 1)
        ):
            del node.input[1:], node.attribute[:]
            node.op_type = "GlobalAveragePool"
    read = {name for node in model.graph.node for name in node.input}
    read |= {output.name for output in model.graph.output}
    for name in tensors.keys() - read:
        model.graph.initializer.remove(tensors[name])


def _dims(model: ModelProto) -> dict[str, int]:
    """Return the number of dims of each value, where it is known."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {each.name: len(each.type.tensor_type.shape.dim) for each in values}


def name_nodes(model: ModelProto) -> None:
    """Give each node a unique name, in place: the quantizer refers to nodes by name."""
    taken: set[str] = set()
    for number, node in enumerate(model.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{number}"
        while node.name in taken:
            node.name += "_"
        taken.add(node.name)


def read_by(node: NodeProto) -> Iterator[str]:
    """Yield the names of the values that a node and its subgraphs read."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from read_by(inner)


def _ranges(
    path: Path, feeds: Sequence[Feed], folder: Path, methods: Collection[str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the ranges of all values by these methods, and the names of infinite values.

    There is one pass over the feeds.
    """
    from onnxruntime.quantization import CalibrationMethod, TensorsData, create_calibrator

    calibrator = create_calibrator(
        path,
        augmented_model_path=str(folder / "augmented.onnx"),
        calibrate_method=CalibrationMethod.Percentile,
        extra_options={"symmetric": False, "num_bins": _BINS},
    )
    calibrator.collector = collector = _collector()
    for feed in feeds:  # one at a time: all outputs of a call are in memory
        calibrator.collect_data(_Reader(feed))
    seen = collector.get_histogram_dict()
    limits = {name: (least, most) for name, (_, _, least, most, _) in seen.items()}
    found = {MINMAX: TensorsData(CalibrationMethod.MinMax, limits)}
    for name in PERCENTILES.keys() & methods:
        collector.percentile = PERCENTILES[name]
        found[name] = calibrator.compute_data()
    if ENTROPY in methods and len(seen) <= _MANY:
        seen |= {name: _coarser(histogram) for name, histogram in seen.items()}
        collector.method, collector.num_quantized_bins = ENTROPY, 128
        found[ENTROPY] = calibrator.compute_data()
    return found, collector.infinite


def _collector() -> Any:
    """Return a collector of histograms that leaves out values for which there is no range."""
    from onnxruntime.quantization.calibrate import HistogramCollector

    class Collector(HistogramCollector):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(
                method="percentile",
                symmetric=False,
                num_bins=_BINS,
                num_quantized_bins=_BINS,
                percentile=max(PERCENTILES.values()),
                scenario="same",
            )
            self.infinite: set[str] = set()

        def collect(self, values: Mapping[str, list[Any]]) -> None:
            """Add the values of one call."""
            for name, arrays in values.items():
                if not all((np.abs(array) <= _LARGEST).all() for array in arrays):
                    self.infinite.add(name)
                    self.histogram_dict.pop(name, None)
            super().collect({k: v for k, v in values.items() if k not in self.infinite})

    return Collector()


def _coarser(histogram: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a histogram of ``_COARSE`` bins or a few more, for the search that tries all pairs.

    A histogram has more than ``_BINS`` if values grew from call to call.
    """
    counts, edges, *rest = histogram
    together = max(1, len(counts) // _COARSE)
    whole = len(counts) // together * together
    first = (len(counts) - whole) // 2  # it is symmetric; the outer bins hold outliers
    sums = counts[first : first + whole].reshape(-1, together).sum(1)
    sums[0], sums[-1] = sums[0] + counts[:first].sum(), sums[-1] + counts[first + whole :].sum()
    return (sums, edges[first : first + whole + 1 : together], *rest)


class _Reader:
    """Reader of a single feed, as ONNX Runtime's calibrators take it."""

    def __init__(self, feed: Feed) -> None:
        self._left = iter((feed,))

    def get_next(self) -> Feed | None:
        """Return the feed once, then None."""
        return next(self._left, None)
