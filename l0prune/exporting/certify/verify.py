"""Passes of an export that verify that the small model computes what the gated one does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.copying import copied
from l0prune.capture.example_inputs import examples_given, first_of
from l0prune.capture.provenance import is_within
from l0prune.capture.sizes import Inputs
from l0prune.errors import CertificateError, in_a_line
from l0prune.exporting.certify.answers import (
    Answer,
    answers_of,
    holds_nan,
    is_finite,
    is_valid,
    output_of,
)
from l0prune.exporting.certify.certificate import (
    Certificate,
    Check,
    answers_alone,
    compare,
    compare_in_parts,
)
from l0prune.exporting.certify.difference import common_scales
from l0prune.exporting.certify.dtypes import asks_for_less, lent, name_of, restored
from l0prune.exporting.certify.inputs import trials
from l0prune.exporting.network import Network, NotThisWay
from l0prune.exporting.own_class.choice import Reference, choose, first_right
from l0prune.exporting.own_class.replacement import replace_part
from l0prune.infer.parts import Parts
from l0prune.plan.cost import cost_of
from l0prune.plan.plan import Plan
from l0prune.progress.stages import stage

Answers = TypeVar("Answers")

BATCHES = (2, 3, 1)  # 1 as well, which torch.export specializes
_FAINT = 1e-2  # of an output's size on the example


def counted_in(plan: Plan) -> Set[str]:
    """Return the names of parameters that the plan counts: those used in eval mode."""
    return {cost.tensor for cost in plan.costs if cost.unit == "params"}


def verify_class(network: Network) -> Network:
    """Verify the model of its own class by its outputs alone, without a capture.

    Raises:
        NotThisWay: no class computes the same, or this cannot be shown: the model does not take
            one of the batch sizes, or its forward does not read its own parameters (but those of
            another object, which is not cut with a copy).
    """
    chosen, counted = network.selected, counted_in(network.plan)
    predicted = round(cost_of(network.plan).amount(chosen.kept.double(), "params"))
    for own in network.classes:
        answers = answers_to_all(network, network.batches or BATCHES)
        if not answers or not counted <= answers[0].read:
            break
        choice = choose(own, [Reference("", network.gated, answers)])
        comparison = choice.comparisons[""]
        if not comparison.reason and _count(choice.module, counted) == predicted:
            return replace(
                network,
                classes=(),
                module=choice.module,
                answers={"": answers},
                checks=Certificate(comparison.checks).checks,
                comparisons={"": comparison},
                changes=choice.changes,
                layers=own.layers,
                tensors=own.own_tensors(),
                scales=own.scales,
            )
    raise NotThisWay


def answers_to_all(network: Network, batches: Sequence[int]) -> tuple[Answer, ...]:
    """Return the gated model's answers to inputs of all these batch sizes; empty if not all run."""
    for inputs in _trials(network, batches, network.sizes):
        if len(inputs) == len(batches):
            with suppress(CertificateError):
                answers = _answers(network, inputs)
                if not any(holds_nan(answer.exact) for answer in answers):
                    return answers
    return ()


def _trials(
    network: Network, batches: Sequence[int | None], sizes: Sequence[Mapping[str, int]]
) -> Iterator[tuple[Inputs, ...]]:
    """Yield inputs as ``trials`` does, without those on which an output vanishes.

    A detector that finds nothing in noise gives numbers there that a runtime rounds to others.
    """
    for inputs in trials(network.example, batches, network.free, sizes):
        if inputs[0] is network.example or not _is_faint(network, inputs):
            yield inputs


def _is_faint(network: Network, inputs: Sequence[Inputs]) -> bool:
    """Return whether an output is far smaller on these inputs than on the first example."""
    dtype = network.compared_in[-1]
    try:
        usual = output_of(lent(network.gated, dtype), first_of(network.example), dtype)
        found = _answers(network, inputs)[0].scales
    except CertificateError:  # the model does not take them
        return False
    pairs = zip(found, common_scales([usual]), strict=False)
    return any(scale < _FAINT * of_example for scale, of_example in pairs)


def _answers(network: Network, inputs: Sequence[Inputs]) -> tuple[Answer, ...]:
    """Return the gated model's answers, from ``network.asked`` if these inputs were run before."""
    for known in network.asked:
        if _is_same([answer.inputs for answer in known], list(inputs)):
            return known
    answers = answers_of(network.gated, inputs, dtypes=network.compared_in)
    network.asked.append(answers)
    return answers


def _is_same(some: list[Inputs], others: list[Inputs]) -> bool:
    (first, structure), (second, other) = map(pytree.tree_flatten, (some, others))
    return structure == other and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b
        for a, b in zip(first, second, strict=True)
    )


def verify(network: Network) -> Network:
    """Verify the graphs, which must be right, and the own class, which may be; choose the best.

    Raises:
        CertificateError: the small model does not compute what the gated one does, or cannot be
            compared with it.
    """
    predicted = cost_of(network.captured.plan).actual(network.selected.is_open, "params")
    verify_parts = _verify_whole if "" in network.graphs else _verify_islands
    return replace(verify_parts(network, predicted), classes=())


def _verify_whole(network: Network, predicted: int) -> Network:
    """Verify a model that was captured whole: its graph must be right, its own class may be."""
    captured, graph = network.captured.found[0].analysis.captured, network.graphs[""]
    _check_count(graph, network.captured, predicted)
    batches = captured.batches.first(BATCHES) if captured.dynamic else (captured.batch,)

    def against(inputs: Sequence[Inputs]) -> tuple[tuple[Answer, ...], list[Check]]:
        answers = tuple(
            replace(answer, inputs=network.narrow(answer.inputs))
            for answer in _answers(network, inputs)
        )
        with stage("comparing the smaller graph with the gated model"):
            return answers, list(compare(answers, graph))

    sizes = [{name: each[name] for name in captured.free} for each in network.sizes]
    kinds = _trials(network, batches, sizes)
    answers, certificate = _certified(network, kinds, against)
    own, choice = first_right(network.classes, [Reference("", network.gated, answers)])
    comparison = choice.comparisons[""]
    is_graph = bool(comparison.reason)
    return replace(
        network,
        module=graph if is_graph else choice.module,
        answers={"": answers},
        checks=(*certificate.checks, *comparison.checks),
        comparisons={"": comparison},
        changes=choice.changes,
        layers={} if is_graph else own.layers,
        tensors=dict(own.tensors) if is_graph else own.own_tensors(),
        dropped={} if is_graph else own.dropped,
    )


def _verify_islands(network: Network, predicted: int) -> Network:
    """Verify a model captured in parts, each part with its own class, or else its graph."""
    parts, graphs = network.captured, network.graphs
    paths = list(graphs)
    first, of_one = _one_example(network, paths)
    # one candidate for all parts, so that what they share stays shared
    references = [
        Reference(
            p.path,
            network.plain.get_submodule(p.path),
            (*answers_of(graphs[p.path], [p.example]), *of_one.get(p.path, ())),
        )
        for p in parts.found
    ]
    own, choice = first_right(network.classes, references)
    small, changes = choice.module, choice.changes
    layers = dict(own.layers)
    replaced = [path for path, comparison in choice.comparisons.items() if comparison.reason]
    for path in replaced:
        replace_part(small, path, graphs[path])
        changes = {p: c for p, c in changes.items() if not is_within(p, path)}
        layers = {p: c for p, c in layers.items() if not is_within(p, path)}
    _check_count(small, parts, predicted)
    # a part's graph accepts the example's sizes only
    also = () if replaced else first

    def against(inputs: Sequence[Inputs]) -> tuple[dict[str, tuple[Answer, ...]], list[Check]]:
        return compare_in_parts(network.gated, small, paths, (*inputs, *also))

    try:
        answers, certificate = _certified(network, trials(network.example, (None, None)), against)
    except CertificateError as error:
        raise CertificateError(
            f"{error}\nOnly parts of this model could be captured ({', '.join(paths)}), and the "
            "code around them may read what was cut off them (a weight, a size). What it reads has "
            f"to stay: gate with exclude=... for those axes, such as exclude='{paths[0]}.*'."
        ) from error
    if replaced:
        answers |= {p: (*answers[p], *of_one.get(p, ())) for p in set(paths) - set(replaced)}
    return replace(
        network,
        module=small,
        answers=answers,
        checks=certificate.checks,
        comparisons=choice.comparisons,
        changes=changes,
        layers=layers,
        tensors=own.own_tensors(apart_from=replaced),
        dropped={
            name: shape
            for name, shape in own.dropped.items()
            if not any(is_within(name, path) for path in replaced)
        },
    )


def _one_example(
    network: Network, paths: Sequence[str]
) -> tuple[tuple[Inputs, ...], dict[str, tuple[Answer, ...]]]:
    """Return the first single example, and each part's answers to the inputs it receives for it.

    Both are empty if the model does not take it, or if the example is a single one.
    """
    if examples_given(network.example) > 1:
        first = first_of(network.example)
        answers = answers_alone(network.gated, paths, first)
        if answers is not None:
            return (first,), answers
    return (), {}


def _certified(
    network: Network,
    kinds: Iterable[tuple[Inputs, ...]],
    against: Callable[[Sequence[Inputs]], tuple[Answers, Sequence[Check]]],
) -> tuple[Answers, Certificate]:
    """Return a certificate with its answers, on the first kind of inputs that the model takes.

    Raises:
        CertificateError: the comparison failed, or the model does not take even its example.
    """
    failures = []
    for inputs in kinds:
        try:
            answers, checks = against(inputs)
            return answers, Certificate(tuple(checks))
        except CertificateError as error:
            if all(is_valid(network.gated, given) for given in inputs):
                raise
            failures.append(error)
    raise CertificateError(
        "There is nothing to compare the exported model with, so nothing was written: on the "
        "example that it was gated with, the gated model itself fails in float64 or gives nan. The "
        "usual causes are weights or gates that hold nan, and an example with which no output can "
        f"be computed. At first it was: {failures[0]}"
    ) from failures[-1]


def check_own_dtypes(network: Network) -> None:
    """Run the small model in its own dtypes, if these are less precise than the comparisons'.

    Raises:
        CertificateError: it fails, or its output is not finite, and the gated model's is.
    """
    single = torch.float32
    small = {id(made): made for made in (network.small, network.graphs.get("")) if made is not None}
    if not any(asks_for_less(made, single) for made in small.values()):
        return
    try:
        if not is_finite(network.gated, network.example):
            return
    except Exception:  # some operators lack some dtypes on the CPU
        return
    for exact in small.values():
        what = ""
        try:
            made = exact if exact is network.small else restored(copied(exact), network.dtypes)
            what = "" if is_finite(made, network.narrow(network.example)) else "it gives inf or nan"
        except Exception as error:
            what = in_a_line(error)
        if what:
            raise CertificateError(
                "The exported model computes the same in float32 and float64. But in the model's "
                f"own {name_of(network.dtypes.main)} it does not run on the example, where the "
                f"gated one does: {what}. Nothing was written. Convert the model (model.float()) "
                "before its export."
            )


def _check_count(module: nn.Module, parts: Parts, predicted: int) -> None:
    """Raise CertificateError if the number of parameters is not the one that the plan predicts."""
    names = {name for name, _ in module.named_parameters()} - set(parts.unused)
    found = _count(module, names)
    if found != predicted:
        raise CertificateError(
            f"The sliced model has {found:,} parameters where the plan predicts {predicted:,}: "
            "please report this with the model's code. Nothing was written."
        )


def _count(module: nn.Module, names: Set[str]) -> int:
    """Count the elements of the parameters of these names."""
    return sum(p.numel() for name, p in module.named_parameters() if name in names)
