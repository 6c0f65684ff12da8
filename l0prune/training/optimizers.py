"""Optimizers from settings and for gates alone, and their states when a model is cut."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, distributed, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from l0prune.errors import UsageError
from l0prune.exporting.slicing.tensors import Place
from l0prune.running.processes import distribute_like, full_tensor, is_sharded
from l0prune.training.gate_settings import GSM
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings

Groups = list[dict[str, Any]]
Optimizers = Sequence[Optimizer]


def make_optimizers(settings: Settings, groups: Groups) -> list[Optimizer]:
    """Return the optimizers that settings name, over these groups; Adam for gates beside SGD."""
    if not any(parameter.requires_grad for group in groups for parameter in group["params"]):
        raise UsageError("nothing of this model learns: all its parameters are frozen")
    if callable(settings.optimizer):
        return [_stepping(settings.optimizer(groups))]
    # One kernel for all tensors of a group, where their device and dtype have one.
    parameters = [p for group in groups for p in group["params"]]
    fused = all(map(_can_fuse, parameters))
    if settings.optimizer not in ("sgd", GSM):
        kind = Adam if settings.optimizer == "adam" else AdamW
        return [kind(groups, lr=settings.lr, fused=fused)]
    weights = [group for group in groups if group.get("name") != "gates"]
    gates = [group for group in groups if group.get("name") == "gates"]
    made: list[Optimizer] = []
    if weights:
        # torch's fused SGD does not support sharded tensors yet.
        fuses = fused and not any(map(is_sharded, parameters))
        made.append(SGD(weights, lr=settings.lr, momentum=settings.momentum, fused=fuses))
    if gates:
        made.append(Adam(gates, fused=fused))
    return made


def _stepping(made: Any) -> Optimizer:
    """Check that a user's optimizer can take a step by itself."""
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer made a {type(made).__name__}, not a torch.optim.Optimizer; it gets the "
            "parameter groups: optimizer=lambda groups: torch.optim.RAdam(groups)"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{type(made).__name__} computes the loss several times in a step, which this loop "
            "does not: take another optimizer, or write a loop of your own with l0prune.penalty"
        )
    return made


def _can_fuse(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")


class Schedule:
    """Schedule of the weights' rate by the fraction of steps done; gates keep their rate."""

    def __init__(self, settings: Settings, optimizers: list[Optimizer], phases: Phases) -> None:
        self._factor = _factor(settings.schedule, 1 - phases.settle / phases.total)
        self._optimizers = optimizers
        self._total = phases.total
        self._base = [group["lr"] for group in self._groups()]

    def _groups(self) -> Groups:
        """Return the present groups: an optimizer that loads a state replaces them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Set the rates of step number ``step``, from 0."""
        factor = self._factor(step / self._total)
        for group, base in zip(self._groups(), self._base, strict=True):
            group["lr"] = base if group.get("name") == "gates" else base * factor


def _factor(schedule: str | Callable[[float], float], pruned: float) -> Callable[[float], float]:
    """Return a function from the fraction of steps done to a factor; pruning ends at ``pruned``."""
    if callable(schedule):
        return schedule
    if schedule == "constant":
        return lambda done: 1.0
    if schedule == "step":
        return lambda done: 0.1 ** ((done >= 0.5) + (done >= 0.75))
    start = pruned if schedule == "settle" else 0.0

    def cosine(done: float) -> float:
        part = (done - start) / (1 - start) if done > start else 0.0
        return 0.5 * (1 + math.cos(math.pi * part))

    return cosine


_taken: dict[int, ref[OwnOptimizer]] = {}  # by the parameter's id


class OwnOptimizer:
    """Adam for the gates' parameters, whose gradients are hidden from other optimizers.

    Backward stores the gradient and leaves zeros, which do not change the norm that weights are
    clipped by. ``hand_over`` restores it when the step is due; after ``step`` it is None, so that
    another optimizer that holds ``log_alpha`` neither moves nor decays it. Only the newest one of
    a parameter is active, and none that its run has dropped.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, **options: Any) -> None:
        self._parameters = list(parameters)
        self._is_fused = all(map(_can_fuse, parameters))
        self._adam = Adam(self._parameters, lr=lr, fused=self._is_fused, **options)
        self._aside: dict[int, Tensor] = {}
        self._is_due = False  # from hand_over to step, when gradients are the penalty's
        free(self._parameters)
        self._hooks = [
            each.register_hook(_asking(ref(self), id(each))) for each in self._parameters
        ]
        _taken.update({id(each): ref(self) for each in self._parameters})

    def put_aside(self, of: int, gradient: Tensor) -> Tensor:
        """Store the gradient of the parameter with this id for the step, and return zeros."""
        if self._is_due:
            return gradient
        known = self._aside.get(of)
        self._aside[of] = gradient.clone() if known is None else known + gradient
        return torch.zeros_like(gradient)

    def is_of(self, parameter: nn.Parameter) -> bool:
        """Return whether this optimizer holds the parameter."""
        return any(each is parameter for each in self._parameters)

    def hand_over(self) -> None:
        """Restore the parameters' stored gradients, as means over all processes."""
        for each in self._parameters:
            gradient = self._aside.pop(id(each), None)
            gradient = torch.zeros_like(each) if gradient is None else gradient
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(gradient)
                gradient /= distributed.get_world_size()
            each.grad = gradient
        self._is_due = True

    def step(self, scale: float | Tensor = 1.0) -> None:
        """Take a step by the unscaled gradients, unless they overflowed."""
        finite = []
        for each in self._parameters:
            if each.grad is not None:
                finite.append(each.grad.isfinite().all())
                each.grad = each.grad / scale
        if finite:
            self._step_where(torch.stack(finite).all())
        for each in self._parameters:
            each.grad = None
        self._is_due = False

    def _step_where(self, is_finite: Tensor) -> None:
        """Take a step if ``is_finite``; fused Adam checks it without device synchronisation.

        The flag is passed as ``found_inf``, as by torch's GradScaler.
        """
        if not self._is_fused:
            if bool(is_finite):
                self._adam.step()
            return
        self._adam.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        try:
            self._adam.step()
        finally:
            del self._adam.found_inf  # type: ignore[attr-defined]

    def release(self) -> None:
        """Remove the hooks, so that backward no longer hides the gradients."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state."""
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self._adam.load_state_dict(state)


def free(parameters: Iterable[nn.Parameter]) -> None:
    """Release these parameters from any ``OwnOptimizer`` that hides their gradients."""
    for each in parameters:
        known = _taken.pop(id(each), None)
        found = None if known is None else known()
        if found is not None and found.is_of(each):
            found.release()


def _asking(owner: ref[OwnOptimizer], of: int) -> Callable[[Tensor], Tensor]:
    """Return a hook that does nothing once its optimizer is deleted."""

    def hook(gradient: Tensor) -> Tensor:
        found = owner()
        return gradient if found is None else found.put_aside(of, gradient)

    return hook


Places = Mapping[int, Place]
States = Mapping[int, Mapping[str, Any]]  # by the parameter's id


def bare(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside of a framework's wrapper, or the one given."""
    inner = getattr(optimizer, "optimizer", None)
    return bare(inner) if isinstance(inner, Optimizer) else optimizer


def check_states(optimizers: Sequence[Optimizer], places: Places) -> None:
    """Raise UsageError if a state is neither of its parameter's shape nor a single number.

    An optimizer may keep a state for all of its parameters with one that is not cut.
    """
    for optimizer in optimizers:
        parameters = list(_parameters(optimizer))
        if any(id(parameter) in places for parameter in parameters):
            for parameter in parameters:
                _check_state(optimizer, parameter, places.get(id(parameter)))


def _check_state(optimizer: Optimizer, parameter: Tensor, place: Place | None) -> None:
    # A checkpoint from after the cut has the cut shape.
    shapes = (parameter.shape,) if place is None else (place.shape, place.small)
    for name, value in optimizer.state.get(parameter, {}).items():
        is_number = value is None or isinstance(value, bool | int | float)
        is_like = isinstance(value, Tensor) and value.shape in (*shapes, torch.Size([]))
        if not (is_number or is_like):
            raise UsageError(
                f"{type(optimizer).__name__} keeps {name!r} in a shape that does not follow "
                "the parameter's"
            )


def check_held(
    optimizers: Sequence[Optimizer], places: Places, named: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise UsageError if a trainable parameter that is cut is held by none of the optimizers."""
    held = {id(parameter) for optimizer in optimizers for parameter in _parameters(optimizer)}
    for name, parameter in named:
        if parameter.requires_grad and id(parameter) in places and id(parameter) not in held:
            raise UsageError(
                f"no optimizer that before_step(optimizer, …) was given holds {name}: give it all "
                "that step"
            )


def cut_states(optimizers: Sequence[Optimizer], places: Places) -> None:
    """Cut each state, in place, to the part that is left of its parameter."""
    for _, place, state in _states(optimizers, places):
        _change(state, partial(_left, place))


def whole_states(optimizers: Sequence[Optimizer], places: Places, rest: States) -> None:
    """Expand the states of cut parameters to their whole sizes, in place.

    ``rest`` are whole states, by the parameter's id, with values for the elements that were cut
    off; without one these are zeros.
    """
    for key, place, state in _states(optimizers, places):
        known = rest.get(key, {})
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = _put(place, value, known.get(name))
    for optimizer in optimizers:
        if isinstance(optimizer, SGD):
            _fill_momentum(optimizer, places)


def _fill_momentum(optimizer: SGD, places: Places) -> None:
    """Set the momentum of parameters that were removed before the first step to 0.

    torch's fused SGD rejects groups in which only some parameters have a buffer.
    """
    for group in optimizer.param_groups:
        if not group["momentum"] or not any(optimizer.state.get(p) for p in group["params"]):
            continue
        for parameter in group["params"]:
            if id(parameter) in places and not optimizer.state.get(parameter):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def exchange(optimizers: Optimizers, parameters: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters in optimizers, and move their states to the new ones.

    A state tensor of its parameter's shape is sharded if the new parameter is, else whole.

    Args:
        optimizers: changed in place.
        parameters: new ones, by the ids of those that they replace.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for number, old in enumerate(group["params"]):
                group["params"][number] = new = parameters.get(id(old), old)
                if old not in optimizer.state:
                    continue
                optimizer.state[new] = {
                    name: _spread_like(value, new) if isinstance(value, Tensor) else value
                    for name, value in optimizer.state.pop(old).items()
                }


def _spread_like(value: Tensor, parameter: Tensor) -> Tensor:
    if value.shape != parameter.shape or is_sharded(value) == is_sharded(parameter):
        return value
    return full_tensor(value) if is_sharded(value) else distribute_like(value, parameter)


def saved_whole(optimizer: Optimizer, saved: dict[str, Any], places: Places) -> None:
    """Expand an optimizer's ``state_dict``, in place, to that of whole parameters."""
    for _, place, number, state in _saved(optimizer, saved, places):
        saved["state"][number] = changed = dict(state)
        _change(changed, partial(_put, place))


def saved_cut(optimizer: Optimizer, saved: dict[str, Any], places: Places) -> States:
    """Cut a ``state_dict`` to be loaded, in place, to present sizes; return the whole states."""
    saved["state"] = dict(saved["state"])
    whole = {}
    for key, place, number, state in _saved(optimizer, saved, places):
        saved["state"][number] = changed = dict(state)
        _change(changed, partial(_left, place))
        whole[key] = state
    return whole


def _left(place: Place, value: Tensor) -> Tensor:
    return place.cut(value) if value.shape == place.shape else value


def _put(place: Place, value: Tensor, rest: Tensor | None = None) -> Tensor:
    if value.shape != place.small:
        return value
    return place.put(value, None if rest is None else rest.to(value))


def _change(state: dict[str, Any], change: Callable[[Tensor], Tensor]) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = change(value)


def _states(
    optimizers: Sequence[Optimizer], places: Places
) -> Iterator[tuple[int, Place, dict[str, Any]]]:
    """Yield id, place and state of each parameter that is cut."""
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if id(parameter) in places:
                state = optimizer.state.get(parameter, {})
                yield id(parameter), places[id(parameter)], state


def _saved(
    optimizer: Optimizer, saved: dict[str, Any], places: Places
) -> Iterator[tuple[int, Place, Any, dict[str, Any]]]:
    """Yield id, place, number and saved state of each parameter that is cut."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    for number, parameter in zip(numbers, _parameters(optimizer), strict=False):
        if id(parameter) in places and number in saved["state"]:
            yield id(parameter), places[id(parameter)], number, saved["state"][number]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
