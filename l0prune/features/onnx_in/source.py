"""ONNX files as models: read as untrusted input, converted to torch, and verified.

A converted network is compared with its file, run by ONNX Runtime, before it is returned.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from l0prune.capture.last_place import RUNS, TIMES, MovedResults, moved
from l0prune.capture.threads import one_at_a_time
from l0prune.errors import FileError, UsageError, first_line
from l0prune.features.onnx_in.conversion import Graph, constant, network_of
from l0prune.features.onnx_in.folding import folded
from l0prune.features.onnx_in.network import OnnxNetwork, identifier
from l0prune.files.consent import SOURCES
from l0prune.files.onnx_session import session_of
from l0prune.files.source_file import SourceFile

if TYPE_CHECKING:
    import onnx

_OWN_DOMAINS = ("", "ai.onnx")
_LOOPS = ("If", "Loop", "Scan", "SequenceMap")
_QUANTIZED = re.compile(r"(Quantize|Dequantize|DynamicQuantize)Linear|QLinear\w+|\w+Integer")
_FIRST_OPSET = 7
_MAX_ELEMENTS = 2**31  # of any value that the graph computes
# Sizes of free dims, tried in this order until ONNX Runtime runs the file.
_SIZES = {"f": (224, 256, 128, 64, 32, 16, 512, 640, 16000), "i": (16, 32, 64, 128, 8, 1)}
_SAMPLES = (16000, 8000, 512)  # before these: of a sound, of which 224 samples say little
# Standard deviations of random floats, and exclusive upper bounds of random integers.
_SCALES = ((1.0, 2), (10.0, 256), (0.1, 16))
# Relative to the largest output: the usual tolerance, and the most where float32 rounds more.
_TOLERANCE, _LARGEST = 1e-5, 1e-4
_TOLD = 1e-3  # outputs that differ by more depend on the input


@dataclass(frozen=True)
class Given:
    """Declared input of the file: its dtype, and for each dim the size or a free size's name."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


def load_onnx(path: str) -> OnnxNetwork:
    """Return a network that computes what the ONNX file does, with its weights.

    Raises:
        FileError: the file is missing, damaged, reaches beyond its folder, or has an operator that
            cannot be converted; or the network does not compute what the file does.
        UsageError: onnx2pytorch is not installed.
    """
    try:
        import onnx2pytorch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "an ONNX file is read with onnx2pytorch, which is not installed here: "
            "pip install 'l0prune[onnx-in]'"
        ) from error
    model, digest = _read(Path(path))
    session = _session(path)
    graph, given = _graph(model, path)
    network, run = _converted(graph, given, session, path)
    batch = network.fixed_batch or 1
    network.origin = SourceFile(
        path, digest, graph.inputs, graph.outputs, batch, run.error, run.tolerance
    )
    is_freed = _declared_batch(given) == 1 and not network.fixed_batch
    network.example_input_array = tuple(
        # torch.export treats a size of 1 as a constant
        torch.cat((x, other))
        if x.shape[:1] == (1,) and (is_freed or isinstance(each.dims[0], str))
        else x
        for x, other, each in zip(run.example, _turned(run.example), given, strict=True)
    )
    network.free = _free(given)
    network.declared = {
        each.name: {n: size for n, size in enumerate(each.dims) if n and isinstance(size, int)}
        for each in given
    }
    return network.eval()


SOURCES[".onnx"] = load_onnx


def _converted(
    graph: Graph, given: Sequence[Given], session: Any, path: str
) -> tuple[OnnxNetwork, _Run]:
    """Return the network, with a free batch if possible, and the run that verified it."""
    batch, failure = _declared_batch(given), FileError("")
    freed = network_of(_with_free_batch(graph)) if batch else None
    plain = None
    for run in _runs(session, given, path):
        if freed is not None:
            with suppress(FileError):
                found = _compared(freed, run, path)
                if _stacks(freed, run.example):
                    return freed, found
        plain = plain or network_of(graph)
        plain.fixed_batch = batch
        try:
            return plain, _compared(plain, run, path)
        except FileError as error:
            failure = error
    raise failure


def _declared_batch(given: Sequence[Given]) -> int:
    """Return the declared batch size if all inputs share one number; else 0."""
    first = {each.dims[0] for each in given if each.dims}
    (batch,) = first if len(first) == 1 else (0,)
    return batch if isinstance(batch, int) else 0


def _read(path: Path) -> tuple[onnx.ModelProto, str]:
    """Read and check the ONNX model with external weights; return it and the file's SHA-256."""
    import onnx.inliner

    if not path.is_file():
        raise FileError(f"{path} does not exist.")
    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's errors; only onnx depends on it
        raise FileError(f"{path} is damaged, or no ONNX file: {first_line(error)}.") from error
    if not model.graph.node:
        raise FileError(f"{path} is damaged, or no ONNX file: its graph has no nodes.")
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_beside(tensor, path)
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
    except Exception as error:
        raise FileError(f"{path} is damaged: {first_line(error)}") from error
    opset = _opset(model)
    for node in model.graph.node:
        if node.op_type not in _LOOPS:
            _check_operator(node, opset, str(path))
    if opset < _FIRST_OPSET:
        raise FileError(
            f"{path} is of opset {opset}; l0prune reads {_FIRST_OPSET} and later. "
            "onnx.version_converter.convert_version(model, 13) writes it anew."
        )
    return model, hashlib.sha256(content).hexdigest()


def _opset(model: onnx.ModelProto) -> int:
    versions = {each.domain: each.version for each in model.opset_import}
    return int(versions.get("", versions.get("ai.onnx", 0)))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a graph and of the subgraphs in node attributes."""
    yield from graph.initializer
    for attribute in (a for node in graph.node for a in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for inner in (attribute.g, *attribute.graphs):
            yield from _tensors(inner)


def _check_beside(tensor: onnx.TensorProto, path: Path) -> None:
    """Refuse weights outside the file's folder, or beyond the end of the file they are in."""
    known = {entry.key: entry.value for entry in tensor.external_data}
    location = known.get("location", "")
    folder = path.parent.resolve()
    place = (folder / location).resolve()
    if not location or Path(location).is_absolute() or folder not in place.parents:
        raise FileError(
            f"{path} was not read: it asks for weights ({tensor.name}) at {location!r}, outside "
            "its own folder. No exporter does that; the file is damaged, or made to do harm."
        )
    if not place.is_file():
        raise FileError(f"{path} needs {location} beside it, which holds its weights.")
    try:
        end = int(known.get("offset", 0)) + int(known.get("length", 0))
    except ValueError:
        end = -1
    if not 0 <= end <= place.stat().st_size:
        raise FileError(f"{path} is damaged: {tensor.name} is not all in {location}.")


def _graph(model: onnx.ModelProto, path: str) -> tuple[Graph, list[Given]]:
    import onnx

    model = folded(model)
    for node in model.graph.node:  # those that were in branches, and branches that stay
        _check_operator(node, _opset(model), path)
    try:
        weights = {
            each.name: np.array(onnx.numpy_helper.to_array(each))
            for each in model.graph.initializer
        }
        constants = [node for node in model.graph.node if node.op_type == "Constant"]
        weights |= {node.output[0]: constant(node) for node in constants}
    except (NotImplementedError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged: {first_line(error)}.") from error
    inputs = [each for each in model.graph.input if each.name not in weights]
    given = [_given(each, path) for each in inputs]
    outputs = tuple(each.name for each in model.graph.output)
    ranks = _ranks(model, path)
    return Graph(model, weights, tuple(g.name for g in given), outputs, ranks, _opset(model)), given


def _check_operator(node: onnx.NodeProto, opset: int, path: str) -> None:
    import onnx

    what = f"the operator {node.op_type} ({node.name or ', '.join(node.output)})"
    if node.domain not in _OWN_DOMAINS:
        raise FileError(
            f"{path} has {what} of the domain {node.domain}, which is not ONNX's own: only the "
            "runtime that it is for knows it. Export the model anew without that runtime's "
            "optimizations, or prune the model that the file was made from."
        )
    if _QUANTIZED.fullmatch(node.op_type):
        raise FileError(
            f"{path} is quantized: it has {what}. Prune first: gate the file from before the "
            "quantization, fine-tune and export it, and quantize what is left."
        )
    if node.op_type in _LOOPS:
        raise FileError(
            f"{path} has {what}: control flow, by which the graph is another one from input to "
            "input (an If whose condition is constant is folded). Export the model so that it is "
            "gone (one branch, a fixed number of steps), or prune the model that the file was made "
            "from."
        )
    if not onnx.defs.has(node.op_type, opset, ""):
        raise FileError(
            f"{path} is damaged: it has {what}, which ONNX does not have in opset {opset}."
        )


def _given(value: onnx.ValueInfoProto, path: str) -> Given:
    import onnx

    kind = value.type.WhichOneof("value")
    of = value.type.tensor_type
    if kind != "tensor_type" or of.elem_type == onnx.TensorProto.STRING:
        raise FileError(f"{path} takes {value.name}, which is no tensor of numbers.")
    dtype = torch.from_numpy(np.zeros(0, onnx.helper.tensor_dtype_to_np_dtype(of.elem_type))).dtype
    dims = tuple(
        dim.dim_value
        if dim.WhichOneof("value") == "dim_value" and dim.dim_value > 0
        else dim.dim_param
        if re.search(r"\w", dim.dim_param)
        else f"{value.name}_{number}"
        for number, dim in enumerate(of.shape.dim)
    )
    return Given(value.name, dtype, dims)


def _ranks(model: onnx.ModelProto, path: str) -> dict[str, int]:
    """Return the number of dims of each value that shape inference finds; refuse huge ones."""
    import onnx

    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception:  # such as files above 2 GB, or operators with odd shapes
        return {}
    found = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shape = value.type.tensor_type.shape
        if value.type.tensor_type.HasField("shape"):
            found[value.name] = len(shape.dim)
            sizes = [dim.dim_value for dim in shape.dim if dim.dim_value > 0]
            if int(np.prod(sizes, dtype=object)) > _MAX_ELEMENTS:
                raise FileError(f"{path} computes {value.name} of {sizes}, too large to be meant.")
    return found


def _with_free_batch(graph: Graph) -> Graph:
    """Replace the first size of every constant Reshape shape by -1, for any batch.

    At the declared batch the result is the same; for others a comparison decides.
    """
    shapes = {
        node.input[1]
        for node in graph.model.graph.node
        if node.op_type == "Reshape" and len(node.input) > 1 and node.input[1] in graph.weights
    }
    weights = dict(graph.weights)
    for name in shapes:
        sizes = weights[name]
        if sizes.size and (sizes > 0).all():
            weights[name] = np.array([-1, *sizes[1:]], sizes.dtype)
    return replace(graph, weights=weights)


def _free(given: Sequence[Given]) -> dict[str, dict[int, str]]:
    """Return the names of the free sizes except the batch, by input and dim."""
    found = {
        identifier(each.name): {
            number: identifier(size)
            for number, size in enumerate(each.dims)
            if number and isinstance(size, str)
        }
        for each in given
    }
    return {name: dims for name, dims in found.items() if dims}


def _session(path: str) -> Any:
    """Load the file into ONNX Runtime, without graph optimization."""
    try:
        return session_of(path, optimizes=False, log=4)
    except Exception as error:
        raise FileError(
            f"{path} is no valid ONNX file, as ONNX Runtime says: {first_line(error)}"
        ) from error


@dataclass(frozen=True)
class _Run:
    """Outputs of the file in ONNX Runtime, and the error of a network compared with them."""

    example: tuple[Tensor, ...]
    outputs: Sequence[Tensor]
    error: float = 0.0
    tolerance: float = _TOLERANCE


def _runs(session: Any, given: Sequence[Given], path: str) -> Iterator[_Run]:
    """Yield runs on random inputs of the declared shapes, at the first free size that works.

    Inputs have several scales, since an output near zero shows nothing but rounding. Runs whose
    outputs do not depend on the input, such as of a saturated softmax, come last.

    Raises:
        FileError: the file runs at none of the sizes.
    """
    failed: list[str] = []
    same: list[_Run] = []
    is_found = False
    for size in _sizes(given):
        for scale, below in _SCALES:
            example = _example(given, size, scale, below)
            try:
                outputs, others = (
                    _run(session, given, each) for each in (example, _turned(example))
                )
            except Exception as error:
                failed.append(f"{size}: {first_line(error)}")
                continue
            is_found = True
            run = _Run(example, outputs)
            if _difference(outputs, others) > _TOLD:
                yield run
            else:
                same.append(run)
        if is_found:
            yield from same
            return
    raise FileError(
        f"ONNX Runtime does not run {path} on inputs of its own shapes. Tried for its free sizes: "
        + "; ".join(dict.fromkeys(failed))
    )


def _run(session: Any, given: Sequence[Given], example: tuple[Tensor, ...]) -> list[Tensor]:
    feed = {g.name: x.numpy() for g, x in zip(given, example, strict=True)}
    return [torch.from_numpy(np.asarray(each)) for each in session.run(None, feed)]


def _turned(example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the example with every input reversed along its last dim."""
    return tuple(x.flip(-1) if x.ndim else x for x in example)


def _sizes(given: Sequence[Given]) -> Sequence[int]:
    free = [each for each in given if any(isinstance(size, str) for size in each.dims[1:])]
    kind = "f" if any(each.dtype.is_floating_point for each in given) else "i"
    is_sound = any(each.dtype.is_floating_point and len(each.dims) == 2 for each in free)
    sizes = _SIZES[kind] if free else (1,)
    return tuple(dict.fromkeys((*_SAMPLES, *sizes))) if is_sound else sizes


def _example(given: Sequence[Given], size: int, scale: float, below: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for each in given:
        shape = [
            of if isinstance(of, int) else size if number else 1
            for number, of in enumerate(each.dims)
        ]
        if each.dtype.is_floating_point:
            made.append((scale * torch.randn(shape, generator=generator)).to(each.dtype))
        else:
            most = 2 if each.dtype == torch.bool else below
            made.append(torch.randint(0, most, shape, generator=generator).to(each.dtype))
    return tuple(made)


@torch.no_grad()
def _compared(network: OnnxNetwork, run: _Run, path: str) -> _Run:
    """Return the run with the network's error and the tolerance for it.

    Above the usual tolerance the file is compared with the network in float64 instead: it may
    deviate by twice the network's rounding error in float32, or ``TIMES`` the largest of several.

    Raises:
        FileError: the error is too large.
    """
    network.eval()
    try:
        found = _outputs(network, run.example)
        gap, allowed, rounding = _difference(run.outputs, found), _TOLERANCE, 0.0
        if gap > allowed:
            exact = _exact(network, run.example)
            gap = _difference(exact, run.outputs)
            allowed = max(allowed, min(_LARGEST, 2 * _difference(exact, found)))
            if gap > allowed:
                rounding = _rounding(network, run, exact)
                allowed = max(allowed, min(_LARGEST, TIMES * rounding))
    except Exception as error:
        raise FileError(f"{path} cannot be followed in torch: {first_line(error)}") from error
    if gap <= allowed:
        return replace(run, error=gap, tolerance=allowed)
    cause = "An operator of the file means something else in torch than onnx2pytorch takes it for; "
    if gap <= TIMES * rounding:
        cause = (
            f"So does rounding in float32, by {rounding:.1e}, and where that is more than "
            f"{_LARGEST:.0e} no comparison in float32 shows anything; "
        )
    raise FileError(
        f"The network made of {path} does not compute what ONNX Runtime does with the file: they "
        f"differ by {gap:.1e} of the output's scale. {cause}prune the model that the file was made "
        "from."
    )


def _rounding(network: OnnxNetwork, run: _Run, exact: Sequence[Tensor]) -> float:
    """Return the largest rounding error of networks moved by one unit in the last place."""
    worst = 0.0
    for number in range(RUNS):
        near, seeds = copy.deepcopy(network), count(number, RUNS)
        for parameter in near.parameters():
            if parameter.dtype == torch.float32:
                parameter.copy_(moved(parameter, next(seeds)))
        example = [moved(x, next(seeds)) if x.is_floating_point() else x for x in run.example]
        with MovedResults(number):
            found = _outputs(near, tuple(example))
        worst = max(worst, _difference(exact, found))
    return worst


def _exact(network: OnnxNetwork, example: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the network's outputs in float64."""
    before = torch.get_default_dtype()
    with one_at_a_time():
        try:
            torch.set_default_dtype(torch.float64)
            wide = tuple(x.double() if x.is_floating_point() else x for x in example)
            return _outputs(copy.deepcopy(network).double(), wide)
        finally:
            torch.set_default_dtype(before)


def _outputs(network: OnnxNetwork, example: tuple[Tensor, ...]) -> list[Tensor]:
    found = network(*example)
    return [found] if isinstance(found, Tensor) else list(found)


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference over all outputs, relative to each one's largest value."""
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            gap = torch.where(a == b, 0, (a.double() - b.double()).abs()).max()
            scale = a.double().abs().max()
            error = float(gap / scale) if scale else float(gap)
            worst = max(worst, error if error == error else float("inf"))
    return worst


@torch.no_grad()
def _stacks(network: OnnxNetwork, example: tuple[Tensor, ...]) -> bool:
    """Return whether a batch of two examples gives the same outputs as each example alone."""
    other = _turned(example)
    pairs = zip(example, other, strict=True)
    both = tuple(torch.cat(pair) if pair[0].ndim else pair[0] for pair in pairs)
    try:
        alone = [_outputs(network, each) for each in (example, other)]
        together = _outputs(network, both)
        expected = [torch.cat(pair) for pair in zip(*alone, strict=True)]
    except Exception:
        return False
    return _difference(expected, together) <= _TOLERANCE
