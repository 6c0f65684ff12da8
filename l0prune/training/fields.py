"""Fields of settings, and their texts in help, messages and docs."""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from l0prune.errors import UsageError
from l0prune.plan.numbers import LARGEST, MOST

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    Callable: "a function",
    Sequence: "a list of texts",
    Mapping: "a mapping",
}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "less than"}


def summary(field: FieldInfo) -> str:
    """The first sentence of a field's description, in plain text and without its full stop."""
    sentence = re.split(r"\. (?=[A-Z])", field.description or "")[0]
    return sentence.removesuffix(".").replace("``", "`")


def types(field: FieldInfo) -> tuple[Any, ...]:
    """Return the types that a field may hold: the members of its union, or its only one."""
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def documentation(model: type[BaseModel]) -> str:
    """Return the model's docstring with its fields as a section ``Attributes``."""
    parts = [inspect.cleandoc(model.__doc__ or ""), "", "Attributes:"]
    for name, field in model.model_fields.items():
        text = f"{name}: {field.description}"
        parts.append(textwrap.fill(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(parts)


def in_words(
    error: ValidationError, fields: Mapping[str, FieldInfo], given: Mapping[str, Any]
) -> str:
    """Describe each error in ``given``: its name, its value, and what is allowed."""
    names = dict.fromkeys(str(each["loc"][0]) for each in error.errors())
    return "; ".join(
        _wrong(name, fields[name], given[name]) if name in fields else _unknown(name, list(fields))
        for name in names
    )


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}."
    return f"there is no setting {name!r}; {hint}"


def _wrong(name: str, field: FieldInfo, value: Any) -> str:
    text = f"{name} must be {_allowed(field)}, not {reprlib.repr(value)}"
    about = summary(field)
    return text if _choices(field) else f"{text} ({about[:1].lower()}{about[1:]})"


def _choices(field: FieldInfo) -> list[Any]:
    """Return the allowed values of a field with literals; else an empty list."""
    kinds = types(field)
    choices = [choice for k in kinds if get_origin(k) is Literal for choice in get_args(k)]
    return [None, *choices] if choices and NoneType in kinds else choices


def _allowed(field: FieldInfo) -> str:
    choices = _choices(field)
    words = [f"one of {', '.join(map(repr, choices))}"] if choices else []
    words += [word for kind in types(field) if (word := _word(kind)) is not None]
    return " or ".join(words) + _bounds(field)


def _word(kind: Any) -> str | None:
    if kind == Sequence[int]:
        return "a list of whole numbers"
    return _WORDS.get(get_origin(kind) or kind)


def _bounds(field: FieldInfo) -> str:
    """Describe the bounds of a numeric field."""
    limits = {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in _BOUNDS
        if getattr(rule, name, None) is not None
    }
    if limits.keys() == {"ge", "le"}:
        return f" from {_shown(limits['ge'])} to {_shown(limits['le'])}"
    texts = [f"{_BOUNDS[name]} {_shown(limit)}" for name, limit in limits.items()]
    return f" {' and '.join(texts)}" if texts else ""


def _shown(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _bounded(**bounds: Any) -> Callable[[Any, str], Any]:
    return lambda default, text: Field(default, description=text, **bounds)


# Functions that declare a numeric field by its default and its description.
amount = _bounded(ge=0, le=LARGEST)
share = _bounded(ge=0, le=1)
count = _bounded(ge=1, le=MOST)


class Declared(BaseModel):
    """Settings that are validated on creation, with errors in plain words."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return check(given)
        except ValidationError as error:
            raise UsageError(in_words(error, cls.model_fields, given)) from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make settings from keywords."""
        return cls(**given)
