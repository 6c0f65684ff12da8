"""ONNX file of a program: translation, names, and loading into ONNX Runtime.

Outputs are named as in the model's code, free sizes as given. Where the exporter folds one weight
into another (a BatchNorm into a convolution) products may be subnormal: these are flushed to zero
(``slicing.tensors`` says why).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument

from l0prune.capture.compat import (
    exact_numbers,
    one_onnx_registry,
    pytree,
    quick_promotion,
    quick_rewrites,
    replacing_operators,
)
from l0prune.capture.outputs import leaf_names
from l0prune.capture.sizes import Inputs
from l0prune.capture.symbolic import inputs_of
from l0prune.capture.threads import muted, one_at_a_time
from l0prune.doors import provided
from l0prune.errors import L0pruneError
from l0prune.exporting.onnx.external import is_large, move_out
from l0prune.exporting.onnx.operators import (
    around_its_tensors,
    arrange_weights,
    in_plain_terms,
    without_checks,
    written_as_products,
    written_out,
)
from l0prune.exporting.onnx.replacing import replaced_alone
from l0prune.exporting.onnx.shared import share_transposed
from l0prune.exporting.slicing.tensors import SMALLEST
from l0prune.exporting.state import check_stateless, state_of, with_state
from l0prune.files.onnx_session import session_of
from l0prune.files.source_file import SourceFile
from l0prune.progress.stages import stage

if TYPE_CHECKING:
    import onnx
    import onnx_ir

FIRST_OF_PRESENT = 18  # opset that torch's present exporter writes


_NAME = r"[A-Za-z_]\w*"


def output_names(program: ExportedProgram) -> list[str]:
    """Return the names of a program's tensor outputs, by ``leaf_names``; empty if unknown."""
    specs = program.graph_signature.output_specs
    given = [spec.arg for spec in specs if spec.kind == OutputKind.USER_OUTPUT]
    structure = program.call_spec.out_spec
    if structure is None or structure.num_leaves != len(given):
        return []
    names = leaf_names(structure)
    return list(compress(names, (isinstance(arg, TensorArgument) for arg in given)))


def rename(
    model: onnx.ModelProto,
    outputs: Sequence[str],
    sizes: Sequence[Mapping[int, str]],
    inputs: Sequence[str] = (),
) -> None:
    """Rename outputs, inputs and free dims, in place; without new names the old ones stay."""
    graph = model.graph
    if len(inputs) == len(graph.input):
        _free_names(graph, inputs)
        pairs = zip(graph.input, inputs, strict=True)
        rename_values(graph, {value.name: name for value, name in pairs})
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {given.name for given in (*graph.input, *graph.initializer)}
    names: dict[str, str] = {}
    for output, name in zip(graph.output, outputs, strict=False):
        while name in taken and name != output.name:
            name += "_out"
        taken.add(name)
        names.setdefault(output.name, name)
    rename_values(graph, names)
    symbols = {
        symbol[0]: name  # of a multiple such as 2*n, the symbol n
        for given, dims in zip(graph.input, sizes, strict=False)
        for dim, name in dims.items()
        if (symbol := re.search(_NAME, given.type.tensor_type.shape.dim[dim].dim_param))
    }
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = re.sub(
                    _NAME, lambda found: symbols.get(found[0], found[0]), size.dim_param
                )


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename the values of a graph and of its subgraphs, in place."""
    for node in graph.node:
        for values in (node.input, node.output):
            for number, value in enumerate(values):
                values[number] = names.get(value, value)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                rename_values(attribute.g, names)
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


def _free_names(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Rename, in place, values other than inputs that have one of these names."""
    own = {value.name for value in graph.input}
    rename_values(graph, {name: f"{name}_inside" for name in names if name not in own})
    for array in graph.initializer:
        if array.name in names:
            array.name += "_inside"


# Operators that are linear in a weight: there zero can replace subnormal numbers, which it cannot
# in a quotient, a logarithm or a variance.
_LINEAR = frozenset(
    ("Add", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "Mul", "RNN", "Sub")
)
_SHAPING = frozenset(("Expand", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze"))


def flush_weights(model: onnx_ir.Model) -> None:
    """Set subnormal weights of float32 to zero, in place, if only linear operators read them."""
    import onnx_ir

    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or not _is_linear(value):
                continue
            numbers = tensor.numpy()
            size = np.abs(numbers)
            subnormal = (size < SMALLEST) & (size > 0)
            if subnormal.any():
                flushed = np.where(subnormal, np.float32(0), numbers)
                value.const_value = onnx_ir.tensor(flushed, name=value.name)


def _is_linear(value: onnx_ir.Value) -> bool:
    """Check that only linear operators read a value, directly or after a change of shape."""
    if value.is_graph_output():
        return False
    return all(
        node.op_type in _LINEAR
        or (node.op_type in _SHAPING and all(_is_linear(output) for output in node.outputs))
        for node in value.consumers()
    )


@stage("translating the smaller model to ONNX")
def write_runnable(
    program: ExportedProgram,
    path: Path,
    data: Path,
    sizes: Sequence[Mapping[int, str]] = (),
    opset: int | None = None,
    source: SourceFile | None = None,
    apart: bool = False,
) -> Session:
    """Write the program in ONNX, and load the file into ONNX Runtime.

    Args:
        program: the program.
        path: of the file.
        data: of the weights, in the same folder, if one file cannot hold them.
        sizes: for each input the names of its free dims.
        opset: of the file; None for the exporter's own choice.
        source: the ONNX file whose names of inputs and outputs this one gets.
        apart: whether weights are in a separate file even if one file could hold them.

    The exporter's optimizer sometimes makes an invalid file (it gives one name to the limits of
    several clamps of one tensor): then the file is written without that optimizer.

    Raises:
        L0pruneError: torch's exporter has no translation, or not in this opset, or ONNX Runtime
            does not take it.
    """
    whole = with_state(program)
    translate = partial(to_onnx, whole, data, sizes=sizes, opset=opset, apart=apart)
    _write(_named_as(program, translate(), sizes, source), path)
    try:
        return Session(str(path))
    except L0pruneError:
        with contextlib.suppress(L0pruneError):
            _write(_named_as(program, translate(optimize=False), sizes, source), path)
            return Session(str(path))
        raise


def _named_as(
    program: ExportedProgram,
    model: onnx.ModelProto,
    sizes: Sequence[Mapping[int, str]],
    source: SourceFile | None,
) -> onnx.ModelProto:
    state = [*state_of(program)]  # the last inputs and outputs
    given, made = (
        [each.name for each in values][: len(values) - len(state)]
        for values in (model.graph.input, model.graph.output)
    )
    names = output_names(program) or made if source is None else source.outputs
    inputs = _own_names(program, given) if source is None else source.inputs
    rename(model, [*names, *state], sizes, [*inputs, *state])
    return model


def _own_names(program: ExportedProgram, given: Sequence[str]) -> Sequence[str]:
    """Return the forward's argument names if the inputs are ``args_0`` and so on; else those."""
    signature = program.module_call_graph[0].signature
    names = (signature and signature.forward_arg_names) or ()
    is_numbered = all(re.fullmatch(r"args_\d+", name) for name in given)
    return names if is_numbered and len(names) == len(given) else given


def _write(model: onnx.ModelProto, path: Path) -> None:
    path.write_bytes(model.SerializeToString())


def to_onnx(
    program: ExportedProgram,
    data: Path | None = None,
    *,
    optimize: bool = True,
    sizes: Sequence[Mapping[int, str]] = (),
    opset: int | None = None,
    apart: bool = False,
) -> onnx.ModelProto:
    """Translate the program to ONNX, without printing; outputs other than tensors are left out.

    Arguments and errors are those of ``write_runnable``. The weights are written to ``data`` if
    they are too large for one file, or ``apart`` is set.

    Raises:
        CertificateError: the program keeps values from one call to the next.
    """
    import onnx_ir

    check_stateless(program, "file", "")
    program = without_checks(_with_tensors_only(program))
    is_older = opset is not None and opset < FIRST_OF_PRESENT
    export = partial(_exported, opset=opset, sizes=sizes, optimize=optimize)
    try:
        with one_at_a_time(), muted():
            program = written_as_products(written_out(program, recurrent=not is_older))
            try:
                made = export(program)
            except L0pruneError:
                raise
            except Exception:
                made = export(in_plain_terms(program))
    except L0pruneError:
        raise
    except Exception as error:
        raise L0pruneError(
            f"torch's ONNX exporter failed on the sliced model: {_cause(error)}. The model itself "
            "is fine: --pt2 or --state (Export.save) write it in torch's own formats."
        ) from error
    arrange_weights(made)
    share_transposed(made)
    flush_weights(made)
    if data is not None and (apart or is_large(made)):
        move_out(made, data)
    return onnx_ir.to_proto(made)


def _exported(
    program: ExportedProgram,
    *,
    opset: int | None,
    sizes: Sequence[Mapping[int, str]],
    optimize: bool,
) -> onnx_ir.Model:
    if opset is not None and opset < FIRST_OF_PRESENT:
        older: onnx_ir.Model = provided("of_older_opset")(program, opset, sizes)
        return older
    with (
        one_onnx_registry(),
        quick_promotion(),
        quick_rewrites(),
        replacing_operators(replaced_alone),
        exact_numbers(),
    ):
        made = torch.onnx.export(
            program, dynamo=True, verbose=False, optimize=optimize, opset_version=opset
        )
    assert made is not None
    found = made.model.opset_imports[""]
    if opset not in (None, found):
        raise L0pruneError(
            f"torch's ONNX exporter writes this model in opset {found}, and could not convert it "
            f"to {opset}: leave opset out, or give {found}."
        )
    return made.model


def _with_tensors_only(program: ExportedProgram) -> ExportedProgram:
    """Return the program, or a copy that returns tensors only: ONNX has no other outputs."""
    specs = program.graph_signature.output_specs
    is_tensor = [isinstance(spec.arg, TensorArgument) for spec in specs]
    if all(is_tensor):
        return program
    copied = around_its_tensors(program)
    output = copied.graph.output_node()
    outputs: Any = output.args[0]
    output.args = (tuple(compress(outputs, is_tensor)),)
    copied.graph_signature.output_specs = list(compress(specs, is_tensor))
    called = copied.module_call_graph[0].signature
    assert called is not None
    called.outputs = list(compress(called.outputs, is_tensor))
    called.out_spec = pytree.tree_structure(output.args[0])
    copied.graph_module.recompile()
    return copied


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost cause of an exporter's error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


class Session:
    """An ONNX model, loaded into ONNX Runtime on the CPU."""

    def __init__(self, content: bytes | str) -> None:
        """Load the bytes of a file, or the file at a path."""
        with _named():
            self._session = session_of(content)
        self._names = [given.name for given in self._session.get_inputs()]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return outputs for positional inputs."""
        with _named():
            values = (np.ascontiguousarray(tensor.numpy()) for tensor in inputs)
            feed = dict(zip(self._names, values, strict=True))
            return [torch.from_numpy(np.asarray(out)) for out in self._session.run(None, feed)]


def outputs_of(program: ExportedProgram, inputs: Inputs) -> list[Tensor]:
    """Return the outputs of a program in float32 that ONNX Runtime runs.

    Raises:
        L0pruneError: as ``write_runnable``.
    """
    session = Session(to_onnx(program).SerializeToString())
    pairs = zip(inputs_of(program), pytree.tree_leaves(inputs), strict=True)
    return session([leaf for value, leaf in pairs if isinstance(value, Tensor)])


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Raise exceptions of ONNX Runtime within the context as L0pruneError."""
    try:
        yield
    except Exception as error:
        raise L0pruneError(
            f"ONNX Runtime cannot run the file that was made, so it was not written: "
            f"{_cause(error)}. --pt2 or --state (Export.save) write the model in torch's own "
            "formats."
        ) from error


def describe(path: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to the metadata of the file at a path.

    Concatenated protobuf messages parse as one message with the lists of both, so that the
    weights need not be read and written again.
    """
    import onnx

    entries = onnx.ModelProto()
    for key, value in facts.items():
        entry = entries.metadata_props.add()
        entry.key, entry.value = f"l0prune.{key}", str(value)
    with open(path, "ab") as file:
        file.write(entries.SerializeToString())
