"""From a model before and after the cut to the proof that both compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from l0prune.capture.recording import Inputs, filled, record
from l0prune.errors import CertificateError
from l0prune.exporting.certify.certificate import (
    Certificate,
    Check,
    cast,
    compare,
    compare_in_parts,
    is_valid,
)
from l0prune.exporting.certify.inputs import trials
from l0prune.exporting.own_class.choice import OwnClass, Reference, choose
from l0prune.exporting.own_class.comparison import Comparison
from l0prune.exporting.own_class.replacement import replace_part
from l0prune.exporting.own_class.resizing import Changes
from l0prune.exporting.result import Piece
from l0prune.exporting.slicing.program import programs, reexport, reexport_part
from l0prune.infer.parts import Parts

BATCHES = (2, 5)


@dataclass
class Cut:
    """A model before and after the cut, in float64 where it was cut.

    Attributes:
        gated: the gated model, on the CPU, in eval mode.
        own: what the model's own class may be at the new sizes.
        graphs: by path, the captured parts at the new sizes.
        gathers: why its own class cannot be right, where that is known beforehand.
    """

    gated: nn.Module
    own: OwnClass
    graphs: dict[str, GraphModule]
    gathers: str


@dataclass
class Proven:
    """What is left to hand out once the certificate stands."""

    module: nn.Module
    pieces: list[Piece]
    checks: list[Check]
    comparisons: dict[str, Comparison]
    changes: Changes


def prove(both: Cut, parts: Parts, example: Inputs, dtype: torch.dtype, predicted: int) -> Proven:
    """The dense model, and all that shows that it computes what the gated one does.

    Args:
        both: before and after the cut.
        parts: what was captured.
        example: inputs in the model's dtype.
        dtype: of the model.
        predicted: parameters that the dense model must have.

    Raises:
        CertificateError: it does not, or cannot be compared.
    """
    whole_or_parts = _prove_whole if "" in both.graphs else _prove_parts
    return whole_or_parts(both, parts, example, dtype, predicted)


def _prove_whole(
    both: Cut, parts: Parts, example: Inputs, dtype: torch.dtype, predicted: int
) -> Proven:
    """A model of one piece: its graph must be right, its own class may be."""
    captured = parts.found[0].analysis.captured
    graph = both.graphs[""]
    _check_count(graph, parts, predicted)
    batches = BATCHES if captured.dynamic else (captured.batch,)
    against = partial(compare, both.gated, graph)
    inputs, certificate = _certified(both.gated, example, batches, against)
    own, changes, comparison = None, both.own.candidates[0], Comparison(both.gathers)
    if not both.gathers:
        choice = choose(both.own, [Reference("", both.gated, inputs)])
        own, changes, comparison = choice.module, choice.changes, choice.comparisons[""]
    export = partial(reexport, dynamic=captured.dynamic)
    program, single, dynamic = programs(graph, dtype, example, export)
    return Proven(
        module=graph if comparison.reason or own is None else own.to(dtype),
        pieces=[Piece("", program, single, dynamic, both.gated, inputs)],
        checks=[*certificate.checks, *comparison.checks],
        comparisons={"": comparison},
        changes=changes,
    )


def _prove_parts(
    both: Cut, parts: Parts, example: Inputs, dtype: torch.dtype, predicted: int
) -> Proven:
    """A model of which only islands were captured: their own classes, or else their graphs."""
    paths = list(both.graphs)
    # one candidate for all parts, so that what they share stays shared
    references = [Reference(p.path, both.graphs[p.path], [p.example]) for p in parts.found]
    choice = choose(both.own, references)
    dense, changes = choice.module, choice.changes
    for path, comparison in choice.comparisons.items():
        if comparison.reason:
            replace_part(dense, path, both.graphs[path])
            changes = {p: c for p, c in changes.items() if not f"{p}.".startswith(f"{path}.")}
    _check_count(dense, parts, predicted)
    against = partial(compare_in_parts, both.gated, dense, paths)
    try:
        inputs, certificate = _certified(both.gated, example, (None, None), against)
    except CertificateError as error:
        raise CertificateError(
            f"{error}\nOnly parts of this model could be captured ({', '.join(paths)}), and the "
            "code around them may read what was cut off them (a weight, a size). What it reads has "
            f"to stay: gate with exclude=... for those axes, such as exclude='{paths[0]}.*'."
        ) from error
    received: dict[str, list[Inputs]] = {path: [] for path in paths}
    for given in inputs:
        for call in record(both.gated, paths, cast(given, dtype)):
            received[call.path].append(filled(call.inputs))
    pieces, part_examples = [], {part.path: part.example for part in parts.found}
    for path, comparison in choice.comparisons.items():
        part, submodule = dense.get_submodule(path), both.gated.get_submodule(path)
        for form, alike in enumerate(_forms(received[path] or [part_examples[path]]), start=1):
            program, single, dynamic = programs(part, dtype, alike[0], reexport_part)
            dynamic = (
                dynamic and not comparison.reason
            )  # a graph was captured at the example's sizes
            pieces.append(Piece(path, program, single, dynamic, submodule, alike, form))
    dense.to(dtype)
    return Proven(dense, pieces, list(certificate.checks), choice.comparisons, changes)


def _forms(calls: Sequence[Inputs]) -> list[tuple[Inputs, ...]]:
    """The inputs of which one program takes all: of one structure, with as many dims."""
    forms: dict[Any, list[Inputs]] = {}
    for given in calls:
        leaves, structure = pytree.tree_flatten(given)
        ranks = [leaf.ndim if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        forms.setdefault((str(structure), *ranks), []).append(given)
    return [tuple(alike) for alike in forms.values()]


def _certified(
    gated: nn.Module,
    example: Inputs,
    batches: Sequence[int | None],
    against: Callable[[Sequence[Inputs]], list[Check]],
) -> tuple[tuple[Inputs, ...], Certificate]:
    """The certificate, and the inputs that it was given on: the first kind that the model takes.

    Raises:
        CertificateError: the comparison failed, or the model takes not even its example.
    """
    failures = []
    for inputs in trials(example, batches):
        try:
            return inputs, Certificate(tuple(against(inputs)))
        except CertificateError as error:
            if all(is_valid(gated, given) for given in inputs):
                raise
            failures.append(error)
    raise CertificateError(
        "There is nothing to compare the exported model with, so nothing was written: on the "
        "example that it was gated with, the gated model itself fails in float64 or gives nan. The "
        "usual causes are weights or gates that hold nan, and an example with which no output can "
        f"be computed. At first it was: {failures[0]}"
    ) from failures[-1]


def _check_count(module: nn.Module, parts: Parts, predicted: int) -> None:
    """Raise CertificateError where the parameters left are not those that the plan counts."""
    named = module.named_parameters()
    found = sum(p.numel() for name, p in named if name not in parts.unused)
    if found != predicted:
        raise CertificateError(
            f"The sliced model has {found:,} parameters where the plan predicts {predicted:,}: "
            "please report this with the model's code. Nothing was written."
        )
