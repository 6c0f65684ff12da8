"""Run of a recipe in a folder: train if asked, gate, fine-tune, export, test, report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import nn

import l0prune
from l0prune.capture.copying import copied
from l0prune.cli.messages import say
from l0prune.cli.opening import about_named, free_dims, load_data, say_of_lengths
from l0prune.data.dataset import Loaded, Split, Tensors, as_arguments, chosen
from l0prune.doors import provided
from l0prune.errors import DataError, UsageError, warn
from l0prune.exporting.opened import opened
from l0prune.exporting.result import Export
from l0prune.features.recipes.files import (
    FitSection,
    GateSection,
    Recipe,
    RoundSection,
)
from l0prune.files.atomic import claimed, write_whole
from l0prune.files.checked_json import read_json
from l0prune.files.consent import is_code
from l0prune.files.model_sources import load_model
from l0prune.files.user_code import named
from l0prune.plan.branch import KIND
from l0prune.progress.stages import stage
from l0prune.report.collect import add_trainings, from_export, repeat_facts
from l0prune.report.content import Fit
from l0prune.report.live import live_page
from l0prune.report.report import HTML, Report, tested, trainings_in
from l0prune.running.batches import example_inputs
from l0prune.running.task import LOSS, Task
from l0prune.selection import fitted

_DENSE = "dense.pt"
_HELD_OUT = 8


def run(
    recipe: Recipe, folder: Path, data_root: str | None = None, *, report: bool = True
) -> dict[str, Any]:
    """Run a recipe in ``folder``, skipping the stages that are already done there.

    With ``report``, ``report.html`` is written into the folder.
    Returns:
        Sizes, errors, the certificate, the files.

    Raises:
        FileError: another process runs in the folder, or the folder cannot be created.
        UsageError: the folder holds a run of a different recipe.
        DataError: there is no test data.
        L0pruneError: a stage failed; files of earlier stages are kept.
    """
    with claimed(folder), live_page(folder, recipe.name) if report else nullcontext():
        _write_recipe(folder, recipe)
        return _run(recipe, folder, data_root, report=report)


def _run(recipe: Recipe, folder: Path, data_root: str | None, *, report: bool) -> dict[str, Any]:
    """Run all remaining stages in the recipe's folder."""
    network = _network(recipe, folder, data_root)
    with stage("loading the data"):
        data = _data(recipe, network, data_root)
    kept: dict[str, Any] = {}
    for name, part in recipe.further.items():
        data, kept[name] = part.keep_back(data, recipe.data.source)
    dense = network = _dense(recipe, network, data, folder)
    if recipe.data.answers:
        with stage("asking the dense network for its answers"):
            data = l0prune.with_pseudo_labels(data, dense, autocast=recipe.finetune.get("autocast"))
    exports = []
    for number, part in enumerate(recipe.rounds, start=1):
        tuned = _prune(recipe, part, network, dense, data, folder / f"round-{number}")
        exports.append(_cut(tuned))
        network = exports[-1].module
    tuned = _prune(recipe, recipe, network, dense, data, folder)
    exports.append(_cut(tuned))
    result = _export(recipe, data, tuned, exports, dense, folder, report=report)
    for name, part in recipe.further.items():
        stem = folder / recipe.name
        result[name] = part.finish(exports[-1], tuned, data, kept[name], stem)
    if recipe.further:
        write_whole(folder / "result.json", json.dumps(result, indent=2))
    return result


@stage("cutting the network, and proving it")
def _cut(tuned: nn.Module) -> Export:
    return l0prune.export(tuned)


def _write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe into the folder of its run, or refuse a folder of another recipe.

    A folder of a run that failed before its first stage may be used by another recipe.
    """
    path = folder / "recipe.json"
    text = recipe.model_dump_json(indent=2)
    has_begun = any(each != path and not each.name.startswith(".") for each in folder.iterdir())
    if has_begun and path.exists():
        if read_json(path, "Give another --out, or remove that folder.") != json.loads(text):
            raise UsageError(
                f"{folder} holds a run with other settings ({path}). Give another --out, or remove "
                "that folder."
            )
        return
    write_whole(path, text)


def _network(recipe: Recipe, folder: Path, data_root: str | None) -> nn.Module:
    """Build the recipe's network, without its weights if the folder has those of a training."""
    is_trained = (folder / _DENSE).exists()
    torch.manual_seed(recipe.seed)
    weights = None if is_trained else _weights(recipe.model.weights, data_root)
    model = load_model(recipe.model.source, weights)
    if recipe.dense is None and (said := about_named(recipe.model.source, model, weights)):
        say(said)
    return model


def _data(recipe: Recipe, network: nn.Module, data_root: str | None) -> Task:
    """Load the recipe's data; of inputs without labels every eighth example is for the test."""
    asked = recipe.data
    root = None if data_root is None else Path(data_root)
    source = load_data(asked.source, root, network, asked.tokenizer, labelled=not asked.answers)
    if not hasattr(source, "train"):
        examples = _unlabelled(source)
        if len(examples) < 2:
            raise DataError(f"{asked.source} has one example: none is left to test on")
        is_test = torch.arange(len(examples)) % _HELD_OUT == 0
        source = tuple(chosen(examples, rows.nonzero().flatten()) for rows in (~is_test, is_test))
    data = Task.of(source, asked.loss, asked.metric)
    if data.test is None:
        raise DataError(f"{asked.source} has no test data, on which a recipe reports")
    return data


def _unlabelled(inputs: Any) -> Split:
    """Return examples of a tensor or a mapping of inputs, whose targets are still to come.

    Raises:
        DataError: they are in batches already.
    """
    if isinstance(inputs, list):
        raise DataError(
            "a recipe divides examples into batches by itself: return a tensor or a mapping of all "
            "examples, not a list of batches"
        )
    if isinstance(inputs, torch.Tensor):
        return Tensors(inputs, torch.zeros(len(inputs)))
    rows = zip(*inputs.values(), strict=True)
    return Loaded([dict(zip(inputs, row, strict=True)) for row in rows])  # type: ignore[arg-type]


def _dense(recipe: Recipe, model: nn.Module, data: Task, folder: Path) -> nn.Module:
    """Return the network to prune, trained first if the recipe says so."""
    path = folder / _DENSE
    model = _adapted(recipe, model, data)
    if path.exists():
        return l0prune.load(path, model)
    if recipe.dense is None:
        return model
    settings = _settings(recipe, folder / "dense", recipe.dense, None)
    with stage("training the dense network"):
        history = l0prune.train_dense(model, data, report=False, **settings)
    l0prune.save(model, path, {"model": recipe.model.source, "history": history.last})
    return model


def _adapted(recipe: Recipe, model: nn.Module, data: Task) -> nn.Module:
    """Return the network with what sections of features put on it."""
    for part in recipe.further.values():
        args, kwargs = as_arguments(example_inputs(data, 2))
        model = part.put_on(model, args, kwargs, recipe.seed)
    return model


def _settings(recipe: Recipe, out: Path, given: dict[str, Any], teacher: Any) -> dict[str, Any]:
    """Return the training settings of a stage, which resumes where it was stopped."""
    taught = {"teacher": copied(teacher)} if given.get("distill") else {}
    return {"out": out, "resume": True, "seed": recipe.seed, **taught, **given}


def _weights(path: str | None, data_root: str | None) -> str | None:
    """Return the weights' path with variables substituted; L0PRUNE_DATA is ``--data-root``."""
    if path is None:
        return None
    known = {**os.environ, **({"L0PRUNE_DATA": data_root} if data_root else {})}
    try:
        return Template(path).substitute(known)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"the recipe's weights are {path}, and {error} is not set. Set it, or say where they "
            "are: model.weights=FILE."
        ) from error


def _prune(
    recipe: Recipe,
    part: RoundSection,
    network: nn.Module,
    dense: nn.Module,
    data: Task,
    folder: Path,
) -> nn.Module:
    """Gate a network and learn the gates, or fit them, unless the folder has the files."""
    gated, tuned = folder / "gated.pt", folder / "tuned.pt"
    folder.mkdir(exist_ok=True)
    if not gated.exists():
        _gate(recipe, part.gate, copied(network), data, gated)
    if not tuned.exists():
        model = l0prune.load(gated, copied(network))
        info = l0prune.read_info(gated)
        times = _latency_setting(recipe, model, folder) if part.goes_by_times else {}
        if part.fit is None:
            settings = _settings(recipe, folder / "finetune", part.finetune, dense) | times
            with stage("fine-tuning with gates"):
                info["history"] = l0prune.finetune(model, data, report=False, **settings).last
        else:
            info["fitted"] = _fit(model, data, part.fit, recipe.seed, **times)
        l0prune.save(model, tuned, info)
    return l0prune.load(tuned, copied(network))


def _latency_setting(recipe: Recipe, model: nn.Module, folder: Path) -> dict[str, Any]:
    """Measure a latency table if the recipe has such a section; return it as a setting."""
    if recipe.latency is None:
        return {}
    path, asked = folder / "latency.json", recipe.latency
    if not path.exists():
        with stage("measuring a latency table"):
            table = l0prune.measure(
                model,
                asked.threads,
                asked.batch,
                asked.runtime,
                asked.provider,
                samples=asked.samples,
                seed=recipe.seed,
                folder=folder / "latency",
            )
        table.save(path)
        shutil.rmtree(folder / "latency")
    return {"latency": l0prune.LatencyTable.load(path)}


def _gate(recipe: Recipe, part: GateSection, model: nn.Module, data: Task, path: Path) -> None:
    settings = part.model_dump(exclude={"kind", "settings", "dynamic"})
    args, kwargs = as_arguments(example_inputs(data, 2))
    with stage("gating the network"):
        free = free_dims(part.dynamic, model)
        if free is None:
            say_of_lengths(model, (args, kwargs))
        l0prune.gate(model, args, kwargs, dynamic_shapes=free, gate=part.made(), **settings)
    l0prune.save(model, path, {"model": recipe.model.source, "data": recipe.data.source})


def _fit(
    model: nn.Module,
    data: Task,
    part: FitSection,
    seed: int,
    latency: l0prune.LatencyTable | None = None,
) -> dict[str, Any]:
    """Fit the model, and return data on the choice of its widths."""
    with stage(f"the score {part.score}"):
        scores = l0prune.score(
            model, part.score, data, batches=part.batches, batch_size=part.batch_size, seed=seed
        )
    found: list[fitted.Fitted] = []
    with fitted.watched(found.append):
        l0prune.fit(
            model,
            part.budget,
            scores,
            round_to=part.round_to,
            target=part.target,
            latency=latency,
            kinds=part.kinds,
            data=data if part.score == "auto" and not part.kinds else None,
        )
    return found[-1].to_dict()


@stage("testing the smaller network and its file")
def _test(small: Export, file: Path, data: Task) -> dict[str, Any]:
    """Return the test metric of the module and of its file; without a metric the loss.

    For the file it is None if there are several, or, with a warning, if loss and metric do not take
    its outputs, which are tensors by name.
    """
    found = l0prune.evaluate(small.module, data)
    key = data.metric_name if data.metric_name in found else LOSS
    of_file: dict[str, float] = {}
    try:
        if not small.in_parts:
            of_file = l0prune.evaluate(opened(str(file)), data, device="cpu")
    except (DataError, UsageError) as error:
        warn(f"{file} was written and not tested on the data: {error}")
    name = key.removeprefix("test_")
    return {"metric": name, f"test_{name}": found[key], f"onnx_test_{name}": of_file.get(key)}


def _own_report(spec: str | None, dense: nn.Module, file: Path) -> dict[str, Any]:
    """Return the measurements of the recipe's ``report`` function."""
    if spec is None:
        return {}
    with stage("measuring what the recipe reports"):
        found = named(spec)(dense, file)
    if not isinstance(found, dict):
        raise UsageError(
            f"{spec} must return a dict of what is to be said, by name, not a "
            f"{type(found).__name__}"
        )
    return found


def _export(
    recipe: Recipe,
    data: Task,
    tuned: nn.Module,
    exports: Sequence[Export],
    dense: nn.Module,
    folder: Path,
    *,
    report: bool,
) -> dict[str, Any]:
    """Write the files, ``result.json`` and the report, with sizes before the first round."""
    first, small = exports[0], exports[-1]
    history = l0prune.read_info(folder / "tuned.pt").get("history")
    if recipe.recover is not None:
        settings = _settings(recipe, folder / "recover", recipe.recover, dense)
        with stage("training the smaller network alone"):
            history = l0prune.train_dense(small.module, data, report=False, **settings).last
    file = folder / f"{recipe.name}.onnx"
    first_round = folder / "round-1" if recipe.rounds else folder
    before = l0prune.load(first_round / "gated.pt", copied(dense))
    threads = recipe.latency.threads if recipe.latency else 1
    small.preprocessing = data.preprocessing
    with stage("writing the ONNX file, and comparing it"):
        small.save_onnx(file, beside=before, threads=threads)
    files = list(small.files)
    for wanted, ending in ((recipe.export.pt2, "pt2"), (recipe.export.state, "state.pt")):
        files += small.save(folder / f"{recipe.name}.{ending}") if wanted else ()
    axes = {axis.name: int(axis.open.sum()) for axis in l0prune.gates(tuned).axes}
    widths = [str(axes[axis.name]) for axis in l0prune.gates(tuned).axes if axis.kind != KIND]
    result = {
        "recipe": recipe.name,
        "architecture": "-".join(widths),
        **_test(small, file, data),
        "report": _own_report(recipe.report, dense, file),
        **small.to_dict(),
        "params_before": first.params_before,
        "macs_before": first.macs_before,
        "axes": axes,
        "gone": [name for export in exports for name in export.gone],
        "onnx": str(file),
        "training": history,
    }
    if report:
        page = _write_report(recipe, result, [*exports[:-1], small], tuned, files, folder)
        result["page"] = str(page)
    write_whole(folder / "result.json", json.dumps(result, indent=2))
    return result


def _write_report(
    recipe: Recipe,
    result: dict[str, Any],
    exports: Sequence[Export],
    tuned: nn.Module,
    files: Sequence[Path],
    folder: Path,
) -> Path:
    """Write ``report.html`` and ``report.json``; ``tuned`` is the network of the last round."""
    content = add_trainings(from_export(exports[-1], exports[0]), trainings_in(folder))
    fit = l0prune.read_info(folder / "tuned.pt").get("fitted")
    metric = tested(content.gain.metric, result)
    old = content.repeat
    seen = {"seed": recipe.seed, "device": old.device, "preprocessing": old.preprocessing}
    repeat = repeat_facts(files, _without_folders(recipe.model_dump(mode="json"))).model_copy(
        update=seen
    )
    update = {
        "title": recipe.name,
        "gain": content.gain.model_copy(update={"metric": metric}),
        "repeat": repeat,
        "fit": None if fit is None else Fit.model_validate(fit),
    }
    content = content.model_copy(update=update)
    if recipe.latency is not None and not recipe.rounds:
        table = l0prune.LatencyTable.load(folder / "latency.json")
        content = provided("add_time")(content, table, tuned)
    return Report(content).save(folder / HTML)[0]


def _without_folders(part: Any) -> Any:
    """Return data of a recipe without the folders of Python files, since pages may be shared."""
    if isinstance(part, dict):
        return {key: _without_folders(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_without_folders(each) for each in part]
    return Path(part).name if isinstance(part, str) and is_code(part) else part
