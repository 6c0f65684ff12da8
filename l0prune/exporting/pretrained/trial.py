"""Is a model that was loaded the one that was saved?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from l0prune.capture.free_sizes import Inputs
from l0prune.errors import CertificateError
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.certificate import TOLERANCE
from l0prune.exporting.certify.difference import difference
from l0prune.exporting.certify.lending import lent

Trials = Sequence[tuple[str, Inputs]]  # a submodule's path, and what it is given


def fault_of(
    loaded: nn.Module,
    module: nn.Module,
    trials: Trials,
    renamed: Callable[[str], str] = lambda name: name,
) -> str:
    """What of it is not the same; empty if nothing is.

    Args:
        loaded: on the CPU.
        module: what it should be.
        trials: what both are given, in float32; by paths in ``module``.
        renamed: what a name in ``module`` is in ``loaded``; empty for what is gone.
    """
    numbers = _numbers_in(loaded)
    for old, value in _numbers_in(module).items():
        if not (name := renamed(old)):
            continue
        other = numbers.get(name)
        if other is None or abs(other - value) > 1e-9 * abs(value):
            return f"{name} would be {other}, not {value}"
    for path, inputs in trials:
        try:
            expected, found = (
                output_of(lent(each.eval(), torch.float32).get_submodule(at), inputs, torch.float32)
                for each, at in ((module, path), (loaded, renamed(path)))
            )
        except (AttributeError, CertificateError) as error:
            return f"it would not run: {next(iter(str(error).splitlines()), '')}"
        if not difference(expected, found) <= TOLERANCE["float32"]:
            return "it would compute something else"
    return ""


def _numbers_in(model: nn.Module) -> dict[str, float]:
    """The settings that are no sizes: ε of a norm, a scale. An output may hardly show them."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    }
