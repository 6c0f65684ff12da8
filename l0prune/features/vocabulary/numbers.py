"""Ids of tokens in a model's configuration and modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

# Names in transformers of one or several token ids, and of ids that are never generated.
_ID = re.compile(r"_token_ids?$|_token_index$|_to_id$")
_SUPPRESSED = re.compile(r"suppress_tokens$")
_PADDING = "padding_idx"

Number = Callable[[int], int | None]


def token_ids_in(model: nn.Module) -> set[int]:
    """Return the token ids in a model's settings: of padding, of the end of a text, of an image."""
    found: set[int] = set()

    def note(number: int) -> int:
        found.add(number)
        return number

    for _, _, value in _named_ids(model):
        _changed(value, note)
    return found


def renumber(model: nn.Module, new: Mapping[int, int]) -> None:
    """Replace the token ids in a model's settings by the new ones, in place.

    Other numbers (as -100) are left; from lists of ids that are never generated they are removed.
    """
    for holder, name, value in list(_named_ids(model)):
        setattr(holder, name, _changed(value, lambda number: new.get(number, number)))
    for config in _settings(model):
        for name, value in list(vars(config).items()):
            if _SUPPRESSED.search(name) and isinstance(value, list):
                setattr(config, name, [new[number] for number in value if number in new])


def _named_ids(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yield the holder, attribute name and value of each setting with token ids."""
    for config in _settings(model):
        yield from ((config, name, of) for name, of in vars(config).items() if _ID.search(name))
    for module in model.modules():
        for name, value in vars(module).items():
            is_id = bool(_ID.search(name)) or (
                name == _PADDING and not isinstance(module, nn.Embedding)
            )
            if is_id and type(value) is int:
                yield module, name, value


def _settings(model: nn.Module) -> Iterator[Any]:
    """Yield the configurations of a model, nested ones, and the one for generation."""
    pending = [getattr(model, name, None) for name in ("config", "generation_config")]
    while pending:
        config = pending.pop()
        if hasattr(config, "to_json_string"):
            yield config
            pending += vars(config).values()


def _changed(value: Any, change: Number) -> Any:
    if type(value) is int:
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_changed(each, change) for each in value)
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return value
