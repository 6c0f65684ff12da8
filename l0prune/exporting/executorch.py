"""ExecuTorch programs: a network for phones, lowered to XNNPACK, and run here as there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from l0prune.capture.compat import pytree
from l0prune.capture.example_inputs import examples_in
from l0prune.capture.threads import muted
from l0prune.errors import L0pruneError, UsageError, first_line
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.certificate import Check, compare_file
from l0prune.exporting.certify.dtypes import cast
from l0prune.exporting.pieces import ExportedPart
from l0prune.running.stages import stage


def _imported(name: str) -> Any:
    try:
        return import_module(f"executorch.{name}")
    except ImportError as error:
        raise UsageError(
            "ExecuTorch is not installed: pip install 'l0prune[executorch]'"
        ) from error


def is_missing() -> bool:
    """Return whether ExecuTorch is not installed."""
    return find_spec("executorch") is None


def version() -> str:
    """Return ExecuTorch's version.

    Raises:
        UsageError: it is not installed.
    """
    return str(_imported("version").__version__)


def program_of(exported: ExportedProgram) -> bytes:
    """Return an ExecuTorch program, of which XNNPACK runs what it can.

    Raises:
        L0pruneError: ExecuTorch has no translation for an operator.
        UsageError: it is not installed.
    """
    lower = _imported("exir").to_edge_transform_and_lower
    partitioner = _imported("backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner
    try:
        with muted():
            return bytes(lower(exported, partitioner=[partitioner()]).to_executorch().buffer)
    except Exception as error:  # of any of its passes
        raise L0pruneError(
            f"ExecuTorch cannot translate the model: {first_line(error)}. --onnx, --pt2 and "
            "--state (save_onnx, save) do without it"
        ) from error


def loaded(content: bytes, threads: int = 1) -> Callable[[Sequence[Tensor]], list[Any]]:
    """Load a program, and return what runs it on a list of tensors, with so many threads."""
    _imported("extension.pybindings.portable_lib")._unsafe_reset_threadpool(threads)
    program = _imported("runtime").Runtime.get().load_program(content)
    method = program.load_method("forward")

    def run(inputs: Sequence[Tensor]) -> list[Any]:
        assert program is not None  # it has to live as long as its method
        return list(method.execute([each.contiguous() for each in inputs]))

    return run


def fixed(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Return a program of a network for inputs of these sizes alone: memory is planned for them."""
    with torch.no_grad():
        return torch.export.export(network, args, kwargs)


@stage("translating the smaller model to ExecuTorch")
def write_program(piece: ExportedPart, path: Path) -> list[Check]:
    """Write a piece for the fewest examples that were compared, and compare it on these.

    Raises:
        L0pruneError: it cannot be translated or run.
        UsageError: ExecuTorch is not installed.
    """
    answer: Answer = min(piece.answers, key=lambda each: examples_in(each.inputs))
    args, kwargs = cast(answer.inputs, torch.float32)
    module = piece.single.module(check_guards=False)
    content = program_of(fixed(module, args, kwargs))
    try:
        checks = compare_file("executorch", [answer], _run_of(content), piece.path, _tensors)
    except RuntimeError as error:
        raise L0pruneError(
            f"ExecuTorch cannot run the file that was made, so it was not written: "
            f"{first_line(error)}"
        ) from error
    path.write_bytes(content)
    return checks


def _tensors(inputs: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _run_of(content: bytes) -> Callable[[list[Tensor]], list[Tensor]]:
    run = loaded(content)
    return lambda inputs: [each for each in run(inputs) if isinstance(each, Tensor)]
