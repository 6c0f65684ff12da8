"""Tensors that a decoder's cache holds: their bytes, and the layouts of their dims.

The layouts are those of a step's graph, in which the cache is an input that the forward replaces.
The bytes are those of the cache that the class itself fills at the full context, on the meta
device: so a window that it slides over the tokens, or the dtype that it keeps, is the class's own.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l0prune.capture.capture import capture
from l0prune.capture.compat import TorchDispatchMode
from l0prune.capture.copying import copied, copied_around
from l0prune.capture.example_inputs import keep
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import muted
from l0prune.errors import UsageError, in_a_line
from l0prune.exporting.own_class.comparison import CACHES, TOKENS
from l0prune.features.memory.conditions import EXAMPLES, Conditions
from l0prune.gating.attaching import detach, holder
from l0prune.infer.build import analyse
from l0prune.plan.branch import ALWAYS
from l0prune.plan.layout import Const, Layout, Layouts, Slots, substitute
from l0prune.plan.plan import Plan
from l0prune.plan.switches import under_switches
from l0prune.progress.stages import stage
from l0prune.running.device import device_of

_SHORT = 4  # tokens in the cache of the step that is captured


class Cached(NamedTuple):
    """A tensor of the cache at the full context, on the meta device.

    Attributes:
        tensor: without values.
        dims: their layouts, on the axes of the gated plan.
        needed: groups of branches with which it is there, as of a ``Cost``.
    """

    tensor: Tensor
    dims: Layouts
    needed: tuple[tuple[str, ...], ...]


def cached(model: nn.Module, plan: Plan, conditions: Conditions) -> list[Cached]:
    """Return the tensors of the cache that a gated model keeps; none for a model without one.

    Raises:
        UsageError: the model keeps a cache, and no context is named; or it cannot be followed.
    """
    root, gates = holder(model)
    takes = signature(root.forward).parameters
    name = next((each for each in CACHES if each in takes), "")
    if not name or not any(tokens in takes for tokens in TOKENS):
        return []
    with stage("counting the cache"), muted(), torch.no_grad():
        plain = copied_around(root).eval()
        detach(plain)
        short = _filled(plain, name, gates.example, 1, _SHORT)
        if short is None:
            return []
        if conditions.context is None:
            raise UsageError(
                "the memory of a network with a cache of keys and values grows with its context, "
                f"which this budget does not name: write {EXAMPLES}"
            )
        with _ShapesOfGroups():
            empty, sizes = _on_meta(plain), (conditions.batch, conditions.context)
            whole = _filled(empty, name, gates.example, *sizes)
        assert whole is not None, "the class keeps a cache of few tokens alone"
        pairs = zip(whole[name].tensors, _layouts(plain, name, short, plan), strict=True)
        return [Cached(tensor, *known) for tensor, known in pairs]


def _on_meta(plain: nn.Module) -> nn.Module:
    """Return a copy of a model without values."""
    empty: dict[int, Any] = {id(b): b.detach().to("meta") for b in plain.buffers()}
    for parameter in plain.parameters():
        empty[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), False)
    return copied(plain, empty)


class _ShapesOfGroups(TorchDispatchMode):
    """Context in which grouped products of any dtype run on shapes alone; torch has 16 bits."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))


def _filled(
    plain: nn.Module, name: str, example: Inputs, batch: int, context: int
) -> dict[str, Any] | None:
    """Return the inputs of a step after ``context`` tokens; None for a model without a cache.

    Raises:
        UsageError: the class does not run on such inputs, or on the meta device.
    """
    takes = signature(plain.forward).parameters
    given = dict(zip(takes, example[0], strict=False)) | example[1]
    inputs: dict[str, Any] = {}
    device = device_of(plain)
    for key, value in given.items():
        if key in TOKENS:
            inputs[key] = torch.zeros(batch, context, dtype=value.dtype, device=device)
        elif isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            inputs[key] = value.new_empty((batch, *value.shape[1:]), device=device)
    try:
        cache = plain(**inputs, use_cache=True, return_dict=True).get(name)
    except Exception as error:
        raise UsageError(
            "the cache of this network cannot be counted, as its class does not run on shapes "
            f"alone: {in_a_line(error)}. Give a budget in params or macs"
        ) from error
    if cache is None:
        return None
    written = next(each for each in TOKENS if each in inputs)
    step = inputs | {written: inputs[written][:, :1], name: cache, "use_cache": True}
    return keep(plain, (), step)[1]


def _layouts(
    plain: nn.Module, name: str, step: dict[str, Any], plan: Plan
) -> list[tuple[Layouts, tuple[tuple[str, ...], ...]]]:
    """Return the layouts of a cache's tensors, on the axes of a plan, and what needs each."""
    captured = capture(plain, (), step)
    own = [each for each in captured.inputs if str(each).startswith(f"{name}_")]
    analysis = analyse(replace(captured, memory=frozenset(own)))
    numbers = {axis.name: number for number, axis in enumerate(plan.axes)}
    switched = under_switches(plan)

    def leaf(slots: Slots) -> Layout:
        axis = analysis.plan.axes[slots.axis]
        number = numbers.get(axis.name)
        if number is None or plan.axes[number].size != axis.size:  # no gate: it stays whole
            return Const(slots.stop - slots.start)
        return Slots(number, slots.start, slots.stop)

    needs = {node.name: of or ALWAYS for node, of in analysis.branches.needs.items()}
    return [
        (
            tuple(switched(substitute(dim, leaf)) for dim in analysis.layouts[each]),
            tuple(sorted(tuple(sorted(of)) for of in needs[each])),
        )
        for each in own
    ]
