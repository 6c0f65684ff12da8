"""Grid of a sweep: the product of its settings, a folder per point, and the sweep's record."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from l0prune.cli.options import key_and_value
from l0prune.errors import UsageError
from l0prune.features.recipes import files as recipe_files
from l0prune.features.recipes.files import Recipe
from l0prune.files.atomic import write_whole
from l0prune.files.checked_json import read_json

RECORD = "sweep.json"
SEED = "seed"
_BUDGET = "budget"
# Value in a list with commas, which may hold commas in quotes or brackets.
_VALUE = re.compile(r"""(?:[^,"'\[{]|"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\})+""")


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: name of the run's folder, below that of the sweep.
        settings: settings of this run, by ``section.key``.
        recipe: recipe of this run.
    """

    name: str
    settings: Mapping[str, str]
    recipe: Recipe

    @property
    def overrides(self) -> list[str]:
        """Settings as arguments of ``l0prune run``."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    @property
    def dense(self) -> str | None:
        """Key of the settings of the network that the recipe trains first; None if it has none."""
        if self.recipe.dense is None:
            return None
        changing = {*self.recipe.further}  # the network from the beginning
        return self.recipe.model_dump_json(include={"seed", "model", "data", "dense"} | changing)


def asked(
    recipe: Recipe, budget: str | None, seed: str | None, given: Sequence[str]
) -> dict[str, list[str]]:
    """Return the values of each setting that is swept, by ``section.key``.

    Raises:
        UsageError: a setting has no value, or one twice, or no setting is given.
    """
    found: dict[str, list[str]] = {}
    pairs = [key_and_value(text, "finetune.lr=1e-3,1e-2") for text in given]
    if budget is not None:
        section = "finetune" if recipe.fit is None else "fit"
        pairs.insert(0, (f"{section}.{_BUDGET}", ",".join(_budgets(_values(budget)))))
    if seed is not None:
        pairs.append((SEED, seed))
    for key, text in pairs:
        if not (values := _values(text)):
            raise UsageError(
                f"{key}={text} sweeps nothing: write values, such as --budget macs=0.3,0.5"
            )
        if key in found or len(set(values)) < len(values):
            raise UsageError(f"{key} is given a value twice: each value is one run")
        found[key] = values
    if not found:
        raise UsageError(
            "a sweep needs settings of several values: --budget macs=0.3,0.5, --seed 0,1,2, or "
            "--set section.key=a,b. One run is `l0prune run`"
        )
    return found


def _values(text: str) -> list[str]:
    return [value.strip() for value in _VALUE.findall(text) if value.strip()]


def _budgets(values: Sequence[str]) -> Iterator[str]:
    """Yield budgets; a number alone takes the measure of the budget before it."""
    measure = ""
    for value in values:
        if "=" in value:
            measure = value.rpartition("=")[0] + "="
        yield value if "=" in value else measure + value


def points(name: str, overrides: Sequence[str], settings: Mapping[str, list[str]]) -> list[Point]:
    """Return all combinations of the settings, each with its recipe.

    Raises:
        UsageError: a setting is not valid; nothing has run then.
    """
    combinations = [
        dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())
    ]
    names = [_name(each) for each in combinations]
    found = []
    for folder, each in zip(names, combinations, strict=True):
        texts = [f"{key}={value}" for key, value in each.items()]
        if names.count(folder) > 1:
            folder += "_" + hashlib.blake2b(repr(texts).encode(), digest_size=4).hexdigest()
        found.append(Point(folder, each, recipe_files.load(name, [*overrides, *texts])))
    return found


def _name(settings: Mapping[str, str]) -> str:
    return "_".join(re.sub(r"[^\w.+]+", "-", label(*item)).strip("-") for item in settings.items())


def label(key: str, value: str) -> str:
    """Return a short text of a setting: a budget, or the last part of a key and the value."""
    last = key.rpartition(".")[2]
    return value.strip("\"'") if last == _BUDGET else f"{last}={value}"


def record(folder: Path, recipe: Recipe, settings: Mapping[str, list[str]]) -> None:
    """Write the sweep's record into the folder, or check that a record there is compatible.

    Settings may have more values than before.

    Raises:
        UsageError: the folder holds another sweep, or something else.
        FileError: the record is damaged, or cannot be written.
    """
    path = folder / RECORD
    now = {"recipe": json.loads(recipe.model_dump_json()), "settings": dict(settings)}
    way_on = "Give another --out, or remove that folder."
    if path.exists():
        before = read_json(path, way_on)
        if differs := _differences(before, now):
            raise UsageError(f"{folder} holds another sweep: {'; '.join(differs)}. {way_on}")
    elif held := [each.name for each in folder.iterdir() if not each.name.startswith(".")]:
        raise UsageError(f"{folder} holds no sweep but {min(held)}. {way_on}")
    write_whole(path, json.dumps(now, indent=2))


def _differences(before: Any, now: Mapping[str, Any]) -> list[str]:
    """Describe the incompatible differences of a sweep from its earlier record."""
    try:
        old, new = before["settings"], now["settings"]
        texts = [f"it has no {key}" for key in new if key not in old]
        for key, values in old.items():
            if gone := [value for value in values if value not in new.get(key, ())]:
                texts.append(f"it has {key}={','.join(gone)}, too")
        flat_old, flat_new = dict(_flat(before["recipe"])), dict(_flat(now["recipe"]))
    except (AttributeError, KeyError, TypeError):
        return [f"{RECORD} is damaged"]
    for key in sorted(flat_old.keys() | flat_new.keys()):
        if flat_old.get(key) != flat_new.get(key):
            texts.append(f"its {key} is {flat_old.get(key)}, not {flat_new.get(key)}")
    return texts


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
