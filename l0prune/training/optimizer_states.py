"""What optimizers remember of parameters that are cut in place, and of them whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from l0prune.errors import UsageError
from l0prune.exporting.slicing.tensors import Place

Places = Mapping[int, Place]
States = Mapping[int, Mapping[str, Any]]  # by the parameter's id


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where this is what a framework has put around it."""
    inner = getattr(optimizer, "optimizer", None)
    return bare(inner) if isinstance(inner, Optimizer) else optimizer


def check_states(optimizers: Sequence[Optimizer], places: Places) -> None:
    """Raise UsageError where a state is not of its parameter's shape, nor a single number.

    An optimizer may keep what it knows of all of its parameters with one that is not cut.

    Args:
        optimizers: before the cut.
        places: by the parameter's id, where it is to be cut.
    """
    for optimizer in optimizers:
        _check(optimizer, places)


def check_held(
    optimizers: Sequence[Optimizer], places: Places, named: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise UsageError where a parameter that is cut may learn by none of these optimizers.

    Args:
        optimizers: those that a loop of the user's was seen to step.
        places: by the parameter's id, where it is cut.
        named: the model's parameters, with their names.
    """
    held = {id(parameter) for optimizer in optimizers for parameter in _parameters(optimizer)}
    for name, parameter in named:
        if parameter.requires_grad and id(parameter) in places and id(parameter) not in held:
            raise UsageError(
                f"no optimizer that before_step(optimizer, …) was given holds {name}: give it all "
                "that step"
            )


def _check(optimizer: Optimizer, places: Places) -> None:
    parameters = list(_parameters(optimizer))
    if not any(id(parameter) in places for parameter in parameters):
        return
    for parameter in parameters:
        place = places.get(id(parameter))
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


def cut_states(optimizers: Sequence[Optimizer], places: Places) -> None:
    """Leave of each state, in place, what belongs to what is left of its parameter."""
    for _, place, state in _states(optimizers, places):
        _change(state, partial(_left, place))


def whole_states(optimizers: Sequence[Optimizer], places: Places, rest: States) -> None:
    """Make them whole, in place.

    Args:
        optimizers: while their parameters are cut.
        places: by the parameter's id, where it is.
        rest: by the same, whole states that hold what was cut off; of others it is zeros, as
            nothing is remembered of it.
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


def saved_whole(optimizer: Optimizer, saved: dict[str, Any], places: Places) -> None:
    """Make what an optimizer's ``state_dict`` gave, in place, that of whole parameters."""
    for _, place, number, state in _saved(optimizer, saved, places):
        saved["state"][number] = changed = dict(state)
        _change(changed, partial(_put, place))


def saved_cut(optimizer: Optimizer, saved: dict[str, Any], places: Places) -> States:
    """Make what ``load_state_dict`` is given, in place, that of what is left of them.

    Returns:
        What it was, by the parameter's id.
    """
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
    """The same of what is saved, and by which number."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    for number, parameter in zip(numbers, _parameters(optimizer), strict=False):
        if id(parameter) in places and number in saved["state"]:
            yield id(parameter), places[id(parameter)], number, saved["state"][number]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
