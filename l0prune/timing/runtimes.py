"""Runtimes that networks can be timed on, by name: ONNX Runtime and PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from l0prune.capture.compat import pytree
from l0prune.errors import UsageError, warn
from l0prune.exporting.onnx import collect
from l0prune.gating.attaching import gates_of
from l0prune.running.stages import stage
from l0prune.timing.eager import Compiled, CutGraphs, Eager, Inputs, facts_of
from l0prune.timing.facts import facts_to_json, number_of, plan_id
from l0prune.timing.latency import Observe
from l0prune.timing.sizes import (
    SizeFinder,
    Widths,
    all_slots,
    distinguishing_widths,
    sampled_widths,
    slots_of,
)


@dataclass(frozen=True)
class Job:
    """Networks to time, and how.

    Attributes:
        model: gated.
        folder: where files and results are kept.
        threads: that one call may use.
        batch: examples in a call.
        samples: networks.
        seed: of their widths.
        progress: called with how many networks are timed, and of how many.
    """

    model: nn.Module
    folder: Path
    threads: int
    batch: int
    samples: int = 0
    seed: int = 0
    progress: Callable[[int, int], None] | None = None

    @property
    def out(self) -> Path:
        """Folder of the results."""
        return self.folder / "results.json"


def torch_results(job: Job, runtime: Eager) -> dict[str, Any]:
    """Time networks of random widths, each in turns with the dense one.

    What is among the job's results already is not timed again.
    """
    plan = gates_of(job.model).plan
    widths = list(islice(sampled_widths(plan, job.seed), job.samples))
    settings = collect.settings_of(
        runtime.name, str(torch.__version__), str(runtime.device), runtime.threads
    )
    asked = {"plan": plan_id(plan), "batch": job.batch, "seed": job.seed, "widths": widths}
    results = collect.known(job.out, settings, asked)
    turns = AlternatingTimer(job.model, runtime, job.batch)
    if not results:
        samples = [number_of(number) for number in range(job.samples)]
        about = asked | {"samples": samples} | turns.facts()
        results = {**settings, "about": about, "samples": {}}
    job.folder.mkdir(parents=True, exist_ok=True)
    about = results["about"]
    for number, (key, chosen) in enumerate(zip(about["samples"], widths, strict=True), start=1):
        if key not in results["samples"]:
            results["samples"][key] = turns.of_widths(chosen, about["names"])
            collect.keep(results, job.out)
        if job.progress is not None:
            job.progress(number, job.samples)
    return results


class AlternatingTimer:
    """Timer of networks of one model, each in turns with the dense one.

    Args:
        model: gated.
        runtime: what they run on.
        batch: examples in a call.
    """

    def __init__(self, model: nn.Module, runtime: Eager, batch: int) -> None:
        self._runtime = runtime
        with runtime.running():
            with stage("capturing the model"):
                self._graphs = CutGraphs(model, batch)
            self._inputs: Inputs = pytree.tree_map_only(
                torch.Tensor, lambda x: x.to(runtime.device), self._graphs.inputs()
            )
            self._whole = all_slots(self._graphs.plan)
            self._dense = self._prepared(self._network(self._whole))

    def facts(self) -> dict[str, Any]:
        """Return each operator's name and facts."""
        plan, kept, found = self._graphs.plan, [self._whole], []
        kept += [plan.kept(slots_of(plan, widths)) for widths in distinguishing_widths(plan, 2)]
        with self._runtime.running():
            for slots in kept:
                found.append(self._runtime.operators(self._network(slots), self._inputs, 1))
        names, facts = facts_of(found, SizeFinder(plan, kept))
        return {"names": names} | facts_to_json(facts)

    def of_widths(self, widths: Widths, names: Sequence[str]) -> dict[str, Any]:
        """Time the network of these widths, the dense one beside it, and each operator."""
        kept = slots_of(self._graphs.plan, widths)
        found = self.of_slots(kept, collect.SECONDS)
        times = max(collect.RUNS, collect.runs(collect.typical(found["own"])))
        with self._runtime.running():
            operators = self._runtime.operators(self._network(kept), self._inputs, times)
        return {**found, "nodes": operators.times(names)}

    def of_slots(self, kept: Tensor, seconds: float) -> dict[str, list[float]]:
        """Time the network of these slots and the dense one in turns; return the medians."""
        with self._runtime.running():
            own = self._prepared(self._network(kept))
            median = self._runtime.median
            return collect.turns(partial(median, own), partial(median, self._dense), seconds)

    def _network(self, kept: Tensor) -> GraphModule:
        return self._graphs.network(kept).to(self._runtime.device)

    def _prepared(self, network: GraphModule) -> Callable[[], Any]:
        """Return one run of a network, which has run before."""
        call, (args, kwargs) = self._runtime.prepared(network), self._inputs
        call(*args, **kwargs)
        return lambda: call(*args, **kwargs)


_SECONDS = 1.0  # of all turns, where a single network is timed


class Runtime(Protocol):
    """A runtime that can run and time networks.

    Attributes:
        version: of it.
    """

    version: str

    def results(self, job: Job) -> dict[str, Any]:
        """Time networks of random widths; what was timed already is taken from the folder.

        Raises:
            UsageError: the model cannot be timed on it.
        """

    def bench(self, job: Job) -> Observe:
        """Return what times single networks of the model; its files lie in the job's folder."""


class OnnxRuntime:
    """ONNX Runtime with one of its providers.

    Args:
        providers: the first one is taken; the CPU where there are none.
        name: under which its times are known.
        convert: makes of each file what is timed, as ``in_int8`` does; None to leave it.

    Raises:
        UsageError: it has no such provider.
    """

    def __init__(
        self, providers: Sequence[str], name: str = collect.NAME, convert: Any = None
    ) -> None:
        import onnxruntime

        self.name, self.convert = name, convert
        self.version = collect.version()
        self.provider = providers[0] if providers else collect.CPU
        available = onnxruntime.get_available_providers()
        if self.provider not in available:
            raise UsageError(
                f"this ONNX Runtime has no {self.provider}, but {', '.join(available)}: install "
                "the onnxruntime package that has it, such as onnxruntime-gpu for CUDA"
            )

    def results(self, job: Job) -> dict[str, Any]:
        """See ``Runtime``."""
        self.write(job)
        try:
            return collect.collect(job.folder, job.out, job.threads, self.provider, job.progress)
        except collect.FellBack as error:
            raise UsageError(str(error)) from error

    def write(self, job: Job) -> None:
        """Write the networks of a job into its folder, with a script that times them."""
        from l0prune.timing.network_files import write_bundle  # which loads onnx

        write_bundle(
            job.model,
            job.folder,
            batch=job.batch,
            samples=job.samples,
            seed=job.seed,
            runtime=self.name,
            convert=self.convert,
        )

    def bench(self, job: Job) -> Observe:
        """See ``Runtime``."""
        from l0prune.timing.network_files import DENSE, INPUTS, NetworkFiles  # which load onnx

        files = NetworkFiles(job.model, job.batch, job.folder, self.convert)
        inputs = dict(np.load(job.folder / INPUTS).items())
        dense = collect.Network(job.folder / DENSE, job.threads, self.provider)

        def ratio(kept: Tensor) -> float:
            path = files.write("chosen.onnx", kept)
            network = collect.Network(path, job.threads, self.provider)
            return collect.share(**collect.networks_turns(network, dense, inputs, _SECONDS))

        return ratio


class Torch:
    """PyTorch, on the device that is its first provider."""

    def __init__(self, kind: type[Eager], providers: Sequence[str]) -> None:
        self._kind, self.provider = kind, providers[0] if providers else "cpu"
        self.version = str(torch.__version__)

    def results(self, job: Job) -> dict[str, Any]:
        """See ``Runtime``."""
        return torch_results(job, self._kind(self.provider, job.threads))

    def bench(self, job: Job) -> Observe:
        """See ``Runtime``."""
        turns = AlternatingTimer(job.model, self._kind(self.provider, job.threads), job.batch)
        return lambda kept: collect.share(**turns.of_slots(kept, _SECONDS))


def _int8(providers: Sequence[str]) -> OnnxRuntime:
    from l0prune.exporting.onnx.quantizer import has_dot_products, in_int8  # loads onnx

    if not has_dot_products():
        warn(
            "this processor has no VNNI instructions: times of int8 files here say nothing of "
            "those on one that has. Measure on a machine like the one that will serve"
        )
    return OnnxRuntime(providers, "onnxruntime-int8", in_int8)


RUNTIMES: dict[str, Callable[[Sequence[str]], Runtime]] = {
    collect.NAME: OnnxRuntime,
    "onnxruntime-int8": _int8,
    "eager": lambda providers: Torch(Eager, providers),
    "compile": lambda providers: Torch(Compiled, providers),
}


def runtime_of(name: str, providers: str | Sequence[str] | None = None) -> Runtime:
    """Return the runtime of this name.

    Raises:
        UsageError: there is none of this name, or it is not installed, or has no such provider.
    """
    if name not in RUNTIMES:
        raise UsageError(f"runtime is one of {', '.join(RUNTIMES)}, not {name!r}")
    return RUNTIMES[name]([providers] if isinstance(providers, str) else list(providers or ()))
