"""Optimizers: made from settings, of the gates alone, and their states when a model is cut."""

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
    """The optimizer that the settings name, over these groups; Adam for gates beside SGD."""
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
        # Torch's fused SGD has no way with shards yet.
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
    """Sets the weights' rate from the fraction of the steps that are done; that of gates stays."""

    def __init__(self, settings: Settings, optimizers: list[Optimizer], phases: Phases) -> None:
        self._factor = _factor(settings.schedule, 1 - phases.settle / phases.total)
        self._optimizers = optimizers
        self._total = phases.total
        self._base = [group["lr"] for group in self._groups()]

    def _groups(self) -> Groups:
        """Return the groups of now: an optimizer that loads a state replaces them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """The rates of step number ``step``, from 0."""
        factor = self._factor(step / self._total)
        for group, base in zip(self._groups(), self._base, strict=True):
            group["lr"] = base if group.get("name") == "gates" else base * factor


def _factor(schedule: str | Callable[[float], float], pruned: float) -> Callable[[float], float]:
    """From the fraction of the steps done to a factor; pruning ends at fraction ``pruned``."""
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
    """Adam for the gates' parameters, whose gradient nobody else sees.

    Backward puts the gradient aside and leaves zeros, which change no norm that the weights are
    clipped by. ``hand_over`` brings it back when the step is due; after ``step`` there is none, so
    that an optimizer that holds ``log_alpha``, too, neither moves nor decays it. The newest one of
    a parameter counts, and none that its run has let go of.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, **options: Any) -> None:
        self._parameters = list(parameters)
        self._is_fused = all(map(_can_fuse, parameters))
        self._adam = Adam(self._parameters, lr=lr, fused=self._is_fused, **options)
        self._aside: dict[int, Tensor] = {}
        self._is_due = False  # what comes now is the penalty's
        free(self._parameters)
        self._hooks = [
            each.register_hook(_asking(ref(self), id(each))) for each in self._parameters
        ]
        _taken.update({id(each): ref(self) for each in self._parameters})

    def put_aside(self, of: int, gradient: Tensor) -> Tensor:
        """Keep the gradient of the parameter with this id for the step, and leave zeros."""
        if self._is_due:
            return gradient
        known = self._aside.get(of)
        self._aside[of] = gradient.clone() if known is None else known + gradient
        return torch.zeros_like(gradient)

    def is_of(self, parameter: nn.Parameter) -> bool:
        """Return whether this is one that it moves."""
        return any(each is parameter for each in self._parameters)

    def hand_over(self) -> None:
        """Let the parameters have their gradients, the means over all processes."""
        for each in self._parameters:
            gradient = self._aside.pop(id(each), None)
            gradient = torch.zeros_like(each) if gradient is None else gradient
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(gradient)
                gradient /= distributed.get_world_size()
            each.grad = gradient
        self._is_due = True

    def step(self, scale: float | Tensor = 1.0) -> None:
        """Move the gates by their gradient without its scale, unless that made it overflow."""
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
        """Take a step if this is true, by a kernel that asks for it without a wait for the device.

        It is told as torch's GradScaler tells it.
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
        """Let backward leave the gradients where they were."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Adam's."""
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        self._adam.load_state_dict(state)


def free(parameters: Iterable[nn.Parameter]) -> None:
    """Let backward leave the gradients of these where they are, whoever put them aside before."""
    for each in parameters:
        known = _taken.pop(id(each), None)
        found = None if known is None else known()
        if found is not None and found.is_of(each):
            found.release()


def _asking(owner: ref[OwnOptimizer], of: int) -> Callable[[Tensor], Tensor]:
    """A hook that does nothing once its optimizer is gone."""

    def hook(gradient: Tensor) -> Tensor:
        found = owner()
        return gradient if found is None else found.put_aside(of, gradient)

    return hook


Places = Mapping[int, Place]
States = Mapping[int, Mapping[str, Any]]  # by the parameter's id


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where this is what a framework has put around it."""
    inner = getattr(optimizer, "optimizer", None)
    return bare(inner) if isinstance(inner, Optimizer) else optimizer


def check_states(optimizers: Sequence[Optimizer], places: Places) -> None:
    """Raise UsageError where a state is not of its parameter's shape, nor a single number.

    An optimizer may keep what it knows of all of its parameters with one that is not cut.
    """
    for optimizer in optimizers:
        parameters = list(_parameters(optimizer))
        if any(id(parameter) in places for parameter in parameters):
            for parameter in parameters:
                _check_state(optimizer, parameter, places.get(id(parameter)))


def _check_state(optimizer: Optimizer, parameter: Tensor, place: Place | None) -> None:
    # A checkpoint from after the cut has it as it is then.
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
    """Raise UsageError where a parameter that is cut may learn by none of these optimizers."""
    held = {id(parameter) for optimizer in optimizers for parameter in _parameters(optimizer)}
    for name, parameter in named:
        if parameter.requires_grad and id(parameter) in places and id(parameter) not in held:
            raise UsageError(
                f"no optimizer that before_step(optimizer, …) was given holds {name}: give it all "
                "that step"
            )


def cut_states(optimizers: Sequence[Optimizer], places: Places) -> None:
    """Leave of each state, in place, what belongs to what is left of its parameter."""
    for _, place, state in _states(optimizers, places):
        _change(state, partial(_left, place))


def whole_states(optimizers: Sequence[Optimizer], places: Places, rest: States) -> None:
    """Make them whole, in place.

    ``rest`` are whole states, by the parameter's id, that hold what was cut off; of others it is
    zeros, as nothing is remembered of it.
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
    """Momentum of what was gone before the first step is 0, as that of what was closed is.

    torch's fused SGD takes no parameters of which some have a buffer and others have none yet.
    """
    for group in optimizer.param_groups:
        if not group["momentum"] or not any(optimizer.state.get(p) for p in group["params"]):
            continue
        for parameter in group["params"]:
            if id(parameter) in places and not optimizer.state.get(parameter):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def exchange(optimizers: Optimizers, parameters: Mapping[int, nn.Parameter]) -> None:
    """Let optimizers hold other parameters, with the states of those in whose places they come.

    A tensor of a state that is as large as its parameter is in shards where that is, else whole.

    Args:
        optimizers: changed in place.
        parameters: new ones, by the ids of those whose places they take.
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
    """Make what an optimizer's ``state_dict`` gave, in place, that of whole parameters."""
    for _, place, number, state in _saved(optimizer, saved, places):
        saved["state"][number] = changed = dict(state)
        _change(changed, partial(_put, place))


def saved_cut(optimizer: Optimizer, saved: dict[str, Any], places: Places) -> States:
    """Cut what ``load_state_dict`` is given, in place, to what is left; return the whole states."""
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
    """The states of parameters that are cut, by their ids."""
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if id(parameter) in places:
                state = optimizer.state.get(parameter, {})
                yield id(parameter), places[id(parameter)], state


def _saved(
    optimizer: Optimizer, saved: dict[str, Any], places: Places
) -> Iterator[tuple[int, Place, Any, dict[str, Any]]]:
    """Yield the saved states of parameters that are cut, with their numbers."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    for number, parameter in zip(numbers, _parameters(optimizer), strict=False):
        if id(parameter) in places and number in saved["state"]:
            yield id(parameter), places[id(parameter)], number, saved["state"][number]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
