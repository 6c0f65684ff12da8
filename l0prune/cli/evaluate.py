"""``l0prune evaluate``: loss and metric of any model on the test data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, say
from l0prune.cli.opening import (
    load_data,
    open_model,
    preprocessing_in,
    recorded_data,
    recorded_tokenizer,
)
from l0prune.cli.options import with_settings
from l0prune.errors import DataError, UsageError

Against = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.onnx",
        help="Compare an ONNX file with another one, such as int8 with float32.",
        show_default=False,
    ),
]


@with_settings("loss", "metric", "device", "autocast")
def evaluate(
    file: Annotated[
        str | None,
        typer.Argument(
            help="MODEL.onnx, .pt2, a gated or tuned .pt, a state or .safetensors, a folder of "
            "export --pretrained, a pickled module, or a network by name.",
            show_default=False,
        ),
    ] = None,
    model_option: options.ModelOption = None,
    weights: options.Weights = None,
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    *,
    settings: dict[str, Any],
    against: Against = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**20,
            help="Examples at a time [100; of text 4,096 tokens].",
        ),
    ] = None,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Test a model: its loss and metric over all test examples.

    It takes whatever l0prune reads or writes. An ONNX file runs in ONNX Runtime on the CPU.

    Examples:
        l0prune evaluate model.onnx --data imagefolder:DIR
        l0prune evaluate model.int8.onnx --against model.onnx --data mnist
        l0prune evaluate --model net.py:build --weights model.state.pt --data mnist
    """
    if (file is None) == (model_option is None):
        raise UsageError("name one model: a FILE, or --model with --weights")
    from l0prune.exporting.opened import ON_CPU, opened  # loads torch, as do the next ones
    from l0prune.running.batches import usual_batch_size
    from l0prune.running.evaluate import evaluate_task
    from l0prune.running.task import Task

    runs_on_cpu = Path(file or "").suffix in ON_CPU
    if runs_on_cpu and settings.setdefault("device", "cpu") not in ("auto", "cpu"):
        raise UsageError(f"{file} is evaluated on the CPU: leave out --device")
    if file is not None and weights is None:
        module = opened(file, trust_pickle=trust_pickle)
    else:
        _, module = open_model(file, model_option, weights, trust_pickle)
    info = _info(file, module)
    path = Path(file or str(model_option))
    spec, root = recorded_data(data, data_root, info, path, trust_pickle)
    words = recorded_tokenizer(tokenizer, info, path, trust_pickle)
    source = load_data(spec, root, module, words)
    _compare_with_timm(module, source)
    _compare_preprocessing(preprocessing_in(info, path), source, path)
    with _outputs_counted(module, getattr(source, "classes", 0), path):
        task = Task.of(source, settings.pop("loss", None), settings.pop("metric", None))
        size = usual_batch_size(task.test) if batch_size is None else batch_size
        found, examples = evaluate_task(module, task, size, **settings)
    result = {"file": str(path), "data": spec, "examples": examples, **found}
    if against is not None:
        result |= _comparison(path, against, task, size)
    emit(result, json, _table(result))


def _comparison(path: Path, against: Path, task: Any, batch_size: int) -> dict[str, Any]:
    """Return differences and agreement of two ONNX files' outputs on the test data."""
    from l0prune.exporting.onnx.differences import compared_on  # loads torch and onnx
    from l0prune.exporting.opened import ONNX, OnnxFile
    from l0prune.files.pickles import check_exists

    for each in (path, against):
        check_exists(each)
        if each.suffix != ONNX:
            raise UsageError(f"--against compares two ONNX files, and {each} is none")
    errors, agreement = compared_on(task, OnnxFile(against), OnnxFile(path), batch_size)
    differences = {f"{name} from {against.name}": error for name, error in errors.items()}
    same = {f"{name}: same largest score": share for name, share in agreement.items()}
    return {name: value for name, value in (differences | same).items() if value is not None}


def _info(file: str | None, module: Any) -> dict[str, Any]:
    """Return the facts in a model file on its data and preprocessing; empty without a file."""
    from json import loads

    from l0prune.exporting.opened import OnnxFile  # loads torch, as do the next ones
    from l0prune.files.smaller_model import is_smaller_model, read
    from l0prune.files.tensor_file import is_tensor_file, read_texts

    if file is None:
        return {}
    if isinstance(module, OnnxFile):
        try:
            return {"preprocessing": loads(module.facts.get("l0prune.preprocessing", "null"))}
        except (RecursionError, ValueError):
            return {"preprocessing": ""}  # is refused as damaged
    if is_smaller_model(file):
        return {"preprocessing": read(file).manifest.preprocessing}
    is_gated = is_tensor_file(file) and "l0prune" in read_texts(file)
    return l0prune.read_info(file) if is_gated else {}


def say_what_differs(model: Any, source: Any, path: Path) -> None:
    """Warn of inputs and outputs other than the data's, and of preprocessing other than timm's.

    Errors of data that does not fit at all are left to the training.
    """
    from l0prune.capture.model_checks import evaluating, same_draws  # loads torch, as the next ones
    from l0prune.running.batches import call, example_inputs
    from l0prune.running.task import Task

    _compare_with_timm(model, source)
    with suppress(DataError):  # of which the training tells
        _compare_inputs(model, example_inputs(Task.of(source), 2), path)
    if classes := getattr(source, "classes", 0):
        with suppress(Exception), same_draws(model), evaluating(model):
            example = example_inputs(Task.of(source), 1)
            with _outputs_counted(model, classes, path):
                call(model, example)


def _compare_with_timm(model: Any, source: Any) -> None:
    """Warn of images scaled otherwise than for timm's weights.

    A model with another number of classes than these weights was trained on data of its own.
    """
    given, says = source.preprocessing, getattr(model, "pretrained_cfg", None)
    if given is None or not isinstance(says, Mapping):
        return
    classes = getattr(model, "num_classes", None)
    if None not in (classes, says.get("num_classes")) and classes != says["num_classes"]:
        return
    mean, std = ([*says.get(name, ())] for name in ("mean", "std"))
    if mean and (mean, std) != (given.mean, given.std):
        say(
            f"warning: timm's weights of this network expect images normalised with mean {mean} "
            f"and deviation {std} (its pretrained_cfg); the data has {given.mean} and {given.std}. "
            "If the model has these weights, normalise the images so in a file.py:function"
        )


def _compare_inputs(model: Any, inputs: Any, path: Path) -> None:
    """Warn if files will take other inputs than the data's: of other names, or of fixed sizes."""
    from l0prune.capture.compat import pytree  # loads torch, as do the next ones
    from l0prune.capture.sizes import named_inputs
    from l0prune.data.dataset import as_arguments
    from l0prune.gating.attaching import gates_of

    gates = gates_of(model)
    known, given = (named_inputs(model, each) for each in (gates.example, as_arguments(inputs)))
    if known is None or given is None:
        return
    numbers = {id(leaf): number for number, leaf in enumerate(pytree.tree_leaves(gates.example))}
    differ = bool(given.keys() - known.keys()) or any(
        dim and dim not in gates.free.of(numbers[id(value)]) and size != given[name].shape[dim]
        for name, value in known.items()
        if name in given and value.ndim == given[name].ndim
        for dim, size in enumerate(value.shape)
    )
    if differ:
        say(
            f"warning: {path} was gated with {_sizes(known)}, and the data has {_sizes(given)}. "
            "Files will take the former alone, and MACs and times are of that: gate the model with "
            "--data for files that take the latter, and with --dynamic, such as --dynamic "
            "input_ids:1=length, for a size that varies"
        )


def _sizes(inputs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, x.shape))}" for name, x in inputs.items())


def _compare_preprocessing(known: Any, source: Any, path: Path) -> None:
    if None not in (known, source.preprocessing) and known != source.preprocessing:
        say(
            f"warning: {path} was made with other images than these; of it: {known}. Those of the "
            f"data: {source.preprocessing}"
        )


@contextmanager
def _outputs_counted(module: Any, classes: int, path: Path) -> Iterator[None]:
    """Warn after the context if the model has returned more outputs than the data has classes."""
    from l0prune.running.criteria import tensor_output  # loads torch

    seen: list[int] = []

    def look(_: Any, __: Any, outputs: Any) -> None:
        scores = tensor_output(outputs)
        if classes and scores is not None and scores.dim() > 1:
            seen.append(scores.shape[1])

    handle = module.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()
    if seen and seen[0] > classes:
        say(
            f"warning: {path} has {seen[0]:,} outputs and the data {classes:,} classes: class "
            "numbers may mean something else in them. A model for these classes alone has a last "
            "layer of as many outputs"
        )


def _table(result: dict[str, Any]) -> Table:
    from l0prune.training.history import IN_PERCENT  # loads torch

    table = Table("", "value", title=f"{result['file']} on {result['data']}", show_header=False)
    for name, value in result.items():
        if name == "examples":
            table.add_row("test examples", f"{value:,}")
        elif isinstance(value, float):
            is_share = name in IN_PERCENT or " " in name  # a blank: compared outputs
            table.add_row(name, format(value, ".2%" if is_share else ".6g"))
    return table
