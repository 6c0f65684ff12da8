"""Layers of an int8 file that are computed in float32 since that is faster, by measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.profile import profiled_call
from l0prune.exporting.onnx.times import Given, feed_of, in_turns
from l0prune.features.int8.float_regions import (
    Conversion,
    NodeTimes,
    in_float32,
    operators_of,
)
from l0prune.features.int8.quantizer import MULTIPLYING

FASTER = 1.02  # less is no gain
WORTH = 0.95  # a file with more in float32 takes at most this share of the others' times
_TRIED = 2  # files, each by the times of the one before
_SECONDS = 1.0  # of the turns of all files, about
_PROFILED = 0.06  # seconds of the calls for a profile, about
_LARGEST = 127
_FEW = 1024  # elements of a weight that is not worth two nodes
_SINGLE, _EVERYWHERE = "float32", "everywhere"


@dataclass(frozen=True)
class Speed:
    """Milliseconds of an int8 file beside others, with what is in float32 for them.

    Attributes:
        float32: of the file in float32.
        everywhere: with all in eight bits that the error allows.
        chosen: of the file that was chosen.
        is_all: whether all is computed in float32, since nothing is faster.
    """

    float32: float
    everywhere: float
    chosen: float
    is_all: bool = False


class Fastest:
    """Choice of the nodes of an int8 file that are computed in float32 since that is faster.

    Args:
        single: the file in float32.
        make: function from the names of nodes in float32 to the int8 file.
        may: names of the nodes that may be in eight bits, in order.
        given: inputs of a call, in order.
        threads: that a call may use.
        folder: for files that are tried.
    """

    def __init__(
        self,
        single: ModelProto,
        make: Callable[[Collection[str]], ModelProto],
        may: Sequence[str],
        given: Given,
        threads: int,
        folder: Path,
    ) -> None:
        self._single, self._make, self._may = single, make, may
        self._given, self._threads, self._folder = given, threads, folder
        self._inputs = {
            each.name: array.size
            for each, array in zip(single.graph.input, given, strict=True)
            if array.dtype == np.float32
        }

    def run(self) -> tuple[list[str], Speed]:
        """Return the names of the nodes in float32, and the times of the file."""
        tried: dict[str, frozenset[str]] = {_EVERYWHERE: frozenset()}
        self._write(_SINGLE, self._single)
        self._write(_EVERYWHERE, self._make(()))
        single, whole = map(self._profile, (_SINGLE, _EVERYWHERE))
        fixed = {node.name for node in self._single.graph.node if node.name in whole.ms}
        fixed -= whole.on_integers
        for number in range(_TRIED):
            chosen = self._cut(single, whole, fixed) & {*self._may}
            if chosen in tried.values() or chosen >= {*self._may}:
                break
            tried[name := f"tried {number}"] = chosen
            self._write(name, self._make(chosen))
            found = self._profile(name)
            in_single = chosen | fixed
            single.ms |= {each: found.ms.get(each, 0.0) for each in in_single}
            own = {each.name for each in self._single.graph.node} - in_single
            whole.ms |= {each: found.ms[each] for each in own & found.ms.keys()}
            whole.on_integers |= found.on_integers
            whole.conversions += found.conversions
            whole.layouts += found.layouts
            fixed |= (own & found.ms.keys()) - found.on_integers
        return self._fastest(tried)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.onnx"

    def _write(self, name: str, model: ModelProto) -> None:
        self._path(name).write_bytes(model.SerializeToString())

    def _median(self, name: str) -> Callable[[int], float]:
        return _median(self._path(name), self._given, self._threads)

    def _profile(self, name: str) -> NodeTimes:
        """Return the times of a file's nodes."""
        median = self._median(name)
        ms = median(collect.runs(min(median(1), median(1))))
        call = profiled_call(self._path(name), self._given, self._threads, ms, _PROFILED)
        return NodeTimes.of(*call, ms)

    def _cut(self, single: NodeTimes, whole: NodeTimes, fixed: Collection[str]) -> frozenset[str]:
        """Return the nodes that are in float32 in the fastest file, by these times."""
        graph = self._single.graph
        operators = operators_of(graph, single, whole, fixed)
        conversions = (
            Conversion.of(whole.conversions),
            Conversion.of([*single.layouts, *whole.layouts]),
        )
        outputs = [each.name for each in graph.output]
        return in_float32(operators, conversions, self._inputs, outputs)

    def _fastest(self, tried: Mapping[str, frozenset[str]]) -> tuple[list[str], Speed]:
        """Return the nodes in float32 of the fastest file that was tried, and its times."""
        ms, of_single = _in_turns({name: self._median(name) for name in (_SINGLE, *tried)})
        everywhere, best = of_single[_EVERYWHERE], min(tried, key=of_single.__getitem__)
        if of_single[best] <= WORTH * min(everywhere, ms):
            slow = [name for name in self._may if name in tried[best]]
            return slow, Speed(ms, everywhere, of_single[best])
        if everywhere * FASTER <= ms:
            return [], Speed(ms, everywhere, everywhere)
        return [*self._may], Speed(ms, everywhere, ms, is_all=True)


class InTurns(NamedTuple):
    """Milliseconds of files that took turns.

    Attributes:
        float32: of the file in float32.
        of: of the others, by name.
    """

    float32: float
    of: dict[str, float]


def ms_of(
    single: ModelProto,
    models: Mapping[str, ModelProto],
    given: Given,
    threads: int,
    folder: Path,
) -> InTurns:
    """Return the times of files beside the one in float32.

    Args:
        single: the file in float32.
        models: files by name.
        given: inputs of a call, in order.
        threads: that a call may use.
        folder: for the files.
    """
    medians = {}
    for name, model in {_SINGLE: single, **models}.items():
        path = folder / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        medians[name] = _median(path, given, threads)
    return _in_turns(medians)


def _median(path: Path, given: Given, threads: int) -> Callable[[int], float]:
    network = collect.Network(path, threads, collect.CPU)
    return partial(network.median, feed_of(network, given))


def _in_turns(medians: Mapping[str, Callable[[int], float]]) -> InTurns:
    turns = in_turns(medians, _SECONDS)
    ms = collect.typical(turns[_SINGLE])
    others = turns.keys() - {_SINGLE}
    return InTurns(ms, {name: ms * collect.share(turns[name], turns[_SINGLE]) for name in others})


def with_small_weights(model: ModelProto, names: Collection[str]) -> None:
    """Store the weights of layers in float32 in eight bits, with a scale for each output, in place.

    Runtimes multiply them by their scales once, when they load the file. A DequantizeLinear would
    run in each call.

    Args:
        model: the file.
        names: of the layers' nodes.
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    axes: dict[str, set[int | None]] = defaultdict(set)
    for node in graph.node:
        for place, name in enumerate(node.input):
            is_weight = place == 1 and node.op_type in MULTIPLYING and node.name in names
            is_weight &= name in tensors
            axes[name].add(_outputs_axis(node, len(tensors[name].dims)) if is_weight else None)
    made: list[NodeProto] = []
    for name, tensor in tensors.items():
        (axis, *others) = axes.get(name) or {None}
        if others or axis is None or prod(tensor.dims) < _FEW:
            continue
        value = numpy_helper.to_array(tensor)
        over = tuple(each for each in range(value.ndim) if each != axis)
        steps = np.abs(value).max(over, keepdims=True) / np.float32(_LARGEST)
        steps[steps == 0] = 1
        parts = {"whole": np.round(value / steps).astype(np.int8), "steps": steps}
        whole, scale = (f"{name}_{what}" for what in parts)
        graph.initializer.remove(tensor)
        graph.initializer.extend(
            numpy_helper.from_array(part, f"{name}_{what}") for what, part in parts.items()
        )
        wide = f"{name}_wide"
        made.append(helper.make_node("Cast", [whole], [wide], to=TensorProto.FLOAT))
        made.append(helper.make_node("Mul", [wide, scale], [name]))
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _outputs_axis(node: NodeProto, rank: int) -> int | None:
    """Return the axis of a weight that its layer's outputs are along; None for no matrix."""
    if rank < 2:
        return None
    if node.op_type in ("Conv", "ConvTranspose"):
        return int(node.op_type == "ConvTranspose")
    is_transposed = any(each.name == "transB" and each.i for each in node.attribute)
    return rank - 2 if is_transposed else rank - 1
