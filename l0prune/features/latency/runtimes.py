"""Runtimes that networks can be timed on, by name: those of ONNX files, and PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from l0prune.capture.compat import pytree
from l0prune.doors import Registry, provided
from l0prune.errors import warn
from l0prune.exporting.onnx import collect
from l0prune.features.latency.eager import (
    Compiled,
    CudaGraph,
    CudaGraphBf16,
    CutGraphs,
    Eager,
    Inputs,
    facts_of,
)
from l0prune.features.latency.facts import FACTS, number_of, plan_id
from l0prune.features.latency.latency import Observe
from l0prune.features.latency.onnx_files import SECONDS, Job, OnnxRuntime, Runtime
from l0prune.features.latency.sizes import (
    SizeFinder,
    Widths,
    all_slots,
    distinguishing_widths,
    sampled_widths,
    slots_of,
)
from l0prune.gating.attaching import gates_of
from l0prune.progress.stages import stage


def torch_results(job: Job, turns: AlternatingTimer) -> dict[str, Any]:
    """Time networks of random widths, each in turns with the dense one.

    Networks already among the job's results are not timed again.
    """
    plan, runtime = gates_of(job.model).plan, turns.runtime
    widths = list(islice(sampled_widths(plan, job.seed), job.samples))
    settings = collect.settings_of(
        runtime.name, runtime.version, str(runtime.device), runtime.threads
    )
    asked = {
        "plan": plan_id(plan),
        "batch": job.batch,
        "seed": job.seed,
        "widths": widths,
        "samples": [number_of(number) for number in range(job.samples)],
    }
    results = collect.known(job.out, settings, asked)
    if not results:
        results = {**settings, "about": asked | turns.facts(), "samples": {}}
    job.folder.mkdir(parents=True, exist_ok=True)
    about = results["about"]
    names, chosen = about["names"], dict(zip(about["samples"], widths, strict=True))
    with job.counted() as tell:
        return collect.each_timed(
            results, job.out, lambda key: turns.of_widths(chosen[key], names), tell, job.until
        )


class AlternatingTimer:
    """Timer of networks of one model, each in turns with the dense one.

    Attributes:
        runtime: that runs them.
    """

    def __init__(self, model: nn.Module, runtime: Eager, batch: int) -> None:
        self.runtime = runtime
        with runtime.running():
            with stage("capturing the model"):
                self._graphs = CutGraphs(model, batch, runtime.dtype)
            self._inputs: Inputs = pytree.tree_map_only(
                torch.Tensor, lambda x: x.to(runtime.device), self._graphs.inputs()
            )
            self._whole = all_slots(self._graphs.plan)
            self._dense = self._prepared(self._network(self._whole))
            if runtime.device.type != "cpu":
                _warn_of_host(runtime.name, runtime.host_part(self._dense))

    def facts(self) -> dict[str, Any]:
        """Return each operator's name and facts."""
        plan, kept, found = self._graphs.plan, [self._whole], []
        kept += [plan.kept(slots_of(plan, widths)) for widths in distinguishing_widths(plan, 2)]
        with self.runtime.running():
            for slots in kept:
                found.append(self.runtime.operators(self._network(slots), self._inputs, 1))
        names, facts = facts_of(found, SizeFinder(plan, kept))
        return {"names": names, "nodes": FACTS.dump_python(facts, mode="json")}

    def of_widths(self, widths: Widths, names: Sequence[str]) -> dict[str, Any]:
        """Time the network of these widths, the dense one beside it, and each operator."""
        kept = slots_of(self._graphs.plan, widths)
        found = self.of_slots(kept, collect.SECONDS)
        times = max(collect.RUNS, collect.runs(collect.typical(found["own"])))
        with self.runtime.running():
            operators = self.runtime.operators(self._network(kept), self._inputs, times)
        return {**found, "nodes": operators.times(names)}

    def of_slots(self, kept: Tensor, seconds: float) -> dict[str, list[float]]:
        """Time the network of these slots and the dense one in turns; return the medians."""
        with self.runtime.running():
            own = self._prepared(self._network(kept))
            median = self.runtime.median
            return collect.turns(partial(median, own), partial(median, self._dense), seconds)

    def _network(self, kept: Tensor) -> GraphModule:
        return self._graphs.network(kept).to(self.runtime.device)

    def _prepared(self, network: GraphModule) -> Callable[[], Any]:
        """Return a function that runs the network once, after a first run here."""
        call, (args, kwargs) = self.runtime.prepared(network), self._inputs
        call(*args, **kwargs)
        return lambda: call(*args, **kwargs)


_HOST = 0.8  # share of a run's time spent on launching, from which on the device waits for the host


def _warn_of_host(runtime: str, part: float) -> None:
    """Warn if widths hardly change a network's time, since the device waits for the host."""
    if part >= _HOST:
        warn(
            f"the dense network waits for the host: starting its operators takes {part:.0%} of its "
            f"time in {runtime}, so that narrower layers make it hardly faster. Measure with "
            "runtime='cuda-graph', or larger batches, or let whole layers be removed "
            "(`l0prune gate` without --no-branches)"
        )


class Torch:
    """Runtime PyTorch on a device, the first of ``providers``."""

    def __init__(self, kind: Callable[[str, int], Eager], providers: Sequence[str]) -> None:
        self.kind, self.provider = kind, providers[0] if providers else "cpu"
        self.version = kind(self.provider, 1).version
        self._last: tuple[Job, AlternatingTimer] | None = None

    def _turns(self, job: Job) -> AlternatingTimer:
        if self._last is None or self._last[0] is not job:
            runtime = self.kind(self.provider, job.threads)
            self._last = job, AlternatingTimer(job.model, runtime, job.batch)
        return self._last[1]

    def results(self, job: Job) -> dict[str, Any]:
        """See ``Runtime``."""
        return torch_results(job, self._turns(job))

    def bench(self, job: Job) -> Observe:
        """See ``Runtime``."""
        turns = self._turns(job)
        return lambda kept: collect.share(**turns.of_slots(kept, SECONDS))


RUNTIMES: Registry[Callable[[Sequence[str]], Runtime]] = Registry("runtime", "runtimes")
RUNTIMES[collect.NAME] = OnnxRuntime
RUNTIMES["onnxruntime-int8"] = lambda providers: OnnxRuntime(
    providers, "onnxruntime-int8", provided("int8_for_times")()
)
RUNTIMES["eager"] = partial(Torch, Eager)
RUNTIMES["compile"] = partial(Torch, Compiled)
RUNTIMES["cuda-graph"] = lambda providers: Torch(CudaGraph, providers or ["cuda"])
RUNTIMES["torch-cuda-bf16"] = lambda providers: Torch(CudaGraphBf16, providers or ["cuda"])


def runtime_of(name: str, providers: str | Sequence[str] | None = None) -> Runtime:
    """Return the runtime of this name."""
    return RUNTIMES.named(name)(
        [providers] if isinstance(providers, str) else list(providers or ())
    )
