"""Configurations of transformers models: building models from them, and the sizes in them."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from l0prune.capture.threads import muted

Field = tuple[str, ...]  # the keys that lead to a number of the configuration
Dim = tuple[str, int]  # name of a tensor, and which of its dims

_FLOAT = "__float__"  # key of an object that is written for inf, -inf or nan

# Keys that can make transformers fetch or run something, and that no saved model needs.
_UNWANTED = re.compile(r"implementation|auto_map|quantization|use_kernels|trust|use_pretrained")


def class_of_transformers(kind: Any) -> str:
    """Return the name of this class of models in transformers; empty for any other class."""
    is_class = isinstance(kind, type) and issubclass(kind, nn.Module)
    if not is_class or not kind.__module__.startswith("transformers.models."):
        return ""
    transformers = importlib.import_module("transformers")
    name = kind.__name__
    return (
        name if getattr(transformers, name, None) is kind and hasattr(kind, "config_class") else ""
    )


def configuration_of(model: Any) -> dict[str, Any]:
    """Return the configuration of a model of transformers, as JSON data."""
    data: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return data


def configured(kind: Any, config: Mapping[str, Any]) -> nn.Module:
    """Build a model of transformers from a configuration, with arbitrary weights."""
    with offline(), _without_init():
        made: Any = kind(kind.config_class.from_dict(_plain(config)))
    made.tie_weights()  # which is part of the initialization that is left out
    model: nn.Module = made
    return model


def _plain(config: Any) -> Any:
    """Remove the keys that could fetch or run anything from a configuration, also nested ones.

    Numbers that JSON lacks (inf, nan), which transformers writes as objects, are numbers again.
    """
    if isinstance(config, Mapping) and config.keys() == {_FLOAT}:
        return float(config[_FLOAT])
    if isinstance(config, Mapping):
        return {n: _plain(v) for n, v in config.items() if not _UNWANTED.search(str(n))}
    return [_plain(each) for each in config] if isinstance(config, list) else config


@contextmanager
def offline() -> Iterator[None]:
    """Disable downloads from the hub within the context: a configuration can name networks."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _without_init() -> Iterator[None]:
    """Disable transformers' weight initialization in the context, if the version supports it."""
    with ExitStack() as stack:
        for module in ("transformers.initialization", "transformers.modeling_utils"):
            with suppress(ImportError, AttributeError):
                stack.enter_context(importlib.import_module(module).no_init_weights())
                break
        yield


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the logs, warnings and progress bars of transformers within the context."""
    told = importlib.import_module("transformers.utils.logging")
    level, shows = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity(logging.CRITICAL)
    told.disable_progress_bar()
    try:
        with muted():
            yield
    finally:
        told.set_verbosity(level)
        if shows:
            told.enable_progress_bar()


def changed(data: Mapping[str, Any], values: Mapping[Field, Any]) -> dict[str, Any]:
    """Return a configuration with these values."""
    result = copy.deepcopy(dict(data))
    for field, value in values.items():
        place = result
        for key in field[:-1]:
            place = place[key]
        place[field[-1]] = value
    return result


def numbers_in(data: Mapping[str, Any], path: Field = ()) -> Iterator[tuple[Field, int]]:
    """Yield the positive integers in a configuration, which may be sizes, after their keys."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from numbers_in(value, (*path, key))
        elif type(value) is int and value > 0:
            yield (*path, key), value


_PROBE = 1236  # an unusual size, divisible by 2, 3, 4, 6 and 12


class Configured:
    """Class of transformers with a configuration, from which it is built on the meta device.

    Attributes:
        kind: the class.
        data: the configuration, as JSON data.
    """

    def __init__(self, kind: Any, data: Mapping[str, Any]) -> None:
        self.kind, self.data = kind, dict(data)

    def built(self, values: Mapping[Field, Any]) -> nn.Module | None:
        """Build the model with these values changed; return None if that fails."""
        try:
            with quietly(), torch.random.fork_rng(devices=[]), torch.device("meta"):
                return configured(self.kind, changed(self.data, values))
        # With a wrong number, models can raise anything.
        except Exception:
            return None

    def sizes(self, values: Mapping[Field, Any]) -> dict[Dim, int] | None:
        """Return the sizes of the model with these values changed; None if it cannot be built."""
        model = self.built(values)
        return None if model is None else sizes_of(model)

    def with_numbers(self) -> Configured:
        """Return the configuration with explicit numbers instead of the class's defaults.

        If a class by default takes four times the hidden size for its MLP, that number is then in
        the configuration.
        """
        whole, found = self.sizes({}) or {}, dict(self.data)
        for key in [key for key, value in self.data.items() if value is None]:
            sizes = self.sizes({(key,): _PROBE}) or {}
            times = {dim: sizes[dim] for dim in whole if sizes.get(dim, whole[dim]) != whole[dim]}
            values = {whole[dim] * _PROBE // size for dim, size in times.items()}
            if len(values) == 1 and self.sizes({(key,): min(values)}) == whole:
                found[key] = values.pop()
        return Configured(self.kind, found)

    def following(self, fields: Mapping[Field, int]) -> dict[Dim, list[Field]]:
        """Return for each dim the fields of the configuration with which it doubles."""
        whole = self.sizes({}) or {}
        found: dict[Dim, list[Field]] = {}
        for field, value in fields.items():
            sizes = self.sizes({field: 2 * value}) or {}
            for dim, size in whole.items():
                if sizes.get(dim) == 2 * size:
                    found.setdefault(dim, []).append(field)
        return found


def sizes_of(model: nn.Module) -> dict[Dim, int]:
    """Return the size of each dim of each tensor in a model's state."""
    state = model.state_dict()
    return {(name, dim): size for name, t in state.items() for dim, size in enumerate(t.shape)}


def put_size(model: nn.Module, sizes: Mapping[Dim, int], old: int, new: int) -> bool:
    """Put a size into the configuration of a model of transformers, in place.

    The fields are chosen so that the class builds tensors of the new sizes.

    Args:
        model: the model whose configuration is changed.
        sizes: of the state's tensors after the cut.
        old: the size before the cut.
        new: the size after it.

    Returns:
        Whether there are such fields.
    """
    if not class_of_transformers(type(model)):
        return False
    known: Any = model
    data = configuration_of(model)
    given = Configured(type(model), data)
    fields = [field for field, value in numbers_in(data) if value == old]
    for each in (*((field,) for field in fields), tuple(fields)):
        if each and given.sizes(dict.fromkeys(each, new)) == sizes:
            for field in each:
                config = known.config
                for key in field[:-1]:
                    config = getattr(config, key)
                setattr(config, field[-1], new)
            return True
    return False
