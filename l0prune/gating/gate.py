"""Public functions: gate a model, ungate it, find its gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from l0prune.capture.capture import fixed_sizes
from l0prune.capture.compat import pytree
from l0prune.capture.copying import inside, is_distributed
from l0prune.capture.example_inputs import opened
from l0prune.capture.model_checks import check_module, same_draws
from l0prune.capture.outputs import chosen_outputs
from l0prune.capture.sizes import free_sizes
from l0prune.capture.threads import one_at_a_time
from l0prune.capture.undisturbed import trying
from l0prune.doors import provided
from l0prune.errors import NothingToPrune, UsageError, warn
from l0prune.gating import defaults
from l0prune.gating.attaching import attach, check_ungated, detach, gated_tensor, gates_of
from l0prune.gating.axis_trials import offered
from l0prune.gating.bank import Example, Gates
from l0prune.gating.kinds.base import Gate, gate_of
from l0prune.plan.globs import Globs, listed, named, per_axis
from l0prune.plan.layout import Gated, Layout, axes_of
from l0prune.plan.numbers import SEEDS, check_number, check_whole
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switched
from l0prune.plan.widths import axes_to_keep
from l0prune.plan.widths import uniform as uniform_widths
from l0prune.progress.display import displayed

KeepClass = bool | Literal["native"]
_ONE_NUMBER = (
    "the model's code has one number for its size and for another that stays whole; "
    "keep_class=False lets them differ"
)


def for_class(plan: Plan, model: nn.Module, keep_class: KeepClass) -> Plan:
    """Return the plan restricted to the axes and equal widths that ``keep_class`` asks for."""
    if keep_class is False:
        return replace(plan, alike=())
    if keep_class not in (True, "native"):
        raise UsageError(f"keep_class must be True, False or 'native', not {keep_class!r}")
    if keep_class == "native":
        left_out = {axis for dim in _not_native(plan, model) for axis in axes_of(dim)}
        plan = plan.select({axis.name for i, axis in enumerate(plan.axes) if i not in left_out})
    while held := plan.held_whole():  # where these stay, others may have to
        pins = plan.pins_of({n: _ONE_NUMBER for n, name in enumerate(plan.names) if name in held})
        plan = plan.select(set(plan.names) - held)
        plan = replace(plan, pins=(*pins, *plan.pins))
    return plan


def _not_native(plan: Plan, model: nn.Module) -> Iterator[Layout]:
    """Yield the dims that a layer of torch, or the user's code, needs whole."""
    for path, dims in plan.code.averages.items():
        if isinstance(model.get_submodule(path), nn.LayerNorm | nn.GroupNorm):
            yield from dims
    for reused in plan.code.reused:
        yield from (dim for dim in (reused.read, reused.used) if dim is not None)
    for path, calls in plan.code.calls.items():
        has_epsilon = any("eps" in name for name in vars(model.get_submodule(path)))
        for call in calls:
            is_mean = call.name == "mean" and not has_epsilon
            if is_mean or call.name in ("layer_norm", "scaled_dot_product_attention"):
                yield from (dim for dim in call.sizes if dim is not None)
    for name, dims in plan.tensors.items():
        yield from (dim.fine for dim in dims if isinstance(dim, Gated))
        path = name.rpartition(".")[0].removesuffix(".out_proj")
        if isinstance(model.get_submodule(path), nn.MultiheadAttention):
            yield from dims


Model = TypeVar("Model", bound=nn.Module)


class Surveyed(Protocol):
    """Survey of a model as ``gate`` needs it: ``l0prune.Survey`` is one."""

    @property
    def plan(self) -> Plan:
        """The axes, and where gates act."""

    @property
    def example(self) -> Example:
        """The inputs that it was made with."""


@one_at_a_time()
@displayed
def gate(
    model: Model,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    include: Globs = defaults.INCLUDE,
    exclude: Globs = defaults.EXCLUDE,
    keep: Globs = defaults.KEEP,
    open_probability: float | Mapping[str, float] = defaults.OPEN_PROBABILITY,
    jitter: float = defaults.JITTER,
    seed: int = defaults.SEED,
    keep_class: KeepClass = defaults.KEEP_CLASS,
    branches: bool | Globs | None = defaults.BRANCHES,
    uniform: bool = defaults.UNIFORM,
    loadable_by: str | None = defaults.LOADABLE_BY,
    outputs: Globs = defaults.OUTPUTS,
    gate: Gate | None = None,
    survey: Surveyed | None = None,
    progress: bool = True,
) -> Model:
    """Put one gate on every slot of the model that can be removed, in place.

    The state_dict gains ``l0prune_gates.log_alpha``. Outputs in eval mode do not change.

    Args:
        model: any module that torch.export can capture; inside torch.compile or DataParallel, too.
        args: example positional inputs of its forward, a tuple, or a tensor; copies are kept.
        kwargs: example inputs by name, a dict: ``gate(model, (x,), {"mask": mask})``.
        dynamic_shapes: sizes that programs and files leave free beside the batch, as torch.export
            has them: ``{"input_ids": {1: "seq"}}``.
        include: axes and branches to gate (those of ``survey``): names or globs.
        exclude: those to leave whole, even if included.
        keep: paths of layers, or globs, to leave whole on all sides, even if included.
        open_probability: P(z ≠ 0) to start from, or by globs of axis names, the first that matches.
        jitter: standard deviation of the noise on the initial log α (paper: 0.01).
        seed: of that noise; the global generators are left alone.
        keep_class: keep equally many slots where the model's code has one number, so that an export
            can be of its own class. ``"native"``: and gate only what needs no layer of ours.
        branches: give whole branches a gate of their own, too: what is added to a stream, or one
            part of concatenations. True for all, or names, or globs over them.
        uniform: keep one share of the width of all layers, which follows from the budget.
        loadable_by: gate only what this program can load by itself, and warn of what stays whole:
            ``"transformers"``, which has one number for all layers (``save_pretrained``); or of a
            Llama ``"vllm"``, which has a width for each MLP (``Export.save_vllm``), or ``"gguf"``,
            llama.cpp's format, which has heads for each attention, too (``save_gguf``).
        outputs: names of the outputs that matter, or globs: ``"logits"``, ``"output_0"`` of a
            tuple. Scores, compensation, fidelity and tolerances look at these alone; all outputs
            are computed exactly. By default those that a model of transformers is for, its logits
            or else its last hidden state; of other models all.
        gate: the kind of gate, by default ``HardConcrete()``.
        survey: of this model, to save doing it again.
        progress: show progress on stderr.

    Returns:
        The same object.

    Raises:
        AlreadyGated: the model carries gates.
        CaptureError: torch.export could not capture it.
        NothingToPrune: nothing can be cut, or nothing that ``include`` and ``exclude`` leave.
        UsageError: an argument makes no sense, such as a glob that matches no axis.
    """
    given, model = model, _plain(model)
    kind = _kind(gate)
    found = survey or offered(model, args, kwargs, dynamic_shapes)
    free = free_sizes(model, found.example, dynamic_shapes)
    if keep_class == "native":
        branches = _native_branches(branches)
    plan = _selected(for_class(found.plan, model, keep_class), include, exclude, keep, branches)
    if loadable_by is not None:
        plan = _loadable(plan, model, loadable_by, found.example, keep_class)
    plan = uniform_widths(plan) if uniform else plan
    for reason in fixed_sizes(model, found.example, free).values():
        raise UsageError(reason)
    log_alpha = _placed(_initial(plan, kind, open_probability, jitter, seed), model, plan)
    gates = Gates(plan, kind, log_alpha, kept_example(found.example), free)
    gates.outputs = _known_outputs(model, found.example, outputs)
    attach(model, gates)
    return given


def _known_outputs(model: nn.Module, example: Example, outputs: Globs) -> tuple[str, ...]:
    """Return the names of outputs, of which the model has each."""
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    given = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    weights = [*model.parameters(), *model.buffers()]
    if not names or any(each.is_meta for each in (*given, *weights)):
        return names
    place = weights[0].device
    args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(place), opened(example))
    with trying(model), same_draws(model):
        chosen_outputs(model(*args, **kwargs), names)
    return names


def _plain(model: Model) -> Model:
    """Return the model inside wrappers, after checks that it can be gated."""
    if isinstance(model, nn.Module):
        _check_not_distributed(model)
        model = inside(model)  # type: ignore[assignment]
    check_module(model)
    check_ungated(model)
    return model


def _loadable(
    plan: Plan, model: nn.Module, program: str, example: Example, keep_class: KeepClass
) -> Plan:
    if keep_class is False:
        raise UsageError("loadable_by needs a model of its own class: give no keep_class=False")
    whole: Plan = provided("loadable")(plan, model, program, example, [*_not_native(plan, model)])
    return whole


def _kind(given: Gate | None) -> Gate:
    kind = gate_of(defaults.KIND, {}) if given is None else given
    if isinstance(kind, type) or not isinstance(kind, Gate):
        raise UsageError(
            f"gate must be a gate, like l0prune.ContinuousSparsification(), not {kind!r}; one of "
            "your own needs all that l0prune.Gate has"
        )
    return kind


def _native_branches(given: bool | Globs | None) -> bool:
    if given:
        raise UsageError(
            "branches need keep_class=True or False: where one is gone, its modules become a "
            "layer that torch does not have (SkippedModule)"
        )
    return False


def _check_not_distributed(model: nn.Module) -> None:
    """Raise UsageError for DDP, which averages only parameters that it was built with."""
    if is_distributed(model):
        raise UsageError(
            "This model is in DistributedDataParallel, which would not average the gradient of "
            "gates that it does not know. Gate the model first: "
            "DistributedDataParallel(l0prune.gate(model, ...))."
        )


def ungate(model: Model) -> Model:
    """Remove the gates, in place; the module and its state_dict keys are as before ``gate``.

    Parameters keep their present values, and what the gates learned is lost. To keep it, use
    ``l0prune.export``, or ``l0prune.save`` before.

    Returns:
        The same object.

    Raises:
        NotGated: the model carries no gates.
    """
    detach(model)
    return model


def gates(model: nn.Module) -> Gates:
    """Return the model's gates.

    Raises:
        NotGated: the model carries no gates.
    """
    return gates_of(model)


def _selected(
    plan: Plan, include: Globs, exclude: Globs, keep: Globs, branches: bool | Globs | None
) -> Plan:
    """Return the plan restricted to the user's choice, with switches on branches."""
    of_plan = [branch.name for branch in plan.branches]
    if not plan.axes and (not of_plan or branches is False):
        reasons = "\n".join(f"  {pin.where}: {pin.reason}" for pin in plan.pins[:10])
        raise NothingToPrune(
            "nothing in this model can be cut out" + (f":\n{reasons}" if reasons else "")
        )
    names, what = list(plan.names), "axis of this model"
    if branches is None:
        names, what = [*names, *of_plan], "axis or branch of this model"
    left_out = named(names, exclude, "exclude", what)
    wanted = set(named(names, include, "include", what)).difference(left_out)
    if isinstance(branches, bool):
        wanted.update(of_plan if branches else ())
    elif branches is not None:
        wanted.update(named(of_plan, branches, "branches", "branch of this model"))
    wanted -= axes_to_keep(plan, keep)
    with_switches = switched(plan, wanted)
    selected = with_switches.select(wanted.intersection(with_switches.names))
    while held := selected.held_whole():  # where these stay, others may have to
        warn(
            f"{listed(sorted(held))} cannot be cut alone, and stays whole: the model's code has "
            "one number for its size and that of an axis without gates here. Include that one, "
            "too, or give keep_class=False (--keep-class no)"
        )
        selected = selected.select(set(selected.names) - held)
    if not selected.axes:
        raise NothingToPrune(
            f"no axis is left to gate with include={include!r}, exclude={exclude!r}, "
            f"keep={keep!r}; "
            f"the model's axes are {listed(plan.names)}"
        )
    return selected


def _initial(
    plan: Plan, kind: Gate, open_probability: float | Mapping[str, float], jitter: float, seed: int
) -> Tensor:
    """The initial log α of every gate: float32, on the CPU, shape ``(plan.size,)``."""
    check_number("jitter", jitter)
    check_whole("seed", seed, 0, SEEDS)
    start = per_axis(plan, open_probability, defaults.OPEN_PROBABILITY, "open_probability")
    generator = torch.Generator().manual_seed(seed)
    log_alpha = torch.randn(plan.size, generator=generator) * jitter
    for axis, probability in zip(plan.axes, start, strict=True):
        log_alpha[axis.slice] += kind.initial(probability)
    return log_alpha


def _placed(log_alpha: Tensor, model: nn.Module, plan: Plan) -> Tensor:
    """Return log α on the device of the first gated tensor; in float64 if all of these are."""
    gated = [gated_tensor(model, site) for site in plan.sites]
    double = all(tensor.dtype == torch.float64 for tensor in gated)
    return log_alpha.to(gated[0].device, torch.float64 if double else torch.float32)


def kept_example(example: Example) -> Example:
    """Return copies of the example inputs on the CPU, to be stored with the model.

    Tensors on the meta device have no values: they become random, or zeros if of integers.
    """
    generator = torch.Generator().manual_seed(0)

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.is_meta:
            return leaf.detach().cpu().clone()
        if not leaf.is_floating_point():
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)

    args, kwargs = pytree.tree_map(keep, example)
    return args, kwargs
