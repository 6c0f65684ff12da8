"""``l0prune measure``: time a gated model at many widths, and write a latency table."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, err, say
from l0prune.cli.opening import LATENCY, with_step
from l0prune.cli.project import newest, output_path
from l0prune.errors import FileError, UsageError, warn
from l0prune.files.atomic import check_writable
from l0prune.plan.targets import TARGET
from l0prune.progress.display import shown

Threads = Annotated[int, typer.Option(help="Threads of the CPU that one call may use.")]
Batch = Annotated[int, typer.Option(help="Examples in one call.")]
Runtime = Annotated[
    str,
    typer.Option(
        help="Runtime: onnxruntime, onnxruntime-int8, openvino, openvino-int8, "
        "executorch, litert; for PyTorch eager, compile, cuda-graph or torch-cuda-bf16."
    ),
]
Provider = Annotated[
    str | None,
    typer.Option(
        help="ONNX Runtime's provider, such as CUDAExecutionProvider, or PyTorch's device, "
        "such as cuda [the CPU]."
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        help="Number of networks that are timed [as many as predict others within 5 %, up to 32].",
        show_default=False,
    ),
]
Bundle = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write a folder to copy to the device that will serve the network, "
        "and to run there (run.py needs numpy and onnxruntime only).",
    ),
]
Results = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Times that run.py of a bundle wrote on a device."),
]
Out = Annotated[Path | None, typer.Option(help="File to write; default MODEL.latency.json.")]


def measure(
    file: options.GatedFile = None,
    threads: Threads = 1,
    batch: Batch = 1,
    runtime: Runtime = "onnxruntime",
    provider: Provider = None,
    samples: Samples = None,
    seed: options.Seed = 0,
    bundle: Bundle = None,
    results: Results = None,
    out: Out = None,
    trust_pickle: options.TrustPickle = False,
    json: options.Json = False,
) -> None:
    """Time the model at many widths, and write a latency table that predicts its time at any.

    A budget can then be in milliseconds. The same command resumes a stopped measurement, and more
    --samples add to those that are timed (in MODEL.latency.times.json). For another device:
    --bundle DIR here, `python DIR/run.py` there, --from results.json here.

    Examples:
        l0prune measure model.gated.pt --threads 4 --batch 1
        l0prune measure --runtime compile --provider cuda
        l0prune measure --bundle device
    """
    if bundle and results:
        raise UsageError("--bundle writes what is to be timed, --from reads what was: give one")
    if bundle and bundle.exists() and not bundle.is_dir():
        raise UsageError(f"--bundle names a folder to write, and {bundle} is a file")
    if bundle and (not runtime.startswith("onnxruntime") or provider):
        raise UsageError(
            "a bundle is for ONNX Runtime; which provider is said there (run.py --provider NAME)"
        )
    path = file or newest("*.gated.pt", command="l0prune gate MODEL")
    model = l0prune.load(path, trust_pickle=trust_pickle)
    if bundle:
        _write_bundle(model, bundle, batch, samples or _IN_BUNDLE, seed, runtime, json)
        return
    target = output_path(out, str(path), LATENCY)
    check_writable(target)
    if results:
        from l0prune.features.latency.measure import read_results, table_of

        table = table_of(l0prune.gates(model).plan, read_results(results))
        if table.warning:
            warn(table.warning)
    else:
        table = timed(model, target, threads, batch, runtime, provider, samples or "auto", seed)
    (called,) = with_step({}, path)["commands"]
    table = replace(table, command=called)
    table.save(target)
    facts = {name: value for name, value in table.to_dict().items() if name in _SHOWN}
    emit({"file": str(target), **facts}, json, f"{target} written; {table}")


_IN_BUNDLE = 48  # networks, as nothing tells there how well they predict
_SHOWN = ("setting", "dense", "quality")


def _write_bundle(
    model: Any, folder: Path, batch: int, samples: int, seed: int, runtime: str, json: bool
) -> None:
    from l0prune.features.latency.onnx_files import Job, OnnxRuntime
    from l0prune.features.latency.runtimes import runtime_of

    with shown(console=err):
        chosen = runtime_of(runtime)
        assert isinstance(chosen, OnnxRuntime)
        chosen.write(Job(model, folder, 1, batch, samples, seed))
    how = f"copy {folder} to the device, run `python run.py --threads 1` in it, and bring back "
    then = "results.json for --from"
    emit({"folder": str(folder)}, json, f"{folder} written: {how}{then}")


def table_of_files(given: Path | None, path: Path, model: Any, target: str) -> l0prune.LatencyTable:
    """Return the given latency table, or that beside the model, timed if need be.

    One that ``l0prune measure`` wrote counts wherever it was made; one that was made here for an
    earlier budget has to be of this machine and of the runtime's present version.

    Raises:
        FileError: the table that is given cannot be read.
        UsageError: the target cannot be timed here.
    """
    if given is not None:
        return l0prune.LatencyTable.load(given)
    beside = output_path(None, str(path), LATENCY)
    with suppress(FileError, UsageError):  # of another model, or none: it is made anew
        table = l0prune.LatencyTable.load(beside)
        table.of(l0prune.gates(model).plan)
        if table.setting.runtime == target and (table.command or table.is_of_here):
            return table
    table = timed(model, beside, runtime=target)
    table.save(beside)
    say(f"{beside} written: {table}")
    return table


def timed(
    model: object,
    target: Path,
    threads: int = 1,
    batch: int = 1,
    runtime: str = TARGET,
    provider: str | None = None,
    samples: int | str = "auto",
    seed: int = 0,
) -> l0prune.LatencyTable:
    """Measure the table, and keep the timing results beside its file."""
    import shutil

    folder, kept = target.with_name(f"{target.name}.unfinished"), target.with_suffix(".times.json")
    results = folder / "results.json"
    if kept.exists() and not results.exists():
        folder.mkdir(exist_ok=True)
        shutil.copy(kept, results)
    with shown(console=err):
        table = l0prune.measure(
            model,  # type: ignore[arg-type]
            threads,
            batch,
            runtime,
            provider,
            samples=samples,
            seed=seed,
            folder=folder,
        )
    results.replace(kept)
    shutil.rmtree(folder)
    return table
