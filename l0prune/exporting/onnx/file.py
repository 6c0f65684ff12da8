"""The ONNX file: made from the dense program, run by ONNX Runtime, written whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.utils import _pytree as pytree

from l0prune.capture.quiet import alone, quietly
from l0prune.errors import L0pruneError
from l0prune.exporting.onnx.attention import around_its_tensors, written_as_products
from l0prune.exporting.onnx.external import is_large, move_out
from l0prune.exporting.onnx.names import output_names, rename
from l0prune.exporting.onnx.older import FIRST_OF_PRESENT, of_older_opset
from l0prune.exporting.onnx.recurrent import arrange_weights
from l0prune.exporting.onnx.subnormal import flush_weights
from l0prune.exporting.onnx.translatable import in_plain_terms
from l0prune.exporting.onnx.written_out import written_out
from l0prune.running.stages import stage

if TYPE_CHECKING:
    import onnx
    import onnx_ir


@stage("translating the smaller model to ONNX")
def write_runnable(
    program: ExportedProgram,
    path: Path,
    data: Path,
    sizes: Sequence[Mapping[int, str]] = (),
    opset: int | None = None,
) -> Session:
    """Write the program in ONNX, and load the file into ONNX Runtime.

    Args:
        program: the program.
        path: of the file.
        data: in the same folder, where the weights lie if one file cannot hold them.
        sizes: for each input what its free dims are called.
        opset: of the file; None for the exporter's own choice.

    The exporter's optimizer sometimes makes a file that is none (it gives one name to the limits of
    several clamps of one tensor): then the file is written as it is before.

    Raises:
        L0pruneError: torch's exporter has no translation, or not in this opset, or ONNX Runtime
            does not take it.
    """
    translate = partial(to_onnx, program, data, sizes=sizes, opset=opset)
    _write(_named_as(program, translate(), sizes), path)
    try:
        return Session(str(path))
    except L0pruneError:
        with contextlib.suppress(L0pruneError):
            _write(_named_as(program, translate(optimize=False), sizes), path)
            return Session(str(path))
        raise


def _named_as(
    program: ExportedProgram, model: onnx.ModelProto, sizes: Sequence[Mapping[int, str]]
) -> onnx.ModelProto:
    rename(model, output_names(program), sizes)
    return model


def _write(model: onnx.ModelProto, path: Path) -> None:
    path.write_bytes(model.SerializeToString())


def to_onnx(
    program: ExportedProgram,
    data: Path | None = None,
    *,
    optimize: bool = True,
    sizes: Sequence[Mapping[int, str]] = (),
    opset: int | None = None,
) -> onnx.ModelProto:
    """The program in ONNX, quietly. Outputs that are no tensors (numbers, None) are left out.

    Args:
        program: the program.
        data: a file that the weights are written to where they are too large for one with it.
        optimize: whether the exporter may.
        sizes: for each input what its free dims are called.
        opset: of the file; None for the exporter's own choice.

    Raises:
        L0pruneError: torch's exporter has no translation for an operator, or not in this opset.
    """
    import onnx_ir

    program = _with_tensors_only(program)
    is_older = opset is not None and opset < FIRST_OF_PRESENT
    export = partial(_exported, opset=opset, sizes=sizes, optimize=optimize)
    try:
        with alone(), quietly():
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
    flush_weights(made)
    if data is not None and is_large(made):
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
        return of_older_opset(program, opset, sizes)
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
    """The program, or a copy that returns its tensors only: ONNX files have no other outputs."""
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
    """The first line of what is at the bottom of the exporter's pages."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


class Session:
    """An ONNX model, loaded into ONNX Runtime on the CPU."""

    def __init__(self, content: bytes | str) -> None:
        """Load the bytes of a file, or the file at a path."""
        import onnxruntime  # here, since only who writes a file need wait for it to load

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        with _named():
            self._session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
        self._names = [given.name for given in self._session.get_inputs()]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs for positional inputs."""
        with _named():
            values = (np.ascontiguousarray(tensor.numpy()) for tensor in inputs)
            feed = dict(zip(self._names, values, strict=True))
            return [torch.from_numpy(np.asarray(out)) for out in self._session.run(None, feed)]


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What ONNX Runtime raises, in words that say where it comes from."""
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

    Two messages of protobuf, one after the other, are one that holds the lists of both; so the
    weights need not be read and written again.
    """
    import onnx

    entries = onnx.ModelProto()
    for key, value in facts.items():
        entry = entries.metadata_props.add()
        entry.key, entry.value = f"l0prune.{key}", str(value)
    with open(path, "ab") as file:
        file.write(entries.SerializeToString())
