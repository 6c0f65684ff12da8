"""Trial of gates before training: the gated forward against the captured graph, with numbers.

Slots are closed at random, and the graph gets the same multipliers. The two differ where the
forward gets a weight that gates do not reach, and both are infinite or nan where something is
divided by what a gate has made zero. What is at fault becomes a pin, with the reason.

Both run once on the example, in the model's own dtype. A network that would take longer for that
than for its capture, by the number of multiply-accumulates, is not tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter

from l0prune.capture.capture import Captured
from l0prune.capture.compat import pytree
from l0prune.capture.copying import class_forwards, copied_around
from l0prune.capture.example_inputs import examples_given, plain
from l0prune.capture.kept_state import tensor_outputs_only
from l0prune.capture.model_checks import evaluating, same_draws
from l0prune.capture.sizes import Inputs
from l0prune.capture.threads import muted
from l0prune.capture.undisturbed import code_undisturbed
from l0prune.gating.at_fault import at_fault
from l0prune.gating.attaching import attach
from l0prune.gating.bank import Gates
from l0prune.gating.defaults import KIND
from l0prune.gating.kinds.base import gate_of
from l0prune.gating.multiplying import scale
from l0prune.infer.parts import Parts
from l0prune.plan.cost import CostModel
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switched

# Multiply-accumulates for each call of the graph that the trial may take: a call costs a capture
# about 2 ms, in which one core does ten times as many.
_MOST = 5e6
_OPEN = 0.6  # probability that a slot is open
# Largest difference that is rounding. Faults are of the size of a weight.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}

_APART = (
    "with slots of {0} closed, the forward computes something else than its graph: it gets a "
    "weight by a road on which no gate acts. Gates act where code gets it as module.weight or by "
    "named_parameters()"
)
_INFINITE = (
    "with slots of {0} closed, the network gives nan or infinity: something is divided by what is "
    "zero then"
)


class NumberTrial:
    """Trials of sets of axes and branches of one model, with the others open."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self._captured, self._example = parts.found[0].analysis.captured, parts.example
        names = {branch.name for branch in parts.plan.branches}
        self.plan = switched(parts.plan, {*parts.plan.names, *names})
        self._twin = copied_around(model)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self._rounding = _ROUNDING[dtype]
        ones = torch.ones(self.plan.size, dtype=dtype)
        self._bank = Gates(self.plan, gate_of(KIND, {}), ones, self._example)
        attach(self._twin, self._bank)
        drawn = torch.rand(2, self.plan.size, generator=torch.Generator().manual_seed(0))
        self._z = torch.where(drawn[0] < _OPEN, 0.5 + 0.5 * drawn[1], 0).to(dtype)

    def fault(self, names: Collection[str]) -> str | None:
        """Return what goes wrong with slots of these axes closed, as a text for their names."""
        z = torch.ones_like(self._z)
        for axis in self.plan.axes:
            if axis.name in names:
                z[axis.slice] = self._z[axis.slice]
                if axis.size > 1:
                    z[axis.start + axis.size - 1] = 0
                    z[axis.start] = 1
        found, expected = self._gated(z), self._graph(z)
        if not all(bool(each.isfinite().all()) for each in found):
            return _INFINITE
        is_alike = len(found) == len(expected) and all(map(self._is_close, found, expected))
        return None if is_alike else _APART

    def _is_close(self, found: Tensor, expected: Tensor) -> bool:
        if found.shape != expected.shape or not found.numel():
            return found.shape == expected.shape
        largest = float(expected.abs().max())
        return float((found - expected).abs().max()) <= self._rounding * largest

    def _gated(self, z: Tensor) -> list[Tensor]:
        twin, (args, kwargs) = self._twin, plain(self._example)
        with _running(twin, self._example), code_undisturbed(twin), self._bank.using(z):
            return _numbers(twin(*args, **kwargs))

    def _graph(self, z: Tensor) -> list[Tensor]:
        values = iter(pytree.tree_leaves(plain(self._example)))
        stored = _stored(self._captured, self._twin, self.plan, z)
        graph = self._captured.graph
        given = [
            stored[node.name] if node.name in stored else next(values)
            for node in graph.find_nodes(op="placeholder")
        ]
        with torch.no_grad(), same_draws(self._twin, seed=0):
            run = Interpreter(self._captured.program.graph_module, graph=graph)
            return _numbers(run.run(*given))


@contextmanager
def _running(model: nn.Module, example: Inputs) -> Iterator[None]:
    """Run a model as a capture does."""
    with (
        evaluating(model),
        class_forwards(model),
        tensor_outputs_only(model, example),
        same_draws(model, seed=0),
        muted(),
    ):
        yield


def _stored(captured: Captured, model: nn.Module, plan: Plan, z: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of a graph, by placeholder, times their gates."""
    named = (model.named_parameters, model.named_buffers)
    held = {name: each.detach() for of in named for name, each in of(remove_duplicate=False)}
    held |= {captured.stored(n): each for n, each in captured.program.constants.items()}
    for site in plan.sites:
        held[site.tensor] = scale(held[site.tensor], plan.spread(site.layout, z), site.dim)
    return {placeholder: held[name] for placeholder, name in captured.names.items()}


def _numbers(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def faults(model: nn.Module, parts: Parts) -> dict[str, str]:
    """Return the axes and branches whose gates compute something else than the graph, with why.

    Empty where that is not known: of parts of models, of large networks, of dtypes of fewer bits,
    of random networks, and of those that differ from their graph with all gates open.
    """
    if not _is_tried(model, parts):
        return {}
    try:
        trial = NumberTrial(model, parts)
        names = trial.plan.names
        if trial.fault(names) is None or trial.fault(()) is not None:
            return {}
        return dict(at_fault(names, trial.fault))
    except Exception:  # no copy of it, or it does not run: an export says so, in better words
        return {}


def _is_tried(model: nn.Module, parts: Parts) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    kinds = {each.dtype for each in tensors if each.is_floating_point() or each.is_complex()}
    calls = sum(len(part.analysis.captured.graph.nodes) for part in parts.found)
    return (
        not parts.plan.in_parts
        and not parts.draws
        and len(kinds) == 1
        and kinds <= _ROUNDING.keys()
        and all(each.device.type == "cpu" for each in tensors)
        and CostModel(parts.plan).dense_amount("macs") * examples_given(parts.example)
        <= _MOST * calls
    )
