"""``l0prune export``: cut closed slots, certify the result, write the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Group

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, err, say
from l0prune.cli.more import Extras
from l0prune.cli.opening import (
    LATENCY,
    load_data,
    preprocessing_in,
    recorded_data,
    recorded_tokenizer,
    with_commands,
    with_step,
)
from l0prune.cli.project import newest, output_path
from l0prune.doors import behind, no_such, provided
from l0prune.errors import FileError, UsageError
from l0prune.progress.display import shown

if TYPE_CHECKING:
    from l0prune.files.source_file import SourceFile

ONNX, PT2, PTE, TFLITE, STATE = ENDINGS = (".onnx", ".pt2", ".pte", ".tflite", ".state.pt")

File = Annotated[
    Path | None,
    typer.Argument(
        help="A gated model; default: the newest *.tuned.pt, *.fit.pt or *.gated.pt here."
    ),
]
Onnx = Annotated[bool, typer.Option("--onnx", help="Write MODEL.onnx (the default).")]
Pt2 = Annotated[bool, typer.Option("--pt2", help="Write MODEL.pt2, an exported program.")]
Pte = Annotated[bool, typer.Option("--pte", help="Write MODEL.pte, a program for ExecuTorch.")]
Tflite = Annotated[bool, typer.Option("--tflite", help="Write MODEL.tflite, a program for LiteRT.")]
State = Annotated[
    bool, typer.Option("--state", help="Write MODEL.state.pt: a state_dict and its shapes.")
]
Code = Annotated[
    bool, typer.Option("--code", help="With --pretrained: a file that loads it without l0prune.")
]
Opset = Annotated[
    int | None, typer.Option(help="Opset of the ONNX file; default: that of torch's exporter.")
]
ExternalData = Annotated[
    bool,
    typer.Option("--external-data", help="Write the weights into a file beside the ONNX file."),
]
Timed = Annotated[
    bool, typer.Option("--time/--no-time", help="Time the ONNX file beside the dense network's.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads that a call may use when timed.")]


Verified = Annotated[
    Literal["float64", "float32"],
    typer.Option(help="float32 takes less time, and detects faults of 1e-5 and more."),
]
Out = Annotated[
    Path | None, typer.Option(help="Path of the files, or a folder; default: MODEL here.")
]


def export(
    file: File = None,
    onnx: Onnx = False,
    pt2: Pt2 = False,
    pte: Pte = False,
    tflite: Tflite = False,
    state: State = False,
    pretrained: options.Pretrained = None,
    code: Code = False,
    vllm: options.Vllm = None,
    write: options.Written = None,
    opset: Opset = None,
    external_data: ExternalData = False,
    extras: Extras = (),
    data: options.DataSpec = None,
    data_root: options.DataRoot = None,
    tokenizer: options.Tokenizer = None,
    timed: Timed = True,
    threads: Threads = 1,
    verify: Verified = "float64",
    out: Out = None,
    report: options.WithReport = True,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Slice the closed gates away and write a smaller model with its certificate.

    If the gated model, the sliced one and the ONNX file differ, nothing is written.

    Examples:
        l0prune export --out small
        l0prune export model.tuned.pt --onnx --pt2 --verify float32
        l0prune export --onnx --pretrained small
    """
    if code and not pretrained:
        raise UsageError("--code writes a file into a folder: name that with --pretrained DIR.")
    check_writers(write)
    path = file or newest("*.tuned.pt", "*.fit.pt", "*.gated.pt", command="l0prune gate MODEL")
    model = l0prune.load(path, trust_pickle=trust_pickle)
    info = l0prune.read_info(path)
    endings = [PT2] * pt2 + [PTE] * pte + [TFLITE] * tflite
    words = recorded_tokenizer(tokenizer, info, path, trust_pickle)
    named = partial(recorded_data, data, data_root, info, path, trust_pickle)
    examples = partial(_examples, named=named, model=model, tokenizer=words)
    asked = [more for extra in extras if (more := extra(examples)) is not None]
    of_onnx: dict[str, Any] = {k: v for more in asked for k, v in more.onnx.items()}
    onnx = onnx or bool(of_onnx) or not any((endings, state, pretrained, vllm, write))
    built_by = _builder(info, path, trust_pickle)
    say(f"exporting {path}{_unlearned(info, path)}")
    with shown(console=err):
        small = l0prune.export(model, verify=verify)
    small.preprocessing, stem = preprocessing_in(info, path), _stem(out, path, small.source)
    of_onnx |= {"opset": opset, "external_data": external_data, "threads": threads, "time": timed}
    with shown(console=err):
        files = [*small.save_onnx(f"{stem}{ONNX}", **of_onnx)] if onnx else []
        # ONNX files of parts lack the code between the parts.
        for ending in endings + [STATE] * (state or small.in_parts):
            files += small.save(f"{stem}{ending}", model=built_by)
        loads = folders(small, pretrained, vllm, built_by, code=code)
        files += [file for each in write or () for file in small.save(each)]
        further = [more.finish(small, stem) for more in reversed(asked) if more.finish is not None]
        files += [file for each in further for file in each.files]
    files += [each for each in (pretrained, vllm) if each]
    result = {"files": [str(f) for f in files], **small.to_dict()}
    result |= {"loads": loads} if loads else {}
    for each in further:
        result |= each.result
    if report:
        result["page"] = _write_report(small, model, info, path, stem)
    emit(result, json, Group(small, *(each.shown for each in further if each.shown is not None)))
    say_written(files, loads, json)


def _unlearned(info: dict[str, Any], path: Path) -> str:
    """Return a clause on a file whose gates no command has trained, and the way on; else empty."""
    commands = info.get("commands") or [""]
    if not str(commands[-1]).startswith("l0prune gate "):
        return ""
    from l0prune.training.checkpoint import NAME  # loads torch

    folder = output_path(None, str(path), ".run")
    said = ", whose gates have not learned: it is as `l0prune gate` wrote it"
    if not (folder / NAME).exists():
        return f"{said}; `l0prune finetune` trains it"
    return (
        f"{said}. The run in {folder} is not finished or its result was moved: the same `l0prune "
        "finetune` command goes on from its checkpoint, and export takes the .tuned.pt that it "
        "writes in the end"
    )


def check_writers(files: Iterable[Path] | None) -> None:
    """Raise UsageError for a file of whose suffix there is no writer."""
    known = [suffix for suffix, _ in behind("writers")]
    for file in files or ():
        if file.suffix not in known:
            raise no_such("format", file.suffix, known)


def say_written(files: Iterable[Path], loads: str, json: bool) -> None:
    """Print the written files, their inputs and how to load them, unless the output is JSON."""
    if not json:
        written = list(map(str, files))
        taken = next((takes(file) for file in written if file.endswith(ONNX)), "")
        say("\n".join(filter(None, ("written: " + ", ".join(written), taken, loads))))


def takes(path: str) -> str:
    """Return a sentence on an ONNX file's opset and inputs, with the names of free sizes."""
    import onnx  # loads slowly

    model = onnx.load(path, load_external_data=False)
    inputs = [
        f"{each.name} ({', '.join(dim.dim_param or str(dim.dim_value) for dim in shape)})"
        for each in model.graph.input
        for shape in [each.type.tensor_type.shape.dim]
    ]
    opset = next(each.version for each in model.opset_import if not each.domain)
    return f"{path}, of opset {opset}, takes {', '.join(inputs)}"


def folders(
    small: l0prune.Export, pretrained: Path | None, vllm: Path | None, spec: str, code: bool = False
) -> str:
    """Write the requested folders, and return texts on how to load them."""
    said = [small.save_pretrained(pretrained, model=spec, code=code)] if pretrained else []
    said += [small.save_vllm(vllm)] if vllm else []
    return "\n".join(said)


def _examples(
    option: str,
    *,
    labelled: bool = True,
    named: Callable[..., tuple[str | None, Path | None]],
    model: Any,
    tokenizer: str | None,
) -> Any:
    """Load the data source whose examples an option needs."""
    missing = (
        f"{option} needs examples: give --data mnist, imagefolder:DIR, FILE.txt or file.py:function"
    )
    return load_data(*named(missing), model, tokenizer, labelled=labelled)


def _write_report(
    small: l0prune.Export, model: Any, info: dict[str, Any], path: Path, stem: Path
) -> str:
    """Write the report into the folder of the model's run, or without one beside the files."""
    from l0prune.report.collect import add_trainings
    from l0prune.report.content import Fit
    from l0prune.report.report import trainings_in

    folder, times = output_path(None, str(path), ".run"), output_path(None, str(path), LATENCY)
    content = l0prune.Report.of(small).content
    if (fit := info.get("fitted")) is not None:
        content = content.model_copy(update={"fit": Fit.model_validate(fit)})
    if folder.is_dir():
        content = add_trainings(content, trainings_in(folder))
    if times.exists():
        content = provided("add_time")(content, l0prune.LatencyTable.load(times), model)
    target = folder / "report.html" if folder.is_dir() else Path(f"{stem}.report.html")
    report = with_commands(l0prune.Report(content), with_step(info, path))
    page = str(report.titled(path.name).save(target)[0])
    say(f"the report is {page}")
    return page


def _builder(info: dict[str, Any], path: Path, trust_pickle: bool) -> str:
    """Return the spec that built the file's model, if its code may be run; else empty."""
    from l0prune.files.consent import check_consent

    spec = str(info.get("model") or "")
    try:
        if not trust_pickle:
            check_consent(spec, path)
    except FileError:
        return ""
    return spec


def _stem(out: Path | None, path: Path, source: SourceFile | None) -> Path:
    """Return the path of the files without their endings: ``model`` for ``model.onnx``.

    It is ``model.small`` if the network was read from ``model.onnx`` itself.
    """
    own = output_path(None, str(path), "")
    if source is not None and Path(source.file).resolve() == Path(f"{own}{ONNX}").resolve():
        own = Path(f"{own}.small")
    if out is None:
        return own
    ending = next((each for each in ENDINGS if out.name.endswith(each)), "")
    stem = out.with_name(out.name.removesuffix(ending)) if ending else out
    return stem / own.name if stem.is_dir() else stem
