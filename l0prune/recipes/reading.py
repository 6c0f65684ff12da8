"""Reading a recipe: one TOML file that says how to get from data to a small ONNX file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from l0prune.errors import UsageError
from l0prune.files.checked_json import read_toml
from l0prune.files.consent import is_code
from l0prune.recipes.schema import DataSection, ModelSection, Recipe

BUILTIN = Path(__file__).parent / "builtin"


def builtin() -> dict[str, Recipe]:
    """The recipes that come with l0prune, by name."""
    return {path.stem: load(str(path), []) for path in sorted(BUILTIN.glob("*.toml"))}


def find(name: str) -> Path:
    """The file of a recipe, given by path or by the name of a built-in one.

    Raises:
        UsageError: there is none.
    """
    for path in (Path(name), BUILTIN / f"{name}.toml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in BUILTIN.glob("*.toml"))
    raise UsageError(f"there is no recipe {name!r}; built in are {', '.join(known)}.")


def load(name: str, overrides: Sequence[str]) -> Recipe:
    """Read a recipe and apply ``section.key=value`` overrides to it.

    ``section.key=`` leaves out what the recipe says there, so that the default counts.

    Raises:
        FileError: the file cannot be read, or is no TOML.
        UsageError: it is no recipe, or an override is wrong; says where.
    """
    path = find(name)
    content = read_toml(path)
    for override in overrides:
        _override(content, override)
    content.setdefault("name", path.stem)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UsageError(f"{path} is no recipe:\n" + "\n".join(lines)) from error
    sections = {name: _located(getattr(recipe, name), path.parent) for name in ("model", "data")}
    report = recipe.report and _placed(recipe.report, path.parent)
    return recipe.model_copy(update={**sections, "report": report})


def _override(content: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not last:
        raise UsageError(
            f"{text!r} is no override: write section.key=value, e.g. finetune.epochs=5."
        )
    target = content
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise UsageError(f"{text!r}: {section} is a value, not a section.")
    if not value:
        if last not in target:
            raise UsageError(f"{text!r}: the recipe does not say {key}, so nothing is left out.")
        del target[last]
        return
    try:
        target[last] = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        target[last] = value


def _located(section: ModelSection | DataSection, folder: Path) -> ModelSection | DataSection:
    placed = {key: _placed(value, folder) for key, value in section if isinstance(value, str)}
    return section.model_copy(update=placed)


def _placed(spec: str, folder: Path) -> str:
    """Return the place of a Python file: beside the recipe, else here, else beside the built-in.

    So a copy of a built-in recipe finds the code that it names, wherever it lies.
    """
    path, _, name = spec.rpartition(":")
    if not is_code(spec):
        return spec
    places = (folder / path, Path(path), BUILTIN / path)
    found = next((place for place in places if place.is_file()), None)
    return spec if found is None else f"{found.resolve()}:{name}"
