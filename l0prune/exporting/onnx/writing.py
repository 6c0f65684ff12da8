"""ONNX files of an export: written and compared together, so that all of them appear or none."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from l0prune.doors import provided
from l0prune.errors import CertificateError, UsageError
from l0prune.exporting.certify.certificate import Check, compare_file, unknown
from l0prune.exporting.onnx.external import data_beside
from l0prune.exporting.onnx.file import FIRST_OF_PRESENT, describe, outputs_of, write_runnable
from l0prune.exporting.onnx.reference import run_in_float64
from l0prune.exporting.pieces import ExportedPart
from l0prune.exporting.state import Carrying, check_kept, check_stateless
from l0prune.exporting.uncut import rounding_in
from l0prune.files.atomic import replacement
from l0prune.files.source_file import SourceFile
from l0prune.infer.nodes import called, draws
from l0prune.progress.stages import stage

_FIRST = 7  # the oldest opset that ONNX Runtime reads


class Unfinished(ExitStack):
    """Files that get their names when the context ends, or none where it raises.

    Attributes:
        paths: temporary path of each file, by the final one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[Path, Path] = {}
        self._data: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def begin(self, file: Path) -> tuple[Path, Path]:
        """Return the temporary path of a file, and the path of its weights if separate."""
        data = self.enter_context(data_beside(file))
        self._data.append(file.with_name(data.name))
        self.paths[file] = self.enter_context(replacement(file))
        return self.paths[file], data

    @property
    def written(self) -> tuple[Path, ...]:
        """Return the paths of the files, then those of separate weights."""
        return (*self.paths, *(data for data in self._data if data.exists()))

    def add(
        self,
        piece: ExportedPart,
        file: Path,
        opset: int | None,
        source: SourceFile | None,
        apart: bool,
    ) -> list[Check]:
        """Write the file of a piece in float32, and compare it with the gated model.

        Raises:
            CertificateError: the piece draws random numbers, or keeps what no file can take.
            L0pruneError: as ``write_runnable``, which describes the last three arguments.
        """
        if found := [node for node in piece.single.graph.nodes if draws(node)]:
            raise CertificateError(
                f"No ONNX file was written: in eval mode the model draws random numbers "
                f"({called(found[0])}), and ONNX Runtime draws others than torch, so "
                "that the file cannot be compared with the model. Give the model its noise as an "
                "input, or write it in torch's own formats: --pt2 or --state (Export.save)."
            )
        check_kept(piece.lost, "ONNX file")
        if piece.path:
            check_stateless(piece.single, "file of a part", piece.path)
        path, data = self.begin(file)
        session = write_runnable(piece.single, path, data, piece.sizes, opset, source, apart)
        describe(path, {"batch": piece.takes})
        if piece.state:
            describe(path, {"state": json.dumps([*piece.state])})
        run = Carrying(session, piece.state)
        measured = partial(rounding_in, outputs_of, piece.original)
        own = unknown if piece.state else measured
        exactly = None if piece.state else partial(run_in_float64, path)
        with stage("comparing the ONNX file with the gated model"):
            return compare_file("onnx", piece.answers, run, piece.path, piece.read, own, exactly)


def check_opset(opset: int | None) -> None:
    """Raise UsageError for an opset that neither exporter has."""
    import onnx

    latest = onnx.defs.onnx_opset_version()
    if opset is not None and (type(opset) is not int or not _FIRST <= opset <= latest):
        raise UsageError(
            f"opset={opset!r}: give a number from {_FIRST} to {latest}, the latest that the "
            f"installed onnx {onnx.__version__} knows"
        )
    if opset is not None and opset < FIRST_OF_PRESENT:
        provided("of_older_opset")


def check_apart(path: str | os.PathLike[str], source: SourceFile | None) -> None:
    """Raise UsageError for the path of the file that the network was made from."""
    if source is not None and os.path.realpath(path) == os.path.realpath(source.file):
        raise UsageError(
            f"{path} is the file that this network was made from, and its gated models are built "
            "by it: give the smaller file another name"
        )
