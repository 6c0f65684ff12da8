"""Choice of attributes and layers with which the user's class computes the same after the cut.

Candidates are tried, the surest first; the one with the fewest faults is kept, without the guesses
that it does not need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.compat import pytree
from l0prune.capture.provenance import is_within
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.certificate import Check
from l0prune.exporting.own_class.comparison import (
    EXACT,
    SOMETHING_ELSE,
    CachedStep,
    Comparison,
    Expected,
    compare_class,
    first_difference,
    has_gates,
)
from l0prune.exporting.own_class.layers import Layer, layers_for, query_scales
from l0prune.exporting.own_class.sizes import (
    Changes,
    changed_attributes,
    given_sizes,
    groups_left,
    guessed_sizes,
    joined,
    known_cause,
    resized,
    sizes_in_code,
    told_apart,
    unread_sizes,
)
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.tensors import flush, stored_in, under_all_names
from l0prune.files.cut_layers import drop
from l0prune.files.given_sizes import GIVEN, GivenSizes
from l0prune.gating.gated_class import original_class
from l0prune.plan.branch import Branch
from l0prune.progress.stages import stage


@dataclass(frozen=True)
class OwnClass:
    """Candidates for the model's own class at the new sizes.

    Attributes:
        plain: the ungated model at its old sizes.
        tensors: the cut tensors in float64, by name.
        candidates: attributes to change, the surest first: without and with guesses at sizes, and
            with sizes given to calls.
        layers: by path, changes of modules that need more than cut tensors and attributes.
        scales: factors of parameters, by name.
        hint: a known reason why the class may be wrong, for the user; empty if there is none.
        gone: removed branches that the class's code would still compute.
        unread: further attributes that follow the sizes, though no forward may read them.
        dropped: sizes of parameters of removed branches that the class's code reads, by name; zeros
            are in their place.
    """

    plain: nn.Module
    tensors: Mapping[str, Tensor]
    candidates: tuple[Changes, ...]
    layers: Mapping[str, Layer]
    scales: Mapping[str, Tensor]
    hint: str = ""
    gone: tuple[Branch, ...] = ()
    unread: Changes = field(default_factory=dict)
    dropped: Mapping[str, list[int]] = field(default_factory=dict)

    def build(self, changes: Changes) -> nn.Module:
        """Return a model of the class with the cut tensors and changed attributes."""
        result = resized(self.plain, changes, self.own_tensors())
        for path, layer in self.layers.items():
            layer.put_on(result.get_submodule(path))
        drop(result, self.dropped)
        return result

    def own_tensors(self, apart_from: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return the cut tensors with the class's scales, except below the paths ``apart_from``."""
        own = {name: tensor for name, tensor in self.tensors.items() if name not in self.dropped}
        for name, tensor in list(own.items()):
            path = name.rpartition(".")[0]
            if any(is_within(name, each) for each in apart_from):
                continue
            if path in self.layers:
                own[name] = self.layers[path].scaled(tensor)
            if name in self.scales:
                own[name] = own[name] * self.scales[name].to(tensor.device)
            old = stored_in(self.plain, name)
            if own[name] is not tensor and old is not None:
                flush(own[name], old.dtype)
        return own


def own_class(plain: nn.Module, chosen: KeptSlots, tensors: Mapping[str, Tensor]) -> OwnClass:
    """Return candidates for the resized model; ``tensors`` are cut, in float64, by name."""
    groups = groups_left(plain, chosen.plan, chosen.kept)
    named = under_all_names(plain, chosen.plan, tensors)
    by_tensors = changed_attributes(plain, named, groups)
    surest, in_code = (
        sizes_in_code(plain, chosen.plan, chosen.kept, by_kind=by_kind) for by_kind in (True, False)
    )
    candidates = [joined(surest, by_tensors), joined(in_code, by_tensors)]
    for largest in (False, True):
        guessed = guessed_sizes(plain, chosen.plan, chosen.kept, largest=largest)
        candidates += [joined(guessed, in_code, by_tensors), joined(guessed, by_tensors)]
    apart = [joined(in_code, each) for each in told_apart(plain, chosen.plan, chosen.kept)]
    candidates += [joined(each, by_tensors) for each in apart]
    layers = layers_for(plain, chosen)
    given = given_sizes(plain, chosen.plan, chosen.kept)
    given = {path: sizes for path, sizes in given.items() if path not in layers}
    candidates += [joined(each, given) for each in (*candidates[:3], by_tensors)]
    distinct = tuple(c for i, c in enumerate(candidates) if c not in candidates[:i])
    scales = {  # a layer whose attributes set its scale needs no factor
        name: scale
        for name, scale in query_scales(chosen).items()
        if "scale" not in layers.get(name.rpartition(".")[0], Layer()).attributes
    }
    unread, _ = unread_sizes(plain, chosen.plan, chosen.kept)
    unread = {path: attributes for path, attributes in unread.items() if path not in layers}
    cause = known_cause(chosen)
    return OwnClass(plain, tensors, distinct, layers, scales, cause, chosen.gone, unread)


@dataclass(frozen=True)
class Reference:
    """Outputs that the submodule at ``path`` of the resized model has to compute.

    Attributes:
        path: of the submodule; empty for the whole model.
        module: the one before the cut, not as a captured graph, which has no training mode.
        answers: expected outputs in eval mode.
        is_trained: whether training mode is compared.
        is_cached: whether a step with a cache is compared; not if the module takes other inputs.
    """

    path: str
    module: nn.Module
    answers: Sequence[Answer]
    is_trained: bool = True
    is_cached: bool = True

    def in_training(self, new: nn.Module) -> tuple[str, str]:
        """Return why a module is wrong in training mode, and why that could not be tried.

        A module that agrees in float32 as closely as is asked for in float64 needs no more.
        """
        if not self.is_trained:
            return "", ""
        quick = self._in_float32
        if quick.of is not None and not quick.fault_of(new, EXACT):
            return "", ""
        return self._in_full.fault_of(new), self._in_full.untried

    @cached_property
    def _in_float32(self) -> Expected:
        return Expected.by(self.module, self.answers[0].inputs, torch.float32)

    @cached_property
    def _in_full(self) -> Expected:
        return Expected.by(self.module, self.answers[0].inputs, self.answers[0].dtypes[0])

    @cached_property
    def cached_step(self) -> CachedStep | None:
        """Result expected of a step with a cache; None where the module keeps none."""
        if not self.is_cached:
            return None
        return CachedStep.of(self.module, self.answers[0].inputs, self.answers[0].dtypes[0])


@dataclass(frozen=True)
class ChosenClass:
    """Resized model with its changed attributes and, by path, the comparison of each cut part."""

    module: nn.Module
    changes: Changes
    comparisons: dict[str, Comparison]

    @property
    def faults(self) -> tuple[int, int, int]:
        """Numbers of parts: wrong, wrong for more than output values, wrong in training mode."""
        found = self.comparisons.values()
        wrong = [each for each in found if each.reason]
        failing = [each for each in wrong if each.reason != SOMETHING_ELSE]
        return len(wrong), len(failing), sum(bool(each.training) for each in found)

    def with_reasons_of(self, around: ChosenClass) -> ChosenClass:
        """Add the reasons why the class that skips the removed branches is wrong as well."""
        comparisons = dict(self.comparisons)
        for path, comparison in self.comparisons.items():
            other = around.comparisons[path].reason
            if comparison.reason and other and other != comparison.reason:
                reason = f"{comparison.reason}; without that, {other}"
                comparisons[path] = replace(comparison, reason=reason)
        return replace(self, comparisons=comparisons)

    def explained(self, references: Sequence[Reference], hint: str) -> ChosenClass:
        """Add details to the reasons of wrong parts: the first submodule that differs, the hint."""
        comparisons = {}
        for each in references:
            comparison, reason = self.comparisons[each.path], ""
            if comparison.reason == SOMETHING_ELSE and has_gates(each.module):
                new = self.module.get_submodule(each.path)
                first = first_difference(each.module, new, each.answers[0].inputs)
                reason = f"from {first} on" if first else ""
            details = "; ".join(filter(None, (reason, hint if comparison.reason else "")))
            if details:
                comparison = replace(comparison, reason=f"{comparison.reason} ({details})")
            comparisons[each.path] = comparison
        return replace(self, comparisons=comparisons)


def proven(
    own: OwnClass, answers: tuple[Answer, ...], what: str, cause: str
) -> tuple[nn.Module, tuple[Check, ...]]:
    """Return the resized model that computes these answers, and the comparisons that it passed.

    Raises:
        CertificateError: no candidate does; ``what`` and ``cause`` are for its message.
    """
    reference = Reference("", own.plain, answers, is_trained=False, is_cached=False)
    choice = choose(own, [reference])
    comparison = choice.comparisons[""]
    if comparison.reason:
        raise CertificateError(
            f"the {what} of this {type(own.plain).__name__} cannot be cut: {comparison.reason}. "
            f"The usual cause is {cause}"
        )
    return choice.module, comparison.checks


def choose(own: OwnClass, references: Sequence[Reference]) -> ChosenClass:
    """Return the resized model with the fewest faults, without the guesses that it does not need.

    The ``unread`` attributes are changed, too, unless that adds faults.
    """
    checking = f"{original_class(own.plain).__name__}: checking the smaller model"
    unread = _no_inputs(own.unread, own.plain, references)
    with_unread = [joined(unread, each) for each in own.candidates]
    first, *others = with_unread
    ways = others + [each for each in own.candidates if each not in with_unread]
    with stage(checking):
        sure = best = _judged(own, first, references)
    for number, changes in enumerate(ways, 2):
        if not any(best.faults):
            break
        with stage(f"{checking}, {number} of {1 + len(ways)}"):
            other = _judged(own, changes, references)
        if other.faults < best.faults or (other.faults == best.faults and best.faults[0]):
            best = other
    is_used = any(not comparison.reason for comparison in best.comparisons.values())
    for group in _guesses(own.plain, best.changes, sure.changes) if is_used else ():
        fewer = _without(best.changes, group, sure.changes)
        other = _judged(own, fewer, references)
        if other.faults <= best.faults:
            best = other
    if is_used and joined(unread, best.changes) != best.changes:
        other = _judged(own, joined(unread, best.changes), references)
        if other.faults <= best.faults:
            best = other
    return best.explained(references, own.hint)


def _no_inputs(unread: Changes, plain: nn.Module, references: Sequence[Reference]) -> Changes:
    """Leave out numbers that equal a size of an input (batch excepted), since they may mean it."""
    leaves = pytree.tree_leaves([each.answers[0].inputs for each in references])
    sizes = {size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape[1:]}
    left = {
        path: {n: new for n, new in of.items() if vars(plain.get_submodule(path))[n] not in sizes}
        for path, of in unread.items()
    }
    return {path: attributes for path, attributes in left.items() if attributes}


def first_right(
    classes: Iterable[OwnClass], references: Sequence[Reference]
) -> tuple[OwnClass, ChosenClass]:
    """Return the first class that is right, else the last one, with the model chosen for it.

    The last one is the class without skipped modules; its reasons include those of the first one.
    """
    around: ChosenClass | None = None
    for own in classes:
        choice = choose(own, references)
        if not any(comparison.reason for comparison in choice.comparisons.values()):
            return own, choice
        around = around or choice
    return own, choice if around is None or choice is around else choice.with_reasons_of(around)


def _judged(own: OwnClass, changes: Changes, references: Sequence[Reference]) -> ChosenClass:
    module = own.build(changes)
    comparisons = {}
    for each in references:
        new = module.get_submodule(each.path)
        reason = _of_branches(own.gone, each.path)
        comparison = Comparison(reason) if reason else compare_class(new, each.answers)
        if not comparison.reason and each.cached_step is not None:
            comparison = replace(comparison, reason=each.cached_step.fault_of(new))
        if not comparison.reason:
            training, untried = each.in_training(new)
            comparison = replace(comparison, training=training, untried=untried)
        comparisons[each.path] = comparison
    return ChosenClass(module, changes, comparisons)


def _of_branches(gone: Sequence[Branch], path: str) -> str:
    """Return why a part's class is wrong if its code computes removed branches; empty else."""
    mine = [each.name for each in gone if all(is_within(name, path) for name in each.tensors)]
    more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
    return f"the branch {mine[0]}{more} is gone, and its code computes that" if mine else ""


def _guesses(plain: nn.Module, changes: Changes, sure: Changes) -> list[list[tuple[str, str]]]:
    """Return the changes not among ``sure``, as (path, attribute), grouped by class and name."""
    groups: dict[tuple[type, str], list[tuple[str, str]]] = defaultdict(list)
    for path, attributes in changes.items():
        for name in attributes.keys() - sure.get(path, {}).keys():
            groups[type(plain.get_submodule(path)), name].append((path, name))
    return list(groups.values())


def _without(changes: Changes, group: Sequence[tuple[str, str]], sure: Changes) -> Changes:
    left = {
        path: {name: new for name, new in attributes.items() if (path, name) not in group}
        for path, attributes in changes.items()
    }
    return {path: attributes for path, attributes in left.items() if attributes}


def manifest(
    model: nn.Module, tensors: Mapping[str, Tensor], changes: Changes, layers: Mapping[str, Layer]
) -> dict[str, Any]:
    """Return old and new shapes, changed attributes and layer classes, as JSON data."""
    shapes = {
        name: {"old": list(old.shape), "new": list(tensors[name].shape)}
        for name, old in model.state_dict().items()
        if name in tensors
    }
    attributes = {path: dict(of) for path, of in changes.items()}
    for path, layer in layers.items():
        attributes.setdefault(path, {}).update(layer.attributes)
    kinds = {path: layer.kind for path, layer in layers.items() if layer.kind}
    kinds |= {path: GivenSizes.__name__ for path, of in changes.items() if GIVEN in of}
    return {"shapes": shapes, "attributes": attributes, "layers": kinds}


def constants(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Return old and new shape of each changed tensor that is not in the state_dict."""
    found, state = {}, model.state_dict()
    for name, new in tensors.items():
        old = None if name in state else stored_in(model, name)
        if old is not None and not (old.shape == new.shape and torch.equal(old.to(new), new)):
            found[name] = {"old": list(old.shape), "new": list(new.shape)}
    return found
