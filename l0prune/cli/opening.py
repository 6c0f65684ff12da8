"""Loading of a command's inputs: models, example inputs, data, tokenizers, latency tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import l0prune
from l0prune.cli.messages import say
from l0prune.cli.options import MODEL_HELP
from l0prune.cli.project import chosen, image_folder, only_model
from l0prune.doors import provided
from l0prune.errors import DataError, FileError, UsageError
from l0prune.files.consent import check_consent, check_root_consent, remember

LATENCY = ".latency.json"
NO_DATA = (
    'no data is named: give --data mnist, imagefolder:DIR or file.py:function, or data = "…" in '
    "l0prune.toml, or put a folder of images here, in it a folder for each class."
)


def open_model(
    model: str | None, option: str | None, weights: Path | None, trust_pickle: bool
) -> tuple[str, Any]:
    """Return the model's spec and the module itself.

    Raises:
        UsageError: no model, or two, are named.
    """
    if model and option and model != option:
        raise UsageError(f"two models are named: {model} and {option}.")
    spec = chosen(model or option, "model") or only_model()
    if spec is None:
        raise UsageError(
            "no model is named, and there is no *.pt, *.pth or *.onnx here that no command has "
            f"written. MODEL is one of: {MODEL_HELP}"
        )
    if not (model or option):
        say(f"the model is {spec}")
    text = str(weights) if weights else None
    module = l0prune.load_model(spec, text, trust_pickle=trust_pickle)
    if said := about_named(spec, module, text):
        say(said)
    return spec, module


def about_named(spec: str, module: Any, weights: str | None) -> str:
    """Describe a package's network by its last layer and weights; empty for other models."""
    package, _, name = spec.partition(":")
    if package not in ("torchvision", "timm", "transformers") or not name:
        return ""
    sizes = {path: _outputs(each) for path, each in module.named_modules()}
    last = next((path for path in reversed(sizes) if sizes[path]), None)
    outputs = "" if last is None else f"its last layer, {last}, has {sizes[last]:,} outputs; "
    if weights is not None:
        return f"{spec}: {outputs}its weights are {weights}"
    if package == "transformers":
        return f"{spec}: {outputs}its weights are those that {name} holds"
    way_on = "DEFAULT for published ones, or a file" if package == "torchvision" else "FILE"
    return f"{spec}: {outputs}its weights are random, not pretrained (weights: {way_on})"


def _outputs(layer: Any) -> int:
    """Return the outputs of a Linear or a convolution; 0 for other modules."""
    return int(getattr(layer, "out_features", 0) or getattr(layer, "out_channels", 0))


def example_inputs(
    text: str | None, data: Any, model: Any
) -> tuple[str | None, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return example inputs from ``--input``, else the first two of the data, else a guess.

    The result is their text, if they come from one, and positional and keyword arguments. A batch
    of one is doubled: torch.export takes a size of one for a constant.

    Raises:
        UsageError: no input that the model runs on could be guessed.
    """
    from l0prune.files.model_sources import parse_input  # loads torch, as do the next ones
    from l0prune.files.source_file import source_file_of

    text = chosen(text, "input")
    if text is None and data is not None:
        from l0prune.data.dataset import as_arguments, map_tensors
        from l0prune.running.batches import example_inputs
        from l0prune.running.task import Task

        if not hasattr(data, "train"):  # inputs alone
            first = data[0] if isinstance(data, list) else data
            return None, as_arguments(map_tensors(first, lambda tensor: tensor[:2]))
        return None, as_arguments(example_inputs(Task.of(data), 2))
    if text is None and source_file_of(model) is not None:
        own = model.example_input_array
        text = ",".join(
            "x".join(map(str, x.shape)) + f":{x.dtype}".replace("torch.", "") for x in own
        )
        say(f"the example input is {text}, from the file; to give another one: --input {text}")
        return text, (own, {})
    if text is None:
        text, origin = provided("guess_example")(model, _side())
        unsure = (
            " (sizes that it leaves open are guesses)" if origin.startswith("its first") else ""
        )
        say(f"the example input is {text}, from {origin}{unsure}; to give another: --input {text}")
    args, kwargs = parse_input(text)
    is_fixed = getattr(model, "fixed_batch", 0) == 1
    if not is_fixed and all(tensor.shape[0] == 1 for tensor in (*args, *kwargs.values())):
        args = tuple(map(_doubled, args))
        kwargs = {name: _doubled(tensor) for name, tensor in kwargs.items()}
    return text, (args, kwargs)


def _side() -> int | None:
    """Return the side of the images in this folder, if they are squares of one size."""
    from l0prune.data.image_folder import side_of_images  # loads torch

    with suppress(UsageError):  # several folders of images are none
        folder = image_folder()
        return None if folder is None else side_of_images(folder)
    return None


def with_speed(budget: Any, faster: float | None) -> list[str]:
    """Return a command's budgets as texts, with that of ``--faster``.

    Raises:
        UsageError: time is limited twice.
    """
    given = [budget] if isinstance(budget, str) else list(budget or ())
    if faster is None:
        return given
    if any(name in text for text in given for name in ("latency", "speed")):
        raise UsageError("--faster is a budget in time: leave out the other one")
    return [*given, f"speed={faster:g}"]


def latency_table(given: Path | None, path: Path, budget: Any, model: Any, target: str) -> Any:
    """Return the latency table that is given, or that a budget needs; else None.

    Raises:
        FileError: the table that is given cannot be read.
        UsageError: the target cannot be timed here.
    """
    from l0prune.plan.limits import limits  # loads torch, as does the next one
    from l0prune.plan.measures import Latency

    is_asked = budget and any(limit.measure == Latency.name for limit in limits(budget))
    if given is None and not is_asked:
        return None
    return provided("table_of_files")(given, path, model, target)


def free_dims(given: list[str] | None, model: Any) -> dict[str, dict[int, str]] | None:
    """Convert ``--dynamic`` to torch.export's format; by default the free dims of the model's file.

    Raises:
        UsageError: a value is not of the form input:dim=name.
    """
    found: dict[str, dict[int, str]] = {}
    for text in given or ():
        match = re.fullmatch(r"(\w+):(\d+)=(\w+)", text)
        if match is None:
            raise UsageError(f"--dynamic takes input:dim=name, like input_ids:1=seq, not {text!r}")
        found.setdefault(match[1], {})[int(match[2])] = match[3]
    return found or getattr(model, "free", None) or None


def _doubled(tensor: Any) -> Any:
    return tensor.repeat(2, *[1] * (tensor.ndim - 1))


def recorded_data(
    given: str | None,
    root: Path | None,
    info: dict[str, Any],
    path: Path,
    trust_pickle: bool,
    missing: str | None = NO_DATA,
) -> tuple[str | None, Path | None]:
    """Return data and root: as given, else of the file, else of the project, else images here.

    Raises:
        FileError: the file names code or a root folder, without consent.
        UsageError: no data is named, and there is no single folder of images, unless ``missing``,
            the message, is None.
    """
    asked = {name: str(info[name]) for name in ("data", "data_root") if info.get(name) is not None}
    if given is None and "data" in asked and not trust_pickle:
        check_consent(asked["data"], path)
    if root is None and "data_root" in asked and not trust_pickle:
        check_root_consent(asked["data_root"], path)
    spec, folder = chosen(given, "data", asked), chosen(root, "data_root", asked)
    if spec is None:
        with nullcontext() if missing else suppress(UsageError):
            spec = _images_here(info)
    else:
        spec = _with_size(str(spec), _image_size(info))
    if spec is None and missing:
        raise UsageError(missing)
    return None if spec is None else str(spec), None if folder is None else Path(folder)


def _with_size(spec: str, size: str | None) -> str:
    """Return the spec; if of an image folder without a size, with this one, and a message."""
    kind, _, rest = spec.partition(":")
    if kind != "imagefolder" or not (rest and size):
        return spec
    from l0prune.data.image_folder import SPEC  # loads torch

    found = SPEC.fullmatch(rest)
    if found is None or found[3] is not None:
        return spec
    say(f"images get the size that the model takes: --data {spec}:{size}")
    return f"{spec}:{size}"


def _images_here(info: dict[str, Any]) -> str | None:
    """Return the spec of the images in this folder in the model's input size, with a message.

    None if there are none, or if by its file the model does not take square images.
    """
    size = _image_size(info)
    if size is None or (folder := image_folder()) is None:
        return None
    from l0prune.data.image_folder import side_of_images  # loads torch

    side = side_of_images(folder)
    size = size or str(side or 224)
    spec = f"imagefolder:{folder}:{size}"
    say(f"no data is named, so it is the images here: --data {spec}")
    grey, _, wanted = size.rpartition("x")
    if side not in (None, int(wanted)):
        say(
            f"the images here are {side}x{side} and each is resized to {wanted}x{wanted}, the size "
            f"of the model's input; for theirs: l0prune gate --input 1x{grey or 3}x{side}x{side}"
        )
    return spec


def _image_size(info: dict[str, Any]) -> str | None:
    """Return the size of a model's images as in ``imagefolder:DIR:1x28``.

    Empty if the file does not say it, None if the model does not take square images.
    """
    known = info.get("preprocessing")
    sizes = known.get("input_size") if isinstance(known, dict) else None
    text = info.get("input") if sizes is None else "x".join(map(str, (1, *sizes)))
    if text is None:
        return ""
    takes = re.fullmatch(r"\d+x([13])x(\d+)x\2", str(text))
    return None if takes is None else f"{'1x' if takes[1] == '1' else ''}{takes[2]}"


def recorded_tokenizer(
    given: str | None, info: dict[str, Any], path: Path, trust_pickle: bool
) -> str | None:
    """Return the name of the tokenizer: as given, else of the file, else of the project.

    Raises:
        FileError: the file names a tokenizer that has to be downloaded, without consent.
    """
    name = info.get("tokenizer")
    if given is None and name is not None and not trust_pickle and not Path(str(name)).exists():
        check_consent(f"transformers:{name}", path)
    found = chosen(given, "tokenizer", {} if name is None else {"tokenizer": str(name)})
    return None if found is None else str(found)


def load_data(
    spec: str | None,
    root: Path | None,
    model: Any = None,
    tokenizer: str | None = None,
    *,
    labelled: bool = True,
) -> Any:
    """Load the data source of this name, as ``l0prune.load_data``, and print its size.

    None if none is named. The tokenizer may be found by the model.

    Raises:
        DataError: the source has inputs alone although labels are needed.
    """
    if spec is None:
        return None
    source: Any = l0prune.load_data(spec, root, tokenizer=tokenizer or model, model=model)
    if tokenizer:
        remember(f"transformers:{tokenizer}")
    if not hasattr(source, "train"):  # a tensor, a mapping or batches of some
        if labelled:
            raise DataError(
                f"{spec} has inputs without labels. `l0prune shrink` takes these, and "
                "`l0prune finetune --learn gates`; in Python l0prune.with_pseudo_labels(inputs, "
                "model) makes the model's own answers the targets, and in a recipe answers = true"
            )
        _say_of_inputs(spec, source)
        return source
    parts = [f"{len(part):,} {name} examples" for name, part in _sized(source).items()]
    classes = [f"{source.classes} classes"] if getattr(source, "classes", 0) else []
    images = [] if source.preprocessing is None else [str(source.preprocessing)]
    windows = [f"windows of {source.train.inputs.shape[1]} tokens"] if _is_text(spec) else []
    if known := [*parts, *classes, *images, *windows]:
        say(f"{spec}: {', '.join(known)}")
    return source


def _is_text(spec: str) -> bool:
    from l0prune.data.text import source_of  # loads torch

    return source_of(spec) is not None


def say_of_lengths(model: Any, example: Any) -> None:
    """Print how files take sequences of any length, if the model is given whole numbers by row."""
    from l0prune.capture.sizes import named_inputs  # loads torch

    found = named_inputs(model, example) or {}
    rows = [
        n for n, x in found.items() if x.ndim == 2 and not (x.is_floating_point() or x.is_complex())
    ]
    if rows:
        free = " ".join(f"--dynamic {name}:1=length" for name in rows)
        length = found[rows[0]].shape[1]
        say(
            f"files will take sequences of {length} alone, or of any length with {free} (in a "
            "recipe gate.dynamic)"
        )


def _say_of_inputs(spec: str, inputs: Any) -> None:
    """Print how many inputs without labels there are and their form, if these are a known kind."""
    kind, _, rest = spec.partition(":")
    if kind == "imagefolder":
        from l0prune.data.image_folder import described  # loads torch

        say(f"{spec}: {len(inputs):,} images without labels, {described(rest)[1]}")
    elif _is_text(spec):
        number, length = inputs["input_ids"].shape
        is_padded = "attention_mask" in inputs
        say(
            f"{spec}: {number:,} texts, one a line, "
            + (
                f"padded to {length} tokens, with a mask"
                if is_padded
                else f"all of {length} tokens"
            )
        )


def _sized(source: Any) -> dict[str, Any]:
    """Return the parts of a data source whose number of examples is known."""
    parts = {"training": source.train, "test": source.test}
    return {name: part for name, part in parts.items() if hasattr(part, "batches")}


def preprocessing_in(info: dict[str, Any], path: Path) -> Any:
    """Return the preprocessing of images that a model file records, if any.

    Raises:
        FileError: the record is damaged.
    """
    from pydantic import ValidationError

    from l0prune.data.preprocessing import Preprocessing  # loads torch

    found = info.get("preprocessing")
    try:
        return None if found is None else Preprocessing.model_validate(found)
    except ValidationError as error:
        raise FileError(
            f"{path} is damaged: its preprocessing of images cannot be read."
        ) from error


def with_step(
    info: dict[str, Any],
    path: Path | None = None,
    source: Any = None,
    more: Sequence[str] = (),
    table: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the facts of a model file, with this command and the preprocessing of its data.

    Args:
        info: facts in the file that the command was given.
        path: path of that file, which is added to the recorded command if it was found by default.
        source: the data, if any.
        more: arguments that came from elsewhere than the command line.
        table: a latency table that the command used; the table's command is recorded before.
        options: options by name, with values that may have come from elsewhere; None for those
            without a value.
    """
    from l0prune.running.environment import command  # loads torch

    typed = [*sys.argv, *more]
    for name, value in options.items():
        is_there = any(each == str(value) or each.endswith(f"={value}") for each in typed)
        if value is not None and not is_there:
            typed += [f"--{name.replace('_', '-')}", str(value)]
    if path is not None and str(path) not in typed:
        typed.append(str(path))
    measured = [table.command] if table is not None and table.command else []
    found = {**info, "commands": [*info.get("commands", ()), *measured, command(typed)]}
    if source is not None:
        known = getattr(source, "preprocessing", None)
        found["preprocessing"] = None if known is None else known.model_dump()
    return found


def with_commands(report: l0prune.Report, info: dict[str, Any]) -> l0prune.Report:
    """Return the report with the commands recorded in its model file; the last is the run's."""
    *before, last = info["commands"]
    repeat = report.content.repeat.model_copy(update={"commands": before, "command": last})
    return l0prune.Report(report.content.model_copy(update={"repeat": repeat}))
