"""A report of what lies in the folder of a run, also of one that wrote none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from l0prune.errors import FileError
from l0prune.files.checked_json import read_json
from l0prune.report.content import (
    Comparison,
    Content,
    Gain,
    Metric,
    Pair,
    Stored,
    Training,
)
from l0prune.report.gathered import now, stored, with_trainings
from l0prune.report.page.sweep import sweep_of
from l0prune.report.report import JSON, Report
from l0prune.report.trainings import training_in
from l0prune.training.history import NAME

RESULT = "result.json"
_STAGES = ("dense", "finetune", "recover")  # of a recipe's last round


def report_of(path: Path) -> Report:
    """The report of a run's folder, or of its ``report.json``.

    A folder without one is looked through: for the result of a recipe, for what its trainings
    measured, and for several runs, which are then compared.

    Raises:
        FileError: there is no run, or what is there is damaged.
    """
    if path.is_file():
        return Report.load(path)
    if not path.is_dir():
        raise FileError(f"there is no {path}. Give the folder of a run, or its {JSON}.")
    if (path / JSON).is_file():
        written = Report.load(path / JSON)
        if written.content.about != "sweep":  # there may be more runs by now
            return written
    found = trainings_in(path)
    result = _result(path / RESULT)
    if not found and result is None and (runs := _runs_in(path)):
        return Report(sweep_of(path.resolve().name, runs))
    if not found and result is None:
        raise FileError(
            f"{path} is no run's folder: it has neither {JSON} nor {NAME}. `l0prune run` and "
            "`l0prune finetune` write such folders."
        )
    content = of_trainings(path.resolve().name, found)
    return Report(content if result is None else _with_result(content, result, path))


def _runs_in(path: Path) -> list[tuple[Path, Content]]:
    """The runs in the folders of a folder, where there are several."""
    found = []
    for folder in sorted(each for each in path.iterdir() if each.is_dir()):
        if any((folder / name).is_file() for name in (JSON, RESULT, NAME)):
            found.append((folder.relative_to(path), report_of(folder).content))
    return found if len(found) > 1 else []


def of_trainings(title: str, trainings: list[Training]) -> Content:
    """Return the report of trainings alone: curves, and an export's counts at their end."""
    content = with_trainings(Content(title=title, made=now()), trainings)
    return _with_counts(content, trainings)


def trainings_in(folder: Path) -> list[Training]:
    """Return the trainings in a run's folder, in order.

    Raises:
        FileError: records are damaged.
    """
    if (folder / NAME).exists():
        alone = training_in(folder, "finetune")
        return [] if alone is None else [alone]
    rounds = sorted(folder.glob("round-*/finetune"), key=lambda each: (len(each.parent.name), each))
    first, *rest = (folder / name for name in _STAGES)
    stages = [first, *rounds, *rest]
    found = (training_in(each, str(each.relative_to(folder))) for each in stages)
    return [training for training in found if training is not None]


def _with_counts(content: Content, trainings: list[Training]) -> Content:
    """Add an export's counts at the end of the last training with gates."""
    last = next(
        (t.epochs[-1] for t in reversed(trainings) if t.epochs[-1:] and t.epochs[-1].amounts), None
    )
    amounts = {} if last is None else last.amounts
    pairs: dict[str, Any] = {
        name: Pair(before=amounts[name].dense, after=amounts[name].actual)
        for name in ("params", "macs")
        if name in amounts
    }
    return content.model_copy(update={"gain": content.gain.model_copy(update=pairs)})


def _result(path: Path) -> dict[str, Any] | None:
    """Return the result of a recipe's run; None if it did not end."""
    if not path.exists():
        return None
    found = read_json(path, "`l0prune run` in this folder writes it anew, once it is removed.")
    if not isinstance(found, dict):
        raise FileError(f"{path} is damaged: it is no table of results.")
    return found


def _with_result(content: Content, result: dict[str, Any], folder: Path) -> Content:
    """The report with what a recipe's run came to."""
    try:
        name = str(result["metric"])
        old = content.gain.metric
        metric = Metric(
            name=name,
            larger_is_better=bool(old and old.larger_is_better),
            before=old.before if old and old.name == name else None,
            after=result[f"test_{name}"],
            of_file=result.get(f"onnx_test_{name}"),
        )
        file = folder / Path(str(result["onnx"])).name
        gain = Gain(
            params=Pair(before=result["params_before"], after=result["params"]),
            macs=Pair(before=result["macs_before"], after=result["macs"]),
            bytes=Pair(before=None, after=file.stat().st_size) if file.is_file() else None,
            metric=metric,
            seconds=content.gain.seconds,
        )
        certificate = [Comparison(**check) for check in result["certificate"]]
        files: list[Stored] = [stored(file)] if file.is_file() else []
        return content.model_copy(
            update={
                "title": str(result["recipe"]),
                "gain": gain,
                "certificate": certificate,
                "notes": str(result.get("note", "")),
                "repeat": content.repeat.model_copy(update={"files": files}),
            }
        )
    except (KeyError, TypeError, ValidationError) as error:
        reason = "of the wrong form" if isinstance(error, ValidationError) else repr(error)
        raise FileError(f"{folder / RESULT} is damaged: {reason}") from error
