"""ONNX file of a network with input gates, in which blocks that are closed are not computed.

Each such block is inside an ``If`` on its gate, whose other side is the constant of a closed block.
Both sides are equal where the gate is zero, so that no decision depends on rounding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.fx import GraphModule

from l0prune.capture.example_inputs import first_rows
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import one_at_a_time
from l0prune.errors import UsageError
from l0prune.exporting.certify.answers import answers_of
from l0prune.exporting.certify.certificate import Check, compare_file
from l0prune.exporting.certify.dtypes import CPU, cast, converted, placed
from l0prune.exporting.onnx.file import Session, describe, rename, to_onnx
from l0prune.exporting.pieces import ExportedPart
from l0prune.exporting.result import Export
from l0prune.exporting.slicing.program import reexport
from l0prune.features.exits.file import input_names, one_by_one
from l0prune.features.input_gates.put_aside import Branch, forced_to, put_aside
from l0prune.features.input_gates.skips import Forced, Skip, WithSkips, skips
from l0prune.files.atomic import replacement
from l0prune.progress.stages import stage


@one_at_a_time()
def save_skipping(small: Export, path: str | os.PathLike[str]) -> Path:
    """Write an ONNX file that skips blocks whose input gates close them as a whole.

    Each such block stands inside an ``If``, whose other side is the constant that the block is
    without. The file is for one example at a time, and computes what that of ``Export.save_onnx``
    does, which multiplies by zero instead and takes any batch. Blocks are found on the graph, as
    what a clamped number of each example multiplies, and no names are asked for.

    The file is compared with the gated model on the certificate's inputs; and with the module where
    all blocks are left out, and where none is. Its metadata hold the certificate, how many blocks
    can be left out, and the batch.

    Args:
        small: the export of a network with input gates (``add_input_gates``).
        path: of the file.

    Raises:
        CertificateError: a way through the file computes something else.
        FileError: the file cannot be written.
        L0pruneError: torch's exporter has no translation, or ONNX Runtime does not take it.
        UsageError: nothing in the network can be left out, or it is in parts.
    """
    if small.in_parts:
        raise UsageError("this export is in parts, and blocks are left out of a whole network only")
    (piece,) = small.pieces
    if not small.dynamic and not piece.takes.startswith("1 "):
        raise UsageError(
            "a block is left out for one example at a time, and this export is for batches of "
            f"{piece.takes}: gate with an example of one, or let the batch be free (small.note "
            "says why it is not)"
        )
    inputs = cast(piece.answers[0].inputs, torch.float32)
    example = first_rows(inputs)
    network = placed(converted(small.module, torch.float32), CPU).eval()
    whole = reexport(network, example, dynamic=False).program.module(check_guards=False)
    assert isinstance(whole, GraphModule)
    found = skips(whole)
    target = Path(path)
    with replacement(target) as unfinished:
        written = _write(whole, found, example, small, unfinished)
        if not written:
            raise UsageError(
                "no block of this network can be left out: none has a gate of its own. "
                "l0prune.add_input_gates(model, args, skip=True) puts one on blocks that are added "
                "to a stream; a cut may have taken them away"
            )
        checks = [*_checks(unfinished, piece, whole, written)]
        certificate = small.certificate.without("onnx").with_checks(checks)
        facts = {
            "certificate": json.dumps(certificate.to_dict()),
            "skips": str(len(written)),
            "batch": "1 only: split larger batches into examples",
        }
        describe(unfinished, facts)
    return target


@stage("writing the file that leaves out blocks")
def _write(
    network: GraphModule, found: Sequence[Skip], example: Inputs, small: Export, path: Path
) -> list[tuple[Skip, Branch]]:
    """Write the file; return the skips that are inside an ``If``, with their branches."""
    program = reexport(WithSkips(network, found), example, dynamic=False).program
    model = to_onnx(program)
    graph = model.graph
    count = len(graph.output) - sum(1 + len(skip.ends) for skip in found)
    inputs = input_names(small.module, example, len(graph.input))
    rename(model, small.pieces[0].answers[0].names[:count], (), inputs)
    names = iter([output.name for output in graph.output][count:])
    branches = [
        Branch(next(names), tuple(next(names) for _ in skip.ends), skip.values) for skip in found
    ]
    written = put_aside(model, branches, count)
    path.write_bytes(model.SerializeToString())
    return [each for each in zip(found, branches, strict=True) if each[1] in written]


@stage("comparing the file with blocks and without")
def _checks(
    path: Path,
    piece: ExportedPart,
    network: GraphModule,
    written: Sequence[tuple[Skip, Branch]],
) -> Iterator[Check]:
    """Yield comparisons with the gated model, and with the module where factors are 0 and 1."""
    run = partial(one_by_one, Session(str(path)))
    yield from compare_file("onnx", piece.answers, run, "", piece.read)
    alone = [first_rows(cast(answer.inputs, torch.float32)) for answer in piece.answers]
    found, branches = zip(*written, strict=True)
    for number, name in ((0.0, "all left out"), (1.0, "none left out")):
        forced = Forced(network, found, number)
        answers = answers_of(forced, alone, "", (torch.float32,), "module")
        session = Session(forced_to(path, branches, number))
        yield from compare_file("onnx", answers, session, name, piece.read)
