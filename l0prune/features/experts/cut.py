"""``l0prune.shrink_experts``: exact removal of experts from mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l0prune.capture.configurations import put_size, sizes_of
from l0prune.capture.copying import copied_around
from l0prune.capture.example_inputs import call, keep
from l0prune.capture.model_checks import evaluating
from l0prune.capture.outputs import tensor_names
from l0prune.capture.sizes import Inputs
from l0prune.data.dataset import as_arguments
from l0prune.errors import UsageError
from l0prune.exporting.certify.answers import BOTH, Answer, output_of
from l0prune.exporting.certify.certificate import Check
from l0prune.exporting.certify.difference import common_scales, comparable
from l0prune.exporting.certify.dtypes import lent
from l0prune.exporting.own_class.choice import own_class, proven
from l0prune.exporting.slicing.kept_slots import KeptSlots
from l0prune.exporting.slicing.tensors import cut, stored_in
from l0prune.features.experts.choosing import OUTPUT, SCORES, chosen, observing
from l0prune.features.experts.mixtures import Mixture, mixtures_in, sizes_of_experts
from l0prune.features.experts.result import FewerExperts
from l0prune.features.experts.routing import Routing
from l0prune.gating.attaching import check_ungated
from l0prune.plan.layout import Const, Slots, axes_of
from l0prune.plan.numbers import check_whole
from l0prune.plan.plan import Axis, Plan
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage
from l0prune.running.device import device_of
from l0prune.running.inputs import inputs_of

KIND = "expert"


@displayed
def shrink_experts(
    model: nn.Module,
    inputs: Any,
    experts: int,
    *,
    score: str = OUTPUT,
    samples: int = 64,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool = True,
) -> FewerExperts:
    """Cut every mixture of experts in a model to a given number of experts.

    Rows of the router and weights of experts are removed, whether these are a list of modules or
    one tensor for all. The number of experts that an input gets stays, and so do shared experts.
    The result computes what the model computes if removed experts get the score -inf before the
    best are chosen, which is verified on examples.

    Args:
        model: of its own class, without gates. It stays as it is.
        inputs: a tensor or a mapping of examples, or what ``finetune`` takes; no labels.
        experts: how many each mixture keeps. Where a router chooses among groups of them first,
            each group keeps equally many. A mixture that has no more stays whole.
        score: by which they are chosen: ``"output"``, those go one by one without which the
            mixture's output moves least, others taking their inputs; ``"reap"``, the mean of share
            times norm of output; ``"load"``, how many inputs they get.
        samples: how many inputs are looked at, at most.
        batch_size: examples at a time.
        seed: of the choice of inputs.
        progress: show progress on stderr.

    Raises:
        UsageError: there is no mixture, fewer experts would be left than an input gets, or no
            equal number in each group; or the model's class cannot be had at these sizes.
        AlreadyGated: the model carries gates.
        CertificateError: the smaller model computes something else.
    """
    check_ungated(model)
    check_whole("experts", experts, 1)
    if score not in (OUTPUT, *SCORES):
        raise UsageError(f"score is {', '.join((OUTPUT, *SCORES))}, not {score!r}")
    batches = [
        keep(model, *as_arguments(each))
        for each, _ in inputs_of(inputs, samples, batch_size, device_of(model), seed)
    ]
    found = [each for each in mixtures_in(model, batches[0]) if each.router.experts > experts]
    if not found:
        raise UsageError(f"no mixture of the model has more than {experts} experts")
    for mixture in found:
        _check(mixture, experts)
    with stage("choosing experts"), evaluating(model):
        with observing(model, found) as seen:
            for batch in batches:
                call(model, batch)
        kept = {
            each.router.name: chosen(model, each, seen[each.router.name], experts, score)
            for each in found
        }
    module, checks = _cut_model(model, found, kept, batches[:2])
    module.train(model.training)
    return FewerExperts(
        module,
        {mixture.path: kept[mixture.router.name] for mixture in found},
        {mixture.path: seen[mixture.router.name].load for mixture in found},
        params_before=sum(each.numel() for each in model.parameters()),
        active_before=_active(model, found, None),
        active=_active(model, found, experts),
        checks=checks,
    )


def _check(mixture: Mixture, experts: int) -> None:
    router = mixture.router
    if experts < router.chosen:
        raise UsageError(
            f"{experts} experts are fewer than the {router.chosen} that each input gets of those "
            f"of {mixture.path}: keep at least {router.chosen}"
        )
    if experts % router.groups or experts // router.groups < router.within:
        raise UsageError(
            f"the router of {mixture.path} chooses among {router.groups} equal groups first, by "
            f"the best {router.within} of each: keep a multiple of {router.groups} experts, at "
            f"least {router.groups * router.within}, not {experts}"
        )


def _active(model: nn.Module, found: Sequence[Mixture], experts: int | None) -> int:
    """Return the number of parameters that one input uses, counting only chosen experts."""
    total = sum(each.numel() for each in model.parameters())
    for mixture in found:
        of_one, by_router = sizes_of_experts(model, mixture)
        router = mixture.router
        gone = 0 if experts is None else (router.experts - experts) * by_router
        total -= (router.experts - router.chosen) * of_one + gone
    return total


def plan_of(model: nn.Module, mixtures: Sequence[Mixture]) -> Plan:
    """Return a plan whose axes are the experts of mixtures, of kind ``expert``, without gates.

    Experts in lists share no tensor with others: of these only the router's rows are on the axis.
    """
    axes: list[Axis] = []
    tensors: dict[str, tuple[Any, ...]] = {}
    for number, mixture in enumerate(mixtures):
        size, start = mixture.router.experts, sum(axis.size for axis in axes)
        of_one, by_router = sizes_of_experts(model, mixture)
        axes.append(Axis(f"{mixture.path}.experts", KIND, size, start, of_one + by_router))
        for name in mixture.rows:
            stored = stored_in(model, name)
            assert stored is not None
            tensors[name] = (Slots(number, 0, size), *map(Const, stored.shape[1:]))
    others = {name: tensor for name, tensor in model.state_dict().items() if name not in tensors}
    tensors |= {name: tuple(map(Const, tensor.shape)) for name, tensor in others.items()}
    return Plan(tuple(axes), (), tensors, (), ())


@stage("cutting the experts")
def _cut_model(
    model: nn.Module,
    found: Sequence[Mixture],
    kept: Mapping[str, Tensor],
    examples: Sequence[Inputs],
) -> tuple[nn.Module, tuple[Check, ...]]:
    """Return the model of its own class with fewer experts, and the comparisons it passed."""
    settled = copied_around(model).eval()
    for mixture in found:
        for path in mixture.lists:
            listed: Any = settled.get_submodule(path)
            left = [listed[number] for number in kept[mixture.router.name].tolist()]
            settled.set_submodule(path, nn.ModuleList(left))
    plan = plan_of(settled, found)
    stay = torch.zeros(plan.size, dtype=torch.bool)
    for axis, mixture in zip(plan.axes, found, strict=True):
        stay[axis.start + kept[mixture.router.name]] = True
    tensors = {
        name: cut(plan, dims, stored.detach(), stay)
        for name, dims in plan.tensors.items()
        if any(map(axes_of, dims)) and (stored := stored_in(settled, name)) is not None
    }
    sizes = sizes_of(settled)
    for name, tensor in tensors.items():
        sizes |= {
            (name, dim): size for dim, size in enumerate(tensor.shape) if (name, dim) in sizes
        }
    before, after = found[0].router.experts, len(kept[found[0].router.name])
    put_size(settled, sizes, before, after)
    answers = _answers(model, found, kept, examples)
    own = own_class(settled, KeptSlots(plan, stay.double(), stay), tensors)
    cause = "code that has the number of experts in it: let it take that from an attribute"
    return proven(own, answers, "experts", cause)


def _answers(
    model: nn.Module,
    found: Sequence[Mixture],
    kept: Mapping[str, Tensor],
    examples: Sequence[Inputs],
) -> tuple[Answer, ...]:
    """Return the outputs of the model when closed experts are never chosen."""
    closed = {}
    for mixture in found:
        name = mixture.router.name
        every = torch.ones(mixture.router.experts, dtype=torch.bool)
        closed[name] = every.index_fill_(0, kept[name], False)
    outputs: list[list[list[Any]]] = []
    names: tuple[str, ...] = ()
    for dtype in BOTH:
        again, outputs = lent(model, dtype).eval(), [*outputs, []]
        for given in examples:
            with Routing(again, closed):
                output = output_of(again, given, dtype)
            names = tuple(tensor_names(output))
            outputs[-1].append(comparable(output))
    scales = common_scales(outputs[0])
    return tuple(
        Answer(given, exact, single, names=names, scales=scales)
        for given, exact, single in zip(examples, *outputs, strict=True)
    )
