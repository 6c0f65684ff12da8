"""The user's own class at the new sizes, where it is shown to be the same function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from l0prune.calls import Inputs
from l0prune.errors import CertificateError
from l0prune.export.certificate import Check, compare
from l0prune.export.own_sizes import remembered_sizes
from l0prune.export.program import KEPT_INPUTS
from l0prune.export.resize import Changes, changed_attributes, resized
from l0prune.plan import Plan


@dataclass(frozen=True)
class Candidate:
    """The model's own class with the cut tensors and some attributes changed, by module path."""

    module: nn.Module
    changes: Changes


def candidates(
    plain: nn.Module,
    plan: Plan,
    kept: Tensor,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
) -> list[Candidate]:
    """What the resized model may be, the least changed first: without and with guesses at sizes.

    Args:
        plain: the ungated model at its old sizes.
        plan: its plan.
        kept: the slots that stay.
        tensors: the cut tensors in float64, by name.
        state: the cut tensors under every key of the state_dict.
    """
    sure = changed_attributes(plain, state)
    tried = [sure]
    for bold in (False, True):
        guessed = remembered_sizes(plain, plan, kept, bold=bold)
        tried.append({p: {**guessed.get(p, {}), **sure.get(p, {})} for p in {**guessed, **sure}})
    distinct = [changes for i, changes in enumerate(tried) if changes not in tried[:i]]
    return [Candidate(resized(plain, changes, tensors), changes) for changes in distinct]


@dataclass(frozen=True)
class Verdict:
    """Whether a resized module can stand in for another.

    Attributes:
        reason: why not, for the user; empty where it can.
        checks: the comparisons that it passed.
    """

    reason: str = ""
    checks: tuple[Check, ...] = ()


def choose(
    found: Sequence[Candidate], path: str, reference: nn.Module, inputs: Sequence[Inputs]
) -> tuple[Candidate, Verdict]:
    """The first candidate whose submodule at ``path`` does what ``reference`` does, if any does."""
    verdicts = []
    for candidate in found:
        verdicts.append(judge(candidate.module.get_submodule(path), reference, inputs))
        if not verdicts[-1].reason:
            return candidate, verdicts[-1]
    return found[-1], verdicts[-1]


def gathers(graph: nn.Module, plan: Plan, is_open: Tensor) -> str:
    """Why no class of the user's can stand in where inputs are picked one by one; else empty."""
    if not any(name.startswith(KEPT_INPUTS) for name, _ in graph.named_buffers()):
        return ""
    picked = [a.name for a in plan.axes if a.kind == "input" and not is_open[a.slice].all()]
    return (
        f"single inputs are picked ({', '.join(picked)}), for which its forward has no place; gate "
        "with exclude='*.in' to keep the class"
    )


def judge(module: nn.Module, reference: nn.Module, inputs: Sequence[Inputs]) -> Verdict:
    """Does the resized module compute what ``reference`` does?

    It does not where its forward has sizes written into it, or where it derives one size from
    another (as ``nn.MultiheadAttention`` does).
    """
    try:
        checks = compare(reference, module, inputs, "class")
    except CertificateError as error:  # its forward raised: that is the reason
        cause = error.__cause__ or error
        first = next(iter(str(cause).splitlines()), "")
        return Verdict(f"its forward does not allow these sizes: {type(cause).__name__}: {first}")
    if not all(check.passed for check in checks):
        return Verdict("its forward computes something else at these sizes")
    return Verdict("", tuple(checks))


def note_on(reasons: dict[str, str], unused: Sequence[str]) -> str:
    """What the user has to know about the module that is exported; empty if nothing.

    Args:
        reasons: by path of each captured part, why it could not be of its own class.
        unused: parameters that eval mode does not use, and that were therefore not cut.
    """
    lines = [
        f"{path or 'The module'} is the captured graph, not of its own class: {reason}."
        for path, reason in reasons.items()
        if reason
    ]
    if unused and not any(reasons.values()):
        modules = dict.fromkeys(name.partition(".")[0] for name in unused)
        lines.append(
            f"{', '.join(modules)}: not used in eval mode, and therefore not cut. Training mode "
            "may fail there, where these read what has been cut."
        )
    return "\n".join(lines)
