"""Value that every pass of an export takes and gives: a gated model on its way to a smaller one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from l0prune.capture.copying import copied_around
from l0prune.capture.model_checks import check_one_device
from l0prune.capture.sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.exporting.certify.answers import BOTH, Answer
from l0prune.exporting.certify.certificate import Check
from l0prune.exporting.certify.dtypes import Dtypes, cast
from l0prune.exporting.certify.inputs import Sizes, sizes_taken
from l0prune.exporting.own_class.choice import OwnClass
from l0prune.exporting.own_class.comparison import Comparison
from l0prune.exporting.own_class.layers import Layer
from l0prune.exporting.own_class.sizes import Changes
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.gating.attaching import check_intact, detach, holder
from l0prune.infer.parts import Parts
from l0prune.plan.plan import Plan
from l0prune.running.device import check_values, device_of, exact_device


class NotThisWay(Exception):
    """Raised by a pass where the passes that it is one of lead to no right model."""


@dataclass(frozen=True)
class Network:
    """A gated model in eval mode, and what the passes so far have made of it.

    It is on its own device, where that knows float64, else on the CPU.

    A pass gives back another one with more of these set (``dataclasses.replace``).

    Attributes:
        gated: a copy of it around its own weights, which nobody may write into.
        plain: another one, without its gates.
        plan: where its gates act.
        z: their values in float64, flat, on the CPU, so that the certificate sees the cut and not
            the rounding of a fold.
        example: inputs in the model's dtype, or as they were given where it has several.
        dtypes: of the model's tensors.
        free: sizes of its inputs that are free beside the batch.
        sizes: such as it takes.
        compared_in: dtypes in which it is compared.
        batches: sizes of batches on which its own class is compared; those of an export if empty.
        asked: what the gated model has answered, so that it need not run twice on one input.
        parts: set by ``capture_parts``: its graphs with their plans; None without a capture.
        chosen: set by ``select``: the slots that stay, on the axes of ``parts.plan`` or ``plan``.
        by_part: set by ``select``: the same on the axes of each part, by path.
        tensors: set by ``slice_tensors`` and ``slice_by_plan``: the cut tensors in float64, by
            name; from ``verify`` on as the smaller model has to have them.
        graphs: set by ``slice_graphs``: the captured parts at the new sizes, by path.
        narrow: set by ``slice_graphs``: makes of its inputs those of the smaller model.
        classes: set by ``resize_class`` and ``drop_branches``: what its own class may be at the
            new sizes, the best first.
        module: set by ``verify``, as all that follows: the small model, of its own class or with
            its captured graphs.
        answers: what each part of the gated model computes on what it was given, by path.
        checks: the comparisons, all of which passed.
        comparisons: whether each part could be of its own class, by path.
        changes: attributes of the own class that follow the new sizes.
        layers: what its layers become that need more than that, by path.
        scales: what parameters were multiplied with beside their gates, by name.
        dropped: parameters in whose place the module has zeros.
    """

    gated: nn.Module
    plain: nn.Module
    plan: Plan
    z: Tensor
    example: Inputs
    dtypes: Dtypes
    free: FreeSizes = ALL_FIXED
    sizes: Sizes = ({},)
    compared_in: Sequence[torch.dtype] = BOTH
    batches: Sequence[int] = ()
    asked: list[tuple[Answer, ...]] = field(default_factory=list)
    parts: Parts | None = None
    chosen: KeptSlots | None = None
    by_part: Mapping[str, KeptSlots] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    graphs: Mapping[str, GraphModule] = field(default_factory=dict)
    narrow: Callable[[Inputs], Inputs] = lambda inputs: inputs
    classes: Iterable[OwnClass] = ()
    module: nn.Module | None = None
    answers: Mapping[str, tuple[Answer, ...]] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    changes: Changes = field(default_factory=dict)
    layers: Mapping[str, Layer] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    dropped: Sequence[str] = ()

    @property
    def captured(self) -> Parts:
        """The parts, after ``capture_parts``."""
        assert self.parts is not None
        return self.parts

    @property
    def selected(self) -> KeptSlots:
        """The slots that stay, after ``select``."""
        assert self.chosen is not None
        return self.chosen

    @property
    def small(self) -> nn.Module:
        """The smaller model, after ``verify``."""
        assert self.module is not None
        return self.module

    @property
    def gone(self) -> list[str]:
        """The branches that are left out, by name."""
        return [branch.name for branch in self.selected.gone]


Pass = Callable[[Network], Network]


def run(passes: Iterable[Pass], network: Network) -> Network:
    """Let the passes follow one another; ``NotThisWay`` where one of them leads no further."""
    for each in passes:
        network = each(network)
    return network


def attempt(passes: Iterable[Pass], network: Network) -> Network | None:
    """Let the passes follow one another; None where one of them leads no further.

    By then all that they made is let go of, as it would not be while an exception is handled.
    """
    try:
        return run(passes, network)
    except NotThisWay:
        return None


def copies_of(model: nn.Module) -> Network:
    """Copy the gated model, with and without its gates: the network before any pass.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a module that carried gates has been replaced since, there are no weights, or
            they are on several devices.
    """
    check_one_device(model)
    check_values(model)
    check_intact(model)
    gated = copied_around(model).to(exact_device(device_of(model))).eval()
    root, acting = holder(gated)
    if acting.quantizer is not None:
        if acting.quantizer.is_on:
            acting.quantizer.bake(root)
        acting.quantizer.off()
    plain = copied_around(gated)
    bank = detach(plain)
    dtypes = Dtypes.of(plain)
    example = cast(bank.example, None if dtypes.others else dtypes.main, device_of(gated))
    free = bank.free
    sizes = sizes_taken(gated, example, free) if free else ({},)
    return Network(gated, plain, bank.plan, bank.double().z().cpu(), example, dtypes, free, sizes)
