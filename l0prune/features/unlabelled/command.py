"""``l0prune shrink``: make a network smaller from some of its inputs, without labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.export import Onnx, Timed, check_writers, folders, say_written
from l0prune.cli.messages import emit, err, say
from l0prune.cli.more import Extras
from l0prune.cli.opening import (
    free_dims,
    latency_table,
    load_data,
    open_model,
    recorded_data,
    say_of_lengths,
    with_speed,
)
from l0prune.cli.options import with_settings
from l0prune.cli.project import output_path
from l0prune.errors import L0pruneError, UsageError
from l0prune.files.atomic import check_writable
from l0prune.plan.targets import TARGET
from l0prune.progress.display import shown

Budget = Annotated[
    list[str] | None,
    typer.Option(help="What the network may cost: macs=0.5, params=0.3, latency=12ms, …"),
]
Tolerance = Annotated[
    str | None,
    typer.Option(
        help="Instead of a budget: find the smallest network whose outputs stay this close on "
        "held-out inputs, such as 1%."
    ),
]
Spared = Annotated[
    str | None,
    typer.Option("--measure", help="What --tolerance spares: latency, or macs. [latency]"),
]
Recover = Annotated[
    int, typer.Option(min=0, help="Epochs of training on the original's answers after the cut.")
]
ClassDim = Annotated[
    int | None,
    typer.Option(help="Dim of the outputs that holds the class scores, such as -1."),
]
Worse = Annotated[
    bool,
    typer.Option(
        "--allow-worse-than-mean",
        help="Write a network even if the mean of the outputs would predict them better.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say how much memory and time each step would take, and do none of them."
    ),
]
Out = Annotated[Path | None, typer.Option(help="File to write; default MODEL.small.onnx.")]


@with_settings("round_to", "target")
def shrink(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    weights: options.Weights = None,
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    budget: Budget = None,
    faster: options.Faster = None,
    tolerance: Tolerance = None,
    measure: Spared = None,
    recover: Recover = 0,
    *,
    settings: dict[str, Any],
    samples: options.Samples = 512,
    batch_size: options.Batch = 64,
    exclude: options.Exclude = None,
    uniform: options.Uniform = False,
    loadable_by: options.LoadableBy = None,
    outputs: options.Outputs = None,
    dynamic: options.Dynamic = None,
    seed: options.Seed = 0,
    class_dim: ClassDim = None,
    allow_worse_than_mean: Worse = False,
    onnx: Onnx = False,
    out: Out = None,
    pretrained: options.Pretrained = None,
    vllm: options.Vllm = None,
    write: options.Written = None,
    timed: Timed = True,
    extras: Extras = (),
    trust_pickle: options.TrustPickle = False,
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Make a model smaller with some inputs alone: no labels, no training, minutes.

    The budget is divided over the layers, slots are cut, and the remaining weights compensate for
    the removed ones. The ONNX file is proven to compute what the cut model does; its difference
    from the original is measured on held-out inputs. --pretrained and --vllm write a folder
    instead, --gguf a file for llama.cpp; with --onnx both are written.

    Examples:
        l0prune shrink model.pt --budget macs=0.5
        l0prune shrink model.pt --data imagefolder:DIR --tolerance 1% --int8
        l0prune shrink transformers:DIR --data a.txt --budget params=0.8
    """
    budget = with_speed(budget, faster)
    if bool(budget) == (tolerance is not None):
        raise UsageError("give --faster 2, --budget macs=0.5, or --tolerance 1% in its place")
    check_writers(write)
    spec, module = open_model(model, model_option, weights, trust_pickle)
    named = recorded_data(data, data_root, {}, Path(spec), trust_pickle)
    source = load_data(*named, module, tokenizer, labelled=False)
    asked: dict[str, Any] = {"uniform": uniform, "loadable_by": loadable_by}
    asked |= {"exclude": exclude} if exclude else {}
    asked |= {"outputs": outputs} if outputs else {}
    more = [found for extra in extras if (found := extra(lambda *_, **__: source)) is not None]
    of_onnx = {name: value for found in more for name, value in found.onnx.items()}
    target = settings.get("target", TARGET)
    asked["dynamic_shapes"] = shapes = free_dims(dynamic, module)
    if shapes is None and isinstance(source, Mapping):
        say_of_lengths(module, ((), source))
    timed_by = budget or [f"{measure or 'latency'}=1"]
    common: dict[str, Any] = {"tolerance": tolerance, "measure": measure, "samples": samples}
    common |= {"batch_size": batch_size, "seed": seed, "class_dim": class_dim}
    if dry_run:
        from l0prune.features.unlabelled.forecast import foresee

        with shown(console=err):
            found = foresee(module, source, budget or None, **common, **asked)
        emit(found.to_dict(), json, str(found))
        return
    is_onnx = onnx or out or of_onnx or not (pretrained or vllm or write)
    file = _checked_path(out, spec, module) if is_onnx else None
    with shown(console=err):
        small = l0prune.shrink(
            module,
            source,
            budget or None,
            **common,
            recover=recover,
            latency=lambda gated: latency_table(None, Path(spec), timed_by, gated, target),
            allow_worse_than_mean=allow_worse_than_mean,
            **settings,
            **asked,
        )
        files = tuple(each for each in (pretrained, vllm) if each)
        loads = folders(small, pretrained, vllm, spec)
        files += tuple(file for each in write or () for file in small.save(each))
        if file is not None:
            files += _written(small, file, timed, of_onnx)
    result = {"files": [str(each) for each in files], **small.to_dict()}
    emit(result | ({"loads": loads} if loads else {}), json, small)
    say_written(files, loads, json)
    if tolerance is not None and not recover and not json:
        say("Cut further, a network may learn its way back within the tolerance: --recover 8")


def _checked_path(out: Path | None, spec: str, module: Any) -> Path:
    """Return the path of the ONNX file.

    Raises:
        FileError: it cannot be written.
        UsageError: it is that of the file that the network was made from.
    """
    from l0prune.exporting.onnx.writing import check_apart  # loads torch, as does the next one
    from l0prune.files.source_file import source_file_of

    own = output_path(None, spec, ".small.onnx")
    file = own if out is None else out / own.name if out.is_dir() else out
    check_apart(file, source_file_of(module))
    check_writable(file)
    return file


def _written(
    small: l0prune.Export, file: Path, timed: bool, of_onnx: Mapping[str, Any]
) -> tuple[Path, ...]:
    """Write the ONNX files; if one that was asked for besides cannot be, write the plain one."""
    try:
        return small.save_onnx(file, time=timed, **of_onnx)
    except L0pruneError:
        if of_onnx:  # minutes have gone into what can be written without
            plain = ", ".join(map(str, small.save_onnx(file, time=timed)))
            say(f"written without what was asked besides: {plain}")
        raise
