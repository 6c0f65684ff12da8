"""Is a resized module of the user's own class the same function, and can it be trained?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l0prune.calls import Inputs
from l0prune.errors import CertificateError
from l0prune.export.certificate import Check, cast, compare
from l0prune.export.doubles import InDoubles
from l0prune.export.dtypes import converted


@dataclass(frozen=True)
class Verdict:
    """Whether a resized module can stand in for another.

    Attributes:
        reason: why not, for the user; empty where it can.
        training: why it fails in training mode, where the model did not; empty else.
        checks: the comparisons that it passed.
    """

    reason: str = ""
    training: str = ""
    checks: tuple[Check, ...] = ()


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
    return Verdict(checks=tuple(checks))


def training_fault(old: nn.Module, new: nn.Module, inputs: Inputs) -> str:
    """Why the resized module does not run in training mode; empty if it does, or neither did.

    Only the shapes of what comes out can be compared: training may be random.
    """
    try:
        expected = _shapes_in_training(old, inputs)
    except Exception:  # it wants more than it is given here, such as targets
        return ""
    try:
        found = _shapes_in_training(new, inputs)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return f"its forward does not allow these sizes: {type(error).__name__}: {first}"
    return "" if found == expected else "its output has another shape at these sizes"


def _shapes_in_training(module: nn.Module, inputs: Inputs) -> list[torch.Size]:
    again = converted(module, torch.float64).train()
    args, kwargs = cast(inputs, torch.float64)
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]), InDoubles():
        warnings.simplefilter("ignore")
        output = again(*args, **kwargs)
    return [leaf.shape for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def note_on(verdicts: Mapping[str, Verdict], unused: Sequence[str]) -> str:
    """What the user has to know about the module that is exported; empty if nothing.

    Args:
        verdicts: by path of each captured part, whether it could be of its own class.
        unused: parameters that eval mode does not use, and that were therefore not cut.
    """
    lines = [
        f"{path or 'The module'} is the captured graph, not of its own class: {verdict.reason}."
        for path, verdict in verdicts.items()
        if verdict.reason
    ]
    if unused and not lines:
        modules = dict.fromkeys(name.partition(".")[0] for name in unused)
        lines.append(f"{', '.join(modules)}: not used in eval mode, and therefore not cut.")
    lines += [
        f"{path or 'The module'} fails in training mode: {verdict.training}."
        for path, verdict in verdicts.items()
        if verdict.training
    ]
    return "\n".join(lines)
