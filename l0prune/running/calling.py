"""Calling a model on the inputs of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn

from l0prune.capture.wrappers import inside
from l0prune.data.inputs import as_arguments
from l0prune.data.pairs import LABELS
from l0prune.errors import DataError


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's outputs: a tuple is its positional arguments, a mapping its keyword ones.

    Labels among the inputs are passed on only where the model's forward has a place for them.

    Raises:
        DataError: the inputs have names that the forward has not.
    """
    args, kwargs = as_arguments(inputs)
    return model(*args, **_fitting(model, kwargs))


def _fitting(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return those keyword arguments that the model takes."""
    taken = _names(inside(model)) if given and isinstance(model, nn.Module) else None
    if taken is None:
        return given
    if "labels" in taken and "label" in given.keys() - taken:
        given = {("labels" if name == "label" else name): v for name, v in given.items()}
    unknown = [name for name in given if name not in taken and name not in LABELS]
    if unknown:
        raise DataError(
            f"the batches hold {', '.join(map(str, unknown))}, which the forward of "
            f"{type(inside(model)).__name__} does not take; it takes {', '.join(taken)}. Leave "
            "out of them what is no input (of a data set: remove_columns)"
        )
    return {name: value for name, value in given.items() if name in taken}


def _names(model: nn.Module) -> dict[str, None] | None:
    """The names of forward's parameters in order; None where it takes any, or cannot be told."""
    forward = type(model).forward
    return None if forward is nn.Module.forward else _names_of(forward)


@lru_cache(maxsize=64)
def _names_of(forward: Callable[..., Any]) -> dict[str, None] | None:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return dict.fromkeys(each.name for each in parameters if each.kind in kinds)
