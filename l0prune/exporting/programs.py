"""Programs for the runtimes of small devices: translated, run here in their runtime, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from l0prune.capture.example_inputs import examples_in
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import muted
from l0prune.doors import Registry
from l0prune.errors import L0pruneError, UsageError, first_line
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.certificate import Check, compare_run
from l0prune.exporting.certify.dtypes import cast
from l0prune.exporting.pieces import ExportedPart
from l0prune.exporting.state import check_kept, check_stateless
from l0prune.exporting.uncut import rounding_in
from l0prune.progress.stages import stage

Run = Callable[[Inputs], list[Tensor]]


class Format(Protocol):
    """Format of programs with fixed input sizes, since their memory is planned ahead."""

    @property
    def name(self) -> str:
        """Name of the runtime, and of the pip extra that installs it."""

    @property
    def label(self) -> str:
        """Name for display."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that have to be installed."""

    def version(self) -> str:
        """Return the version of the package that makes or runs the programs."""

    def made(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Translate a network for inputs of these sizes."""

    def loaded(self, content: bytes, threads: int) -> Run:
        """Load a program, and return a function that runs it with this number of threads."""


FORMATS: Registry[Format] = Registry("format", "formats")
"""Formats by file suffix."""


def is_missing(kind: Format) -> bool:
    """Return whether a package that the format needs is not installed."""
    return any(find_spec(package) is None for package in kind.packages)


def check_installed(kind: Format) -> None:
    """Raise UsageError if a package that the format needs is not installed."""
    if is_missing(kind):
        raise UsageError(f"{kind.label} is not installed: pip install 'l0prune[{kind.name}]'")


def made(kind: Format, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Translate a network for inputs of these sizes, without the translator's output.

    Raises:
        L0pruneError: there is no translation for an operator.
        UsageError: a package is not installed.
    """
    check_installed(kind)
    try:
        with muted():
            return kind.made(network, args, kwargs)
    except Exception as error:  # each pass of the translator has its own
        raise L0pruneError(
            f"{kind.label} cannot translate the model: {first_line(error)}. --onnx, --pt2 and "
            "--state (save_onnx, save) do without it"
        ) from error


def write_program(kind: Format, piece: ExportedPart, path: Path) -> list[Check]:
    """Write a piece for the smallest batch among its answers, after running it for a comparison.

    Raises:
        CertificateError: it keeps values from one call to the next.
        L0pruneError: it cannot be translated or run.
        UsageError: a package is not installed.
    """
    check_kept(piece.lost, "program")
    check_stateless(piece.single, f"program of {kind.label}", piece.path)
    answer: Answer = min(piece.answers, key=lambda each: examples_in(each.inputs))
    args, kwargs = inputs = cast(answer.inputs, torch.float32)
    with stage(f"translating the smaller model to {kind.label}"):
        content = made(kind, piece.single.module(check_guards=False), args, kwargs)
    try:
        with muted():
            found = kind.loaded(content, 1)(inputs)
    except Exception as error:  # the runtime has its own classes
        raise L0pruneError(
            f"{kind.label} cannot run the file that was made, so it was not written: "
            f"{first_line(error)}"
        ) from error
    path.write_bytes(content)
    own = partial(rounding_in, partial(_outputs, kind), piece.original)
    return [compare_run(kind.name, answer, found, piece.path, own)]


def _outputs(kind: Format, program: ExportedProgram, inputs: Inputs) -> Sequence[Tensor]:
    """Return the outputs of a program in float32 that the format's runtime runs."""
    content = made(kind, program.module(check_guards=False), *inputs)
    with muted():
        return kind.loaded(content, 1)(inputs)
