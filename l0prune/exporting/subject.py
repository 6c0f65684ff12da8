"""What an export works on: copies of the gated model, so that the user's own stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from l0prune.capture.capture import Captured, capture
from l0prune.capture.copying import copied_around
from l0prune.capture.sizes import ALL_FIXED, FreeSizes, Inputs
from l0prune.errors import UsageError
from l0prune.exporting.certify.answers import Answer
from l0prune.exporting.certify.dtypes import Dtypes, cast
from l0prune.exporting.certify.inputs import Sizes, sizes_taken, with_free_batch
from l0prune.gating.attaching import check_intact, detach
from l0prune.infer.build import analyse
from l0prune.infer.own_code import with_code
from l0prune.infer.parts import Part, Parts, parts_of
from l0prune.infer.rewrites.resized import with_switches
from l0prune.plan.branch import KIND
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switched
from l0prune.running.stages import stage


@dataclass(frozen=True)
class Subject:
    """A gated model as it is when its export begins, on the CPU and in eval mode.

    Attributes:
        gated: a copy of it around its own weights, which nobody may write into.
        plain: another one, without its gates.
        plan: where its gates act.
        z: their values in float64, flat, so that the certificate sees the cut and not the
            rounding of a fold.
        example: inputs in the model's dtype, or as they were given where it has several.
        dtypes: of the model's tensors.
        free: sizes of its inputs that are free beside the batch.
        sizes: such as it takes.
        exact_alone: whether float64 is enough to compare in, since nothing is handed out.
        narrow: makes of its inputs those of the smaller model.
        asked: what the gated model has answered, so that it need not run twice on one input.
    """

    gated: nn.Module
    plain: nn.Module
    plan: Plan
    z: Tensor
    example: Inputs
    dtypes: Dtypes
    free: FreeSizes = ALL_FIXED
    sizes: Sizes = ({},)
    exact_alone: bool = False
    narrow: Callable[[Inputs], Inputs] = lambda inputs: inputs
    asked: list[tuple[Answer, ...]] = field(default_factory=list)


def subject_of(model: nn.Module) -> Subject:
    """Copies of the gated model, with its gates' values.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a module that carried gates has been replaced since, or there are no weights.
    """
    _check_has_values(model)
    check_intact(model)
    gated = copied_around(model).eval()
    plain = copied_around(gated)
    bank = detach(plain)
    dtypes = Dtypes.of(plain)
    example = cast(bank.example, None if dtypes.others else dtypes.main)
    free = bank.free
    sizes = sizes_taken(gated, example, free) if free else ({},)
    return Subject(gated, plain, bank.plan, bank.double().z(), example, dtypes, free, sizes)


def _check_has_values(model: nn.Module) -> None:
    """Raise UsageError for a model on the meta device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = next((name for name, tensor in tensors if tensor.is_meta), None)
    if empty is not None:
        raise UsageError(
            f"{empty} is on the meta device: it has a shape and no values, so there is nothing to "
            "export. survey and gate take such a model. For export, build it on the CPU, gate it "
            "in the same way, and load the trained weights and gates: model.load_state_dict(...)."
        )


@stage("capturing the model")
def surveyed(subject: Subject, *, frees_batch: bool = True) -> Parts:
    """The model's parts, the whole with a free batch size where that finds the same plan.

    Args:
        subject: the model.
        frees_batch: whether a free batch size is tried, which takes twice as long and more.

    Raises:
        CaptureError: torch.export can no longer follow it.
        UsageError: the model has changed since it was gated.
    """
    plain, example, gated_by = subject.plain, subject.example, subject.plan
    if gated_by.parts == ("",):
        for captured in _captures(subject, frees_batch):
            analysis = with_code(analyse(captured), plain)
            analysis = with_switches(analysis, _as_gated(analysis.plan, gated_by))
            if _same_gates(analysis.plan, gated_by):
                unused = analysis.captured.unused
                return Parts(analysis.plan, example, [Part("", analysis, example)], unused)
    else:
        parts = parts_of(plain, example)
        parts.plan = _as_gated(parts.plan, gated_by)
        for number, part in enumerate(parts.found):
            analysis = with_switches(part.analysis, _as_gated(part.analysis.plan, gated_by))
            parts.found[number] = replace(part, analysis=analysis)
        if _same_gates(parts.plan, gated_by):
            return parts
    raise UsageError(
        "The gates do not fit what a copy of the model computes. Either its forward has changed "
        "since it was gated: ungate it (l0prune.ungate) and gate it again. Or its code reaches the "
        "model by a global or another object, where a copy still finds the original: let it use "
        "self, or what self holds."
    )


def _captures(subject: Subject, frees_batch: bool) -> Iterator[Captured]:
    """Those of the whole model to try, one after the other."""
    if frees_batch:
        yield with_free_batch(subject.plain, subject.example, subject.free)
    yield capture(subject.plain, *subject.example)


def _as_gated(plan: Plan, gated_by: Plan) -> Plan:
    """With the switches of that time, and no dims kept alike if they were not to be then."""
    plan = switched(plan, [axis.name for axis in gated_by.axes if axis.kind == KIND])
    return plan if gated_by.alike else replace(plan, alike=())


def _same_gates(plan: Plan, gated_by: Plan) -> bool:
    """Do both have the same parts, and gates at the same places in whatever order?"""
    sites = plan.select(gated_by.names).sites
    return plan.parts == gated_by.parts and set(sites) == set(gated_by.sites)
