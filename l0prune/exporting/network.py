"""State that every pass of an export takes and returns: the gated model and results so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ref

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
from l0prune.progress.stages import steps
from l0prune.running.device import check_values, device_of, exact_device

Original = Callable[[], nn.Module | None]
_KEPT_ALIVE = 2**28  # bytes of a model, at most, that an export keeps for the rounding of its files


class NotThisWay(Exception):
    """Raised by a pass when its list of passes cannot produce a proven model."""


@dataclass(frozen=True)
class Network:
    """Gated model in eval mode with the results of the passes so far.

    It is on the model's device, if that supports float64, else on the CPU.

    A pass returns a copy with more attributes set (``dataclasses.replace``).

    Attributes:
        gated: a copy of the user's model that shares its weights, which nobody may write into.
        plain: another copy, without gates.
        plan: where the gates act.
        z: values of the gates in float64, flat, on the CPU, so that the certificate measures the
            cut and not the rounding of a fold.
        example: inputs in the model's dtype, or as they were given if it has several dtypes.
        dtypes: of the model's tensors.
        free: input sizes that are free beside the batch.
        sizes: values of the free sizes that the model takes.
        original: returns the user's model; None if it is gone by the time a file is written.
        compared_in: dtypes of the comparisons.
        batches: batch sizes on which the own class is compared; those of an export if empty.
        asked: cache of the gated model's answers, so that it does not run twice on one input.
        parts: set by ``capture_parts``: captured graphs with their plans; None without a capture.
        chosen: set by ``select``: the slots that stay, on the axes of ``parts.plan`` or ``plan``.
        by_part: set by ``select``: the same on the axes of each part, by path.
        tensors: set by ``slice_tensors`` and ``slice_by_plan``: the cut tensors in float64, by
            name; from ``verify`` on with the scales of the small model.
        graphs: set by ``slice_graphs``: the captured parts at the new sizes, by path.
        narrow: set by ``slice_graphs``: converts inputs to those of the small model.
        classes: set by ``resize_class`` and ``drop_branches``: candidates for the own class at the
            new sizes, the best first.
        module: set by ``verify``, as all that follows: the small model, of its own class or with
            its captured graphs.
        answers: outputs of each part of the gated model on its inputs, by path.
        checks: the comparisons, all of which passed.
        comparisons: verdict on the own class of each part, by path.
        changes: attributes of the own class that follow the new sizes.
        layers: changes of layers that need more than that, by path.
        scales: factors of parameters beside their gates, by name.
        dropped: sizes of parameters that the module has zeros instead of, by name.
    """

    gated: nn.Module
    plain: nn.Module
    plan: Plan
    z: Tensor
    example: Inputs
    dtypes: Dtypes
    free: FreeSizes = ALL_FIXED
    sizes: Sizes = ({},)
    original: Original | None = None
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
    dropped: Mapping[str, list[int]] = field(default_factory=dict)

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
        """The removed branches, by name."""
        return [branch.name for branch in self.selected.gone]


def original_of(model: nn.Module) -> Original:
    """Return a function that returns the model, and keeps a small one alive."""
    size = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    return ref(model) if size > _KEPT_ALIVE else lambda: model


Pass = Callable[[Network], Network]


def run(passes: Sequence[Pass], network: Network) -> Network:
    """Run the passes in order; a pass may raise ``NotThisWay``."""
    for each in steps(passes):
        network = each(network)
    return network


def attempt(passes: Sequence[Pass], network: Network) -> Network | None:
    """Run the passes in order; return None if one raises ``NotThisWay``.

    On return their results are freed, which a traceback would keep while an exception is handled.
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
    z = bank.double().z().cpu()
    return Network(gated, plain, bank.plan, z, example, dtypes, free, sizes, original_of(model))
