"""Answers of all exits to held-out examples, and the cost of each way through the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from l0prune.capture.compat import pytree
from l0prune.capture.sizes import Inputs
from l0prune.data.dataset import WHOLE, as_arguments
from l0prune.errors import DataError, UsageError
from l0prune.exporting.certify.dtypes import CPU
from l0prune.exporting.onnx import collect
from l0prune.features.exits.deciding import EarlyExit, answers_of
from l0prune.features.exits.thresholds import Array, HeldOut
from l0prune.plan.measures import Latency
from l0prune.running.batches import Batch, test_batches
from l0prune.running.criteria import TokenMean
from l0prune.running.evaluate import explain_mismatch
from l0prune.running.task import Task, batch_length

SECONDS = 0.5  # of all turns of one file
_KEPT = 256  # held-out examples with which files are compared, at most


def forced(exits: int, number: int) -> Tensor:
    """Return the thresholds with which every example leaves at one exit."""
    found = torch.full((exits,), torch.inf)
    found[number:] = -torch.inf
    return found


@dataclass(frozen=True)
class Seen:
    """Scores and metrics of all exits on the held-out examples.

    Attributes:
        scores: of the early exits; (exits, n).
        values: of the metric, for all exits; (exits + 1, n).
        scale: the largest absolute value in any answer.
        inputs: some of the examples, each as a batch of one.
    """

    scores: Array
    values: Array
    scale: float
    inputs: tuple[Inputs, ...]

    def held_out(self, costs: Array, larger_is_better: bool) -> HeldOut:
        """Return the data by which thresholds are chosen."""
        return HeldOut(self.scores, -self.values if larger_is_better else self.values, costs)


@torch.no_grad()
def seen_by(network: EarlyExit, task: Task, batch_size: int) -> Seen:
    """Return scores and metrics of all exits on the task's test examples.

    Raises:
        DataError: there are none, or they do not fit the network.
        UsageError: the metric has no value for single examples.
    """
    scores: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    inputs: list[Inputs] = []
    now, scale = list[Batch](), 0.0
    with task.on_device(CPU), explain_mismatch(now, "network, held-out data and metric"):
        for batch in test_batches(task, batch_size, CPU, WHOLE):
            now[:] = [batch]
            args, kwargs = as_arguments(batch.inputs)
            exits, last = answers_of(network.network, args, kwargs)
            count = range(len(exits))
            scores.append([network.criterion.score(exits[: number + 1]) for number in count])
            values.append([_each(task, answer, batch) for answer in (*exits, last)])
            scale = max(scale, *(float(answer.abs().max()) for answer in (*exits, last)))
            inputs += _alone((args, kwargs), batch.examples, _KEPT - len(inputs))
    if not scores:
        raise DataError("there are no held-out examples to choose thresholds on")
    stacked = [
        torch.stack([torch.cat(of_one) for of_one in zip(*each, strict=True)]).double().numpy()
        for each in (scores, values)
    ]
    return Seen(stacked[0], stacked[1], scale, tuple(inputs))


def _each(task: Task, answer: Tensor, batch: Batch) -> Tensor:
    """Return the metric, or else the loss, of each example."""
    found = _values(task, answer, batch.targets)
    if found.numel() == batch.examples:
        return found.flatten()
    rows = [slice(number, number + 1) for number in range(batch.examples)]
    return torch.stack([_values(task, answer[r], batch.targets[r]).mean() for r in rows])


def _values(task: Task, answer: Tensor, targets: Any) -> Tensor:
    judged = task.loss_and_metric(answer, targets)
    found = judged[task.metric_name]
    if isinstance(found, TokenMean):
        raise UsageError(
            f"{task.metric_name} is no metric of single examples, by which thresholds are chosen: "
            "give another metric"
        )
    return found.float().cpu()


def _alone(inputs: Inputs, examples: int, most: int) -> Iterator[Inputs]:
    """Yield the first ``most`` examples, each as a batch of one."""
    for number in range(min(examples, most)):

        def row(leaf: Tensor, number: int = number) -> Tensor:
            is_batched = leaf.ndim and len(leaf) == batch_length(leaf, leaf) == examples
            return leaf[number : number + 1] if is_batched else leaf

        yield pytree.tree_map_only(Tensor, row, inputs)


def macs_of_ways(network: EarlyExit, example: Inputs) -> Array:
    """Return the MACs of one example up to each exit, as torch counts them."""
    args, kwargs = example
    chosen, exits = network.thresholds, len(network.thresholds)
    found = []
    try:
        for number in range(exits + 1):
            network.thresholds = forced(exits, number)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                network.decide(*args, **kwargs)
            found.append(counter.get_total_flops() / 2)
    finally:
        network.thresholds = chosen
    return np.array(found)


def milliseconds_of_ways(paths: Sequence[Path], feed: dict[str, Any], threads: int) -> Array:
    """Return the milliseconds of one example up to each exit, in ONNX Runtime on the CPU.

    Args:
        paths: of one file for each exit, which always leaves there; the network's end last.
        feed: of one example.
        threads: that a call may use.
    """
    *early, whole = (
        partial(collect.Network(path, threads, collect.CPU).median, feed) for path in paths
    )
    turns = [collect.turns(each, whole, SECONDS) for each in early]
    shares = [collect.share(each["own"], each["dense"]) for each in turns]
    in_all = collect.typical([ms for each in turns for ms in each["dense"]])
    return np.array([*shares, 1.0]) * in_all


MEASURES = ("macs", Latency.name)
