"""``l0prune measure``: time a gated model at many widths, and write a latency table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

import l0prune
from l0prune.cli import options
from l0prune.cli.messages import emit, err, say, shown
from l0prune.cli.opening import LATENCY, with_step
from l0prune.cli.project import newest, output_path
from l0prune.errors import FileError, UsageError
from l0prune.files.atomic import check_writable
from l0prune.plan.targets import TARGET

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
        from l0prune.timing.measure import read_results, table_of

        table = table_of(l0prune.gates(model).plan, read_results(results))
    else:
        table = timed(model, target, threads, batch, runtime, provider, samples or "auto", seed)
    (called,) = with_step({}, path)["commands"]
    table = replace(table, command=called)
    table.save(target)
    facts = {name: value for name, value in table.to_dict().items() if name in _SHOWN}
    emit({"file": str(target), **facts}, json, f"{target} written; {table}")
    if table.warning:
        say(f"warning: {table.warning}")


_IN_BUNDLE = 48  # networks, as nothing tells there how well they predict
_SHOWN = ("setting", "dense", "quality")


def _write_bundle(
    model: Any, folder: Path, batch: int, samples: int, seed: int, runtime: str, json: bool
) -> None:
    from l0prune.timing.onnx_files import Job, OnnxRuntime
    from l0prune.timing.runtimes import runtime_of

    with shown(err):
        chosen = runtime_of(runtime)
        assert isinstance(chosen, OnnxRuntime)
        chosen.write(Job(model, folder, 1, batch, samples, seed))
    how = f"copy {folder} to the device, run `python run.py --threads 1` in it, and bring back "
    then = "results.json for --from"
    emit({"folder": str(folder)}, json, f"{folder} written: {how}{then}")


def latency_table(given: Path | None, path: Path, budget: Any, model: Any, target: str) -> Any:
    """Return the given latency table, or that beside the model, timed if need be for a budget.

    One that ``l0prune measure`` wrote counts wherever it was made; one that was made here for an
    earlier budget has to be of this machine and of the runtime's present version.

    Raises:
        FileError: the table that is given cannot be read.
        UsageError: the target cannot be timed here.
    """
    if given is not None:
        return l0prune.LatencyTable.load(given)
    from l0prune.plan.limits import limits  # loads torch
    from l0prune.plan.measures import Latency

    if not budget or all(limit.measure != Latency.name for limit in limits(budget)):
        return None
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
    with shown(err), _progress() as progress:
        table = l0prune.measure(
            model,  # type: ignore[arg-type]
            threads,
            batch,
            runtime,
            provider,
            samples=samples,
            seed=seed,
            folder=folder,
            progress=progress,
        )
    results.replace(kept)
    shutil.rmtree(folder)
    return table


_KNOWN = 0.01  # seconds: a network found in earlier results takes less, a timed one more


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show the number of timed networks and the remaining time: live, or in a few lines."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    left = TextColumn("{task.fields[left]}")
    with Progress(*columns, left, console=err, transient=True) as bar:
        task = bar.add_task("timing networks", total=None, left="")
        began, known = time.monotonic(), 0

        def show(done: int, of: int) -> None:
            nonlocal began, known
            now = time.monotonic()
            if done == 1 or (known == done - 1 and now - began < _KNOWN):
                began, known = now, done
            seconds = round((of - done) * (now - began) / max(1, done - known))
            left = f"{timedelta(seconds=seconds)} left" if known < done < of else ""
            bar.update(task, completed=done, total=of, left=left)
            if not err.is_terminal and done % max(1, of // 4) == 0:
                say(", ".join(filter(None, (f"{done} of {of} networks timed", left))))

        yield show
