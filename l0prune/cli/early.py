"""Checks of a command's arguments before torch is loaded: names, settings, budgets, files.

What is wrong there is told at once. What only the model or the data can tell comes later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from l0prune.cli.options import key_values
from l0prune.cli.project import read_recipe
from l0prune.errors import DataError, FileError
from l0prune.files.consent import is_code
from l0prune.plan import names
from l0prune.plan.budget_text import check_texts, known_units
from l0prune.plan.targets import check_target
from l0prune.training.fields import check_fields
from l0prune.training.settings import STARTS, Settings

_FILES = ("latency", "ids", "results")  # and the gated one


def check(command: str, given: Mapping[str, Any]) -> None:
    """Check the arguments of a command, by the names of its parameters.

    Raises:
        FileError: a file that is named does not exist.
        UsageError: a name, a setting or a budget is none; says which there are.
    """
    found = {name: value for name, value in given.items() if value not in (None, [], (), "")}
    for name in (*_FILES, *(("file",) if command != "evaluate" else ())):
        if name in found:
            _check_file(Path(found[name]))
    for name, check_it in _CHECKS.items():
        if name in found:
            check_it(found[name])
    if "recipe" in found:
        _check_recipe(found["recipe"], found.get("overrides", ()))
    if command == "fit" and found["score"] != "gates":
        _check_names({"score": found["score"]})
    settings = {name: found[name] for name in Settings.model_fields if name in found}
    settings.pop("latency", None)  # here it is a file
    if command == "finetune":
        settings |= key_values(found.get("setting"), "clip=1.0")
    elif command == "gate":
        names.check_gate(found.get("kind", names.GATES[-1]), names.GATES)
    if command in ("finetune", "fit", "shrink", "evaluate"):
        _check_settings(settings)


def _check_settings(settings: Mapping[str, Any]) -> None:
    budget = settings.get("budget")
    if budget is not None and "measures" not in settings:
        check_texts([budget] if isinstance(budget, str) else budget, _units())
    check_fields(Settings, {k: v for k, v in settings.items() if k != "budget"})
    _check_names(settings)


def _check_names(settings: Mapping[str, Any]) -> None:
    """Check settings that are names; of ``file.py:name`` that the file is there."""
    for name, check_it in _NAMES.items():
        if isinstance(given := settings.get(name), str):
            if is_code(given):
                _check_file(Path(given.rpartition(":")[0]))
            else:
                check_it(given)


def _units() -> dict[str, Mapping[str, float]]:
    """Return the units of all measures: in a process that has loaded them, of added ones, too."""
    loaded = sys.modules.get("l0prune.plan.measures")
    added = () if loaded is None else loaded.names()
    known = {name: loaded.kind_of(name).suffixes for name in added}  # type: ignore[union-attr]
    return known_units() | known


def _check_file(path: Path) -> None:
    if not path.exists():
        raise FileError(f"{path} does not exist.")


def _check_model(spec: str) -> None:
    kind, _, name = spec.partition(":")
    if kind in names.PACKAGES and name:
        return
    path = Path(spec.rpartition(":")[0] if is_code(spec) else spec)
    if not path.suffix and not path.exists():
        raise names.no_model(spec)
    _check_file(path)


def _check_data(spec: str) -> None:
    kind, _, rest = spec.partition(":")
    if spec in names.DATA:
        return
    if is_code(spec):
        _check_file(Path(spec.rpartition(":")[0]))
    elif kind == "imagefolder" and rest:
        paths = (rest, rest.rpartition(":")[0])  # with the size of images, or without
        if not any(Path(each).is_dir() for each in paths if each):
            raise DataError(
                f"{rest} is no folder. imagefolder:DIR takes one with train and test in it, with a "
                "folder for each class, or for what needs no labels with images alone"
            )
    elif kind != "text" and not Path(spec.split(",")[0].partition(":")[0]).exists():
        if Path(spec.partition(":")[0]).suffix:
            _check_file(Path(spec.split(",")[0].partition(":")[0]))
        raise names.no_data(spec)


def _check_recipe(name: str, overrides: Sequence[str]) -> None:
    """Check the names in a recipe; what else it says is checked when it is read."""
    content = read_recipe(name, overrides)
    for section, check_it in (("model", _check_model), ("data", _check_data)):
        if source := _texts(content, section).get("source"):
            check_it(source)
    rounds = content.get("rounds")
    parts = [each for each in rounds if isinstance(each, dict)] if isinstance(rounds, list) else []
    for part in (content, *parts):
        for section in ("data", "dense", "finetune", "fit", "recover"):
            _check_names(_texts(part, section))
        names.check_gate(_texts(part, "gate").get("kind", names.GATES[-1]), names.GATES)


def _texts(content: Mapping[str, Any], section: str) -> dict[str, str]:
    """Return the entries of a recipe's section that are texts."""
    found = content.get(section)
    entries = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in entries if isinstance(value, str)}


_NAMES: dict[str, Callable[[str], object]] = {
    "loss": partial(names.check_criterion, kind="loss"),
    "metric": partial(names.check_criterion, kind="metric"),
    "penalty": names.check_penalty,
    "score": partial(names.check_score, known=names.SCORES),
    "start": partial(names.check_score, known=(*STARTS, *names.SCORES)),
    "target": check_target,
}
_CHECKS: dict[str, Callable[[Any], object]] = {
    "model": _check_model,
    "model_option": _check_model,
    "data": _check_data,
}
