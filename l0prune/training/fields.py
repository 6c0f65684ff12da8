"""Fields of settings, and their texts in help, messages and docs."""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from l0prune.errors import UsageError, meant
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
    dict: "a table of settings",
}
_LISTED = {str: "texts", float: "numbers", int: "whole numbers"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "less than"}


def summary(field: FieldInfo) -> str:
    """The first sentence of a field's description, in plain text and without its full stop."""
    sentence = re.split(r"\. (?=[A-Z])", field.description or "")[0]
    return sentence.removesuffix(".").replace("``", "`")


def types(field: FieldInfo) -> tuple[Any, ...]:
    """Return the types that a field may hold: the members of its union, or its only one."""
    annotation = field.annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    return tuple(get_args(k)[0] if get_origin(k) is Annotated else k for k in kinds)


def documentation(model: type[BaseModel]) -> str:
    """Return the model's docstring with its fields as a section ``Attributes``."""
    parts = [inspect.cleandoc(model.__doc__ or ""), "", "Attributes:"]
    for name, field in model.model_fields.items():
        text = f"{name}: {field.description}"
        parts.append(textwrap.fill(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8))
    return "\n".join(parts)


def in_words(error: ValidationError, model: type[BaseModel], given: Any) -> list[str]:
    """Describe each wrong entry of ``given``: its place, its value, and what is allowed."""
    found: dict[str, str] = {}
    for each in error.errors():
        place, section, last, field, value = _entry(model, given, each["loc"])
        own = each.get("ctx", {}).get("error")
        if isinstance(own, ValueError):
            text = f"{place}: {own}" if place else str(own)
        elif field is None:
            text = _unknown(last, [*section.model_fields], place)
        elif each["type"] == "missing":
            text = f"{place} is missing: {summary(field)}"
        else:
            text = _wrong(place, field, value)
        found.setdefault(place, text)
    return list(found.values())


def _entry(
    model: type[BaseModel], given: Any, loc: Sequence[Any]
) -> tuple[str, type[BaseModel], str, FieldInfo | None, Any]:
    """Return the entry that an error is about: its path, its section, its key, field and value.

    ``loc`` leads through models within the model. Where a value may be of several types, pydantic
    lists an error for each, at a longer ``loc``: all of them are about the value.
    """
    path, key, field = "", "", None
    for step in loc:
        if isinstance(step, int) and isinstance(given, list):
            path, given = f"{path}[{step + 1}]", given[step]
            continue
        if field is not None and (inner := model_in(field)) is not None:
            model = inner
        elif path:
            break
        key, field = str(step), model.model_fields.get(str(step))
        path = f"{path}.{key}" if path else key
        given = given.get(key) if isinstance(given, Mapping) else None
    return path, model, key, field, given


def model_in(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model that a field holds, alone or in a list; None if it holds no model."""
    kinds = [part for kind in types(field) for part in (kind, *get_args(kind))]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _unknown(name: str, known: list[str], place: str) -> str:
    section = place.removesuffix(name).removesuffix(".")
    hint = meant(name, known) or f"; there are {', '.join(known)}."
    return f"there is no setting {name!r}{section and f' in [{section}]'}{hint}"


def _wrong(name: str, field: FieldInfo, value: Any) -> str:
    text = f"{name} must be {allowed(field)}, not {reprlib.repr(value)}"
    about = summary(field)
    return text if _choices(field) else f"{text} ({about[:1].lower()}{about[1:]})"


def _choices(field: FieldInfo) -> list[Any]:
    """Return the allowed values of a field with literals; else an empty list."""
    kinds = types(field)
    choices = [choice for k in kinds if get_origin(k) is Literal for choice in get_args(k)]
    return [None, *choices] if choices and NoneType in kinds else choices


def allowed(field: FieldInfo) -> str:
    """Describe the values that a field may have; empty if no text or number can be one."""
    choices = _choices(field)
    words = [("one of " if choices[1:] else "") + ", ".join(map(repr, choices))] if choices else []
    words += [word for kind in types(field) if (word := _word(kind)) is not None]
    return " or ".join(words) + _bounds(field)


def _word(kind: Any) -> str | None:
    if kind == Sequence[int]:
        return "a list of whole numbers"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a table of settings"
    if get_origin(kind) is list:
        return f"a list of {_LISTED.get(get_args(kind)[0], 'tables of settings')}"
    return _WORDS.get(get_origin(kind) or kind)


def _bounds(field: FieldInfo) -> str:
    """Describe the bounds of a numeric field."""
    limits = {
        name: getattr(rule, name)
        for rule in _rules(field)
        for name in _BOUNDS
        if getattr(rule, name, None) is not None
    }
    if limits.keys() == {"ge", "le"}:
        return f" from {_shown(limits['ge'])} to {_shown(limits['le'])}"
    texts = [f"{_BOUNDS[name]} {_shown(limit)}" for name, limit in limits.items()]
    return f" {' and '.join(texts)}" if texts else ""


def _rules(field: FieldInfo) -> list[Any]:
    """Return the constraints of a field, with those of single members of a union."""
    members = [m for kind in get_args(field.annotation) for m in getattr(kind, "__metadata__", ())]
    return [*field.metadata, *(rule for m in members for rule in getattr(m, "metadata", ()))]


def _shown(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _bounded(**bounds: Any) -> Callable[[Any, str], Any]:
    return lambda default, text: Field(default, description=text, **bounds)


# Functions that declare a numeric field by its default and its description.
amount = _bounded(ge=0, le=LARGEST)
share = _bounded(ge=0, le=1)
count = _bounded(ge=1, le=MOST)


def check_fields(model: type[BaseModel], given: Mapping[str, Any]) -> None:
    """Check names, types and bounds of some fields of a model, each by itself.

    Raises:
        UsageError: there is no such field, or a value is none that it may have.
    """
    for name, value in given.items():
        field = model.model_fields.get(name)
        if field is None:
            raise UsageError(_unknown(name, list(model.model_fields), ""))
        try:
            _adapter(model, name).validate_python(value, strict=True)
        except ValidationError:
            raise UsageError(_wrong(name, field, value)) from None


@functools.cache
def _adapter(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    field = model.model_fields[name]
    kind: Any = field.annotation
    return TypeAdapter(Annotated[kind, *field.metadata] if field.metadata else kind)


class Declared(BaseModel):
    """Settings that are validated on creation, with errors in plain words."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return check(given)
        except ValidationError as error:
            raise UsageError("; ".join(in_words(error, cls, given))) from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make settings from keywords."""
        return cls(**given)
