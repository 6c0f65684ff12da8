"""Public function ``measure``: time networks of many widths, and fit a latency table."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from l0prune.errors import FileError, UsageError, warn
from l0prune.exporting.onnx import collect
from l0prune.features.latency.facts import FACTS, Group, groups_of, plan_id
from l0prune.features.latency.latency_fit import Samples, fit_model, fit_smooth
from l0prune.features.latency.latency_model import LayoutSizes, Numbers
from l0prune.features.latency.onnx_files import Job
from l0prune.features.latency.runtimes import runtime_of
from l0prune.features.latency.sizes import all_slots, slots_of
from l0prune.features.latency.table import LatencyTable, Quality, Setting
from l0prune.files.atomic import claimed
from l0prune.files.checked_json import parsed, read_json
from l0prune.gating.attaching import gates_of
from l0prune.plan.numbers import NETWORKS, SEEDS, THREADS, check_whole
from l0prune.plan.plan import Plan
from l0prune.progress.display import displayed
from l0prune.progress.stages import stage

_FOLDS = 4  # sets of samples, of which each is predicted from the others
_BLOCK = 16  # block of the widths that the smooth model is fitted to
_BAND = 1.2  # factor by which the sum of node times may stray from its typical multiple
AUTO = "auto"  # as many samples as predict well, or there is time for
FEWEST, STEP, SAMPLES = 12, 4, 32  # samples: at least, then so many more at a time, at most
_GOOD = 0.05  # median error of the prediction that is small enough
_SECONDS, _RUNS, _LONGEST = 5, 300, 40  # seconds for samples: some, runs of the dense one, at most
Progress = Callable[[int, int], None]


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the results that ``run.py`` of a bundle wrote."""
    again = "run run.py of the bundle again (it goes on where it was), and copy the whole file"
    results = read_json(path, f"{again[:1].upper()}{again[1:]}.")
    if not isinstance(results, dict) or results.get("format") != collect.FORMAT:
        raise FileError(f"{path} holds no results of this version of l0prune; {again}")
    if results.get("digest") != collect.digest(results):
        raise FileError(
            f"{path} was changed after it was written: its checksum is another; {again}"
        )
    missing = len(set(results["about"]["samples"]) - set(results["samples"]))
    if missing:
        raise FileError(f"{path} lacks {missing} of its networks; {again}")
    return results


def table_of(plan: Plan, results: Mapping[str, Any]) -> LatencyTable:
    """Build the latency table of the network with this plan from timing results."""
    try:
        return _table(plan, results)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(
            f"these results make no sense ({type(error).__name__}: {error}): time the networks "
            "again"
        ) from error


def _table(plan: Plan, results: Mapping[str, Any]) -> LatencyTable:
    about = results["about"]
    if about["plan"] != plan_id(plan):
        raise UsageError(
            "these results are of another model, or of the same with other gates: give the gated "
            "file that the bundle was made from"
        )
    timed = [results["samples"][name] for name in about["samples"]]
    _check(timed)
    dense, groups, samples, sizes_of = _samples(plan, about, timed)
    model = fit_model(groups, samples)
    most = sizes_of(all_slots(plan))
    blocks = np.minimum(np.ceil(samples.sizes / _BLOCK) * _BLOCK, most)
    return LatencyTable(
        setting=_setting(results),
        plan=plan_id(plan),
        dense=dense,
        groups=groups,
        model=model,
        smooth=fit_smooth(model, groups, blocks, most, dense),
        quality=_quality(groups, samples, timed),
        samples=tuple(
            (tuple(w), float(ms)) for w, ms in zip(about["widths"], samples.whole, strict=True)
        ),
    )


def _samples(
    plan: Plan, about: Mapping[str, Any], timed: Sequence[Mapping[str, Any]]
) -> tuple[float, tuple[Group, ...], Samples, LayoutSizes]:
    """Return milliseconds of the dense network, and groups, their times and sizes of layouts."""
    dense = float(np.median([collect.typical(each["dense"]) for each in timed]))
    whole = dense * np.array([collect.share(each["own"], each["dense"]) for each in timed])
    nodes = [
        {node: ms * float(factor) for node, ms in each["nodes"].items()}
        for each, factor in zip(timed, _node_scale(timed, whole), strict=True)
    ]
    facts = parsed(FACTS, about["nodes"])
    groups = groups_of(facts, nodes, plan.branches)
    layouts = tuple(dict.fromkeys(layout for group in groups for layout in group.layouts))
    sizes_of = LayoutSizes(plan, layouts)
    widths = about["widths"][: len(timed)]
    sizes = np.stack([sizes_of(plan.kept(slots_of(plan, each))) for each in widths])
    times = np.array([[group.time(each) for group in groups] for each in nodes])
    return dense, groups, Samples(layouts, sizes, times, whole), sizes_of


class Enough:
    """Function from results to the number of networks to time: until they predict each other.

    It asks for no more once the time is used that is for samples, counted from the first call:
    ``_SECONDS`` and ``_RUNS`` runs of the dense network, up to ``_LONGEST``.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._began = plan, 0.0

    def __call__(self, results: Mapping[str, Any]) -> int:
        """Return how many networks are to be timed, at least ``FEWEST``."""
        self._began = self._began or time.monotonic()
        about = results["about"]
        timed = [results["samples"].get(name) for name in about["samples"]]
        timed = list(takewhile(bool, timed))
        count = len(timed)
        if count < FEWEST:
            return FEWEST
        if count + STEP > len(about["samples"]):
            return len(about["samples"])
        dense, groups, samples, _ = _samples(self._plan, about, timed)
        allowed = min(_LONGEST, _SECONDS + _RUNS * dense / 1e3)
        is_late = time.monotonic() - self._began > allowed
        if is_late or _quality(groups, samples, timed).median <= _GOOD:
            return count
        return count + STEP


def _node_scale(timed: Sequence[Mapping[str, Any]], whole: Numbers) -> Numbers:
    """Return a correction factor for each network's node times, which are taken after its own.

    The machine may be faster or slower by then, and profiling slows a small network down: node
    times are scaled such that the profiled run takes as long as the network. Where that run's time
    is unknown, the sum of node times may stray a little from its typical multiple of the network's.
    """
    nodes = [each["nodes"] for each in timed]
    if all(collect.RUN in each for each in nodes):
        runs: Numbers = np.array([each[collect.RUN] for each in nodes])
        return whole / runs
    multiples: Numbers = np.array([sum(each.values()) for each in nodes]) / whole
    if not multiples.all():  # the runtime reports no times of nodes
        return np.ones_like(whole)
    off: Numbers = multiples / np.median(multiples)
    return off.clip(1 / _BAND, _BAND) / off


def _check(timed: Sequence[Mapping[str, Any]]) -> None:
    if len(timed) < FEWEST:
        raise UsageError(
            f"{len(timed)} networks are too few for a latency table: time {FEWEST} or more"
        )
    for each in timed:
        numbers = [*each["dense"], *each["own"], *each["nodes"].values()]
        if not all(isinstance(x, float) and math.isfinite(x) and x >= 0 for x in numbers):
            raise UsageError("a time among these results is no positive number of milliseconds")


def _setting(results: Mapping[str, Any]) -> Setting:
    return Setting(
        runtime=results["runtime"],
        version=results["version"],
        provider=results["provider"],
        threads=results["threads"],
        batch=results["about"]["batch"],
        processor=results["machine"]["processor"],
        system=results["machine"]["system"],
    )


def _quality(
    groups: Sequence[Group], samples: Samples, timed: Sequence[Mapping[str, Any]]
) -> Quality:
    """Return the errors on samples that are predicted by a model fitted to others."""
    errors = np.empty(len(samples.whole))
    for fold in range(_FOLDS):
        unseen = np.arange(len(errors)) % _FOLDS == fold
        model = fit_model(groups, samples.subset(~unseen))
        predicted = model.values(samples.sizes[unseen]).sum(-1)
        errors[unseen] = np.abs(predicted / samples.whole[unseen] - 1)
    spreads = [collect.spread(each["own"], each["dense"]) for each in timed]
    return Quality(
        median=float(np.median(errors)),
        worst=float(errors.max()),
        networks=len(errors),
        noise=float(np.median(spreads)) / 2,
    )


@displayed
def measure(
    model: nn.Module,
    threads: int = 1,
    batch: int = 1,
    runtime: str = "onnxruntime",
    providers: str | list[str] | None = None,
    *,
    samples: int | str = AUTO,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | Progress = True,
) -> LatencyTable:
    """Time a gated model at many widths, and fit its time at any.

    Networks of random widths are timed, each in turns with the dense one, and what each node took.
    Give the table to ``finetune``, ``fit`` or ``Pruner`` as ``latency=``, with a budget such as
    ``"latency=12ms"``.

    Args:
        model: a gated model.
        threads: that one call may use.
        batch: examples in a call.
        runtime: ``"onnxruntime"``; ``"onnxruntime-int8"``, all in eight bits that can be;
            ``"openvino"``, ``"openvino-int8"``, ``"executorch"``, ``"litert"``; or of PyTorch
            ``"eager"``, ``"compile"``, and on a GPU, without the host's time, ``"cuda-graph"`` or
            ``"torch-cuda-bf16"``.
        providers: of ONNX Runtime, such as ``"CUDAExecutionProvider"``, or a device of PyTorch's,
            such as ``"cuda"``; by default the CPU.
        samples: how many networks are timed; ``"auto"`` for 12 to 32: until the prediction of
            each from others is within 5 % (median), or the time for it is used: about ten seconds
            for a small network, half a minute for a large one.
        seed: of their widths.
        folder: where results are kept, from which a call that was stopped goes on; or a new one.
        progress: show progress on stderr; or a function to call with how many networks are timed,
            and of how many, too.

    Raises:
        FileError: another process is at the same in this folder.
        NotGated: the model carries no gates.
        UsageError: the runtime or provider is not there, the model becomes several ONNX files, or
            takes no such batch.
    """
    check_whole("threads", threads, most=THREADS)
    check_whole("batch", batch)
    check_whole("seed", seed, 0, SEEDS)
    count = check_samples(samples)
    chosen = runtime_of(runtime, providers)
    plan = gates_of(model).plan
    until = Enough(plan) if samples == AUTO else None
    place = Path(folder or tempfile.mkdtemp(prefix="l0prune-"))
    told = progress if callable(progress) else None
    job = Job(model, place, threads, batch, count, seed, told, until)
    if folder is not None:
        with claimed(place):
            table = table_of(plan, chosen.results(job))
    else:
        try:
            table = table_of(plan, chosen.results(job))
            table.observe_by(chosen.bench(job), place)  # with the files that are there
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    if table.warning:
        warn(table.warning)
    return table


def check_samples(samples: int | str) -> int:
    """Return the largest number of networks to time."""
    if isinstance(samples, str):
        if samples != AUTO:
            raise UsageError(f"samples is a number of networks or {AUTO!r}, not {samples!r}")
        return SAMPLES
    check_whole("samples", samples, most=NETWORKS)
    if samples < FEWEST:
        raise UsageError(
            f"{samples} networks are too few for a latency table: time {FEWEST} or more"
        )
    return samples


_made: dict[tuple[str, str], LatencyTable] = {}  # by plan and target, in this process
_KEPT = 2  # of these: each keeps the files that time what is chosen


def latency_table(model: nn.Module, target: str) -> LatencyTable:
    """Return the table of a gated model on a target, timed here once in a process.

    Raises:
        UsageError: as ``measure``; or the target is not on this machine.
    """
    key = plan_id(gates_of(model).plan), target
    if key not in _made:
        with stage(f"measuring a table of times on {target}, once for this network"):
            table = measure(model, runtime=target)
        for oldest in list(_made)[: len(_made) + 1 - _KEPT]:
            del _made[oldest]
        _made[key] = table
    return _made[key]


def known_table(model: nn.Module, target: str) -> LatencyTable | None:
    """Return the table that ``latency_table`` made of a model in this process, if any."""
    return _made.get((plan_id(gates_of(model).plan), target))
