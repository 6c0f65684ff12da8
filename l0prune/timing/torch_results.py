"""What networks of many widths take in PyTorch, in the form of a bundle's results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from l0prune.exporting.onnx import collect
from l0prune.files.atomic import write_whole
from l0prune.gating.attaching import gates_of
from l0prune.running.stages import stage
from l0prune.timing.eager import Eager, facts_of
from l0prune.timing.facts import facts_to_json, number_of, plan_id
from l0prune.timing.graphs import Graphs, Inputs
from l0prune.timing.sampling import Widths, all_slots, first_slots, sampled_widths, telling_widths
from l0prune.timing.sizes import SizeFinder


def torch_results(
    model: nn.Module,
    runtime: Eager,
    out: Path,
    *,
    batch: int,
    samples: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    """Time networks of random widths, each in turns with the dense one.

    Args:
        model: a gated model.
        runtime: what they run on.
        out: where results are kept; what is there already is not timed again.
        batch: examples in a call.
        samples: how many networks.
        seed: of their widths.
        progress: called with how many networks are timed, and of how many.
    """
    plan = gates_of(model).plan
    widths = list(islice(sampled_widths(plan, seed), samples))
    keys = [number_of(number) for number in range(samples)]
    settings = {
        "format": collect.FORMAT,
        "runtime": runtime.name,
        "version": str(torch.__version__),
        "provider": str(runtime.device),
        "threads": runtime.threads,
        "machine": collect.machine(),
    }
    asked = {"plan": plan_id(plan), "batch": batch, "seed": seed, "widths": widths}
    results = _known(out, settings, asked)
    turns = Turns(model, runtime, batch)
    if not results:
        about = asked | {"samples": keys} | turns.facts()
        results = {**settings, "about": about, "samples": {}}
    for number, (key, chosen) in enumerate(zip(keys, widths, strict=True), start=1):
        if key not in results["samples"]:
            names = results["about"]["names"]
            results["samples"][key] = turns.of_widths(chosen, names)
            results["digest"] = collect.digest(results)
            write_whole(out, json.dumps(results))
        if progress is not None:
            progress(number, samples)
    return results


def _known(out: Path, settings: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run, which was stopped, found of the same."""
    try:
        old = json.loads(out.read_text())
        is_same = old | settings == old and old["about"] | asked == old["about"]
        return old if is_same and old["digest"] == collect.digest(old) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Turns:
    """Times networks of one model, each in turns with the dense one.

    Args:
        model: gated.
        runtime: what they run on.
        batch: examples in a call.
    """

    def __init__(self, model: nn.Module, runtime: Eager, batch: int) -> None:
        self._runtime = runtime
        with runtime.running():
            with stage("capturing the model"):
                self._graphs = Graphs(model, batch)
            self._inputs: Inputs = pytree.tree_map_only(
                torch.Tensor, lambda x: x.to(runtime.device), self._graphs.inputs()
            )
            self._whole = all_slots(self._graphs.plan)
            self._dense = self._prepared(self._network(self._whole))

    def facts(self) -> dict[str, Any]:
        """What operators are called, and what there is to know of each."""
        plan, kept, found = self._graphs.plan, [self._whole], []
        kept += [plan.kept(first_slots(plan, widths)) for widths in telling_widths(plan, 2)]
        with self._runtime.running():
            for slots in kept:
                found.append(self._runtime.operators(self._network(slots), self._inputs, 1))
        names, facts = facts_of(found, SizeFinder(plan, kept))
        return {"names": names} | facts_to_json(facts)

    def of_widths(self, widths: Widths, names: Sequence[str]) -> dict[str, Any]:
        """What the network of these widths took, the dense one beside it, and each operator."""
        kept = first_slots(self._graphs.plan, widths)
        found = self.of_slots(kept, collect.SECONDS)
        times = max(collect.RUNS, collect.runs(collect.typical(found["own"])))
        with self._runtime.running():
            operators = self._runtime.operators(self._network(kept), self._inputs, times)
        return {**found, "nodes": operators.times(names)}

    def of_slots(self, kept: Tensor, seconds: float) -> dict[str, list[float]]:
        """The medians of that which keeps these slots, and of the dense one, in turns."""
        with self._runtime.running():
            own = self._prepared(self._network(kept))
            median = self._runtime.median
            return collect.turns(partial(median, own), partial(median, self._dense), seconds)

    def _network(self, kept: Tensor) -> GraphModule:
        return self._graphs.network(kept).to(self._runtime.device)

    def _prepared(self, network: GraphModule) -> Callable[[], Any]:
        """One run of a network, which has run before."""
        call, (args, kwargs) = self._runtime.prepared(network), self._inputs
        call(*args, **kwargs)
        return lambda: call(*args, **kwargs)
