"""A runtime's rounding, by the gated network at its old sizes beside its exact answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from l0prune.capture.copying import copied_around
from l0prune.capture.sizes import Inputs
from l0prune.errors import NotGated, warn
from l0prune.exporting.certify.answers import output_of
from l0prune.exporting.certify.certificate import RuntimeRounding
from l0prune.exporting.certify.difference import common_scales, comparable, differences
from l0prune.exporting.certify.dtypes import (
    CPU,
    cast,
    casts_to_less,
    converted,
    lent,
    placed,
)
from l0prune.exporting.network import Original, copies_of
from l0prune.exporting.own_class.sizes import resized
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.program import reexport
from l0prune.exporting.slicing.tensors import cut_by_plan
from l0prune.progress.stages import stage

Run = Callable[[ExportedProgram, Inputs], Sequence[Tensor]]


@stage("measuring how much the runtime rounds")
def rounding_in(run: Run, original: Original | None, inputs: Inputs) -> RuntimeRounding:
    """Return the error of each output where a runtime runs the uncut network in float32.

    That is the gated network at its old sizes; the model itself, if it carries no gates. Networks
    round more on some inputs than on others: it runs on these ``inputs``, or on its example, if
    they are those of a part. Empty where that is unknown: the user's model is gone, of which a
    warning tells, or the runtime fails.
    """
    if original is None:
        return RuntimeRounding()
    model = original()
    if model is None:
        warn(
            "the gated model is gone, so that nobody can tell how much this runtime rounds by "
            "itself, and a file may be refused for it: keep the model until the files are written"
        )
        return RuntimeRounding()
    with suppress(Exception):  # each runtime has its own
        for whole, plain, given in _runs(model, inputs):
            with suppress(Exception):
                found = _rounding_on(run, whole, plain, given)
                return replace(found, is_other=whole is plain)
    return RuntimeRounding()


def _runs(model: nn.Module, inputs: Inputs) -> Iterator[tuple[nn.Module, nn.Module, Inputs]]:
    """Yield a network, the same with all gates open, and inputs for both."""
    try:
        network = copies_of(model)
    except NotGated:
        dense = placed(copied_around(model).eval(), CPU)
        yield dense, dense, inputs
        return
    stays = torch.ones_like(network.z, dtype=torch.bool)
    tensors = cut_by_plan(network.plain, KeptSlots(network.plan, network.z, stays))
    if tensors is not None:
        whole, plain = placed(resized(network.plain, {}, tensors), CPU), placed(network.plain, CPU)
        yield from ((whole, plain, given) for given in (inputs, network.example))


def _rounding_on(run: Run, whole: nn.Module, plain: nn.Module, given: Inputs) -> RuntimeRounding:
    """Return the rounding of a network whose outputs with all gates open are ``plain``'s."""
    exact, opened = (
        output_of(lent(model, torch.float64), given, torch.float64) for model in (whole, plain)
    )
    inputs = cast(given, torch.float32)
    program = reexport(converted(whole, torch.float32), inputs, dynamic=False).program
    if casts_to_less(program.graph_module, torch.float32):
        return RuntimeRounding()
    expected = [leaf for leaf in comparable(exact) if isinstance(leaf, Tensor)]
    ones = [1.0] * len(expected)
    return RuntimeRounding(
        differences(expected, run(program, inputs), ones), common_scales([opened])
    )
