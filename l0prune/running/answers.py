"""Data without labels: what a network answers is what another one, or it itself, learns from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from l0prune.capture.modes import evaluating
from l0prune.data.dataset import Loaded, Tensors
from l0prune.data.inputs import moved, plain
from l0prune.data.pairs import pair, without_labels
from l0prune.errors import UsageError
from l0prune.running.calling import call
from l0prune.running.classes import tensor_in
from l0prune.running.criteria import AUTO
from l0prune.running.device import choose, on_device, precision
from l0prune.running.task import Source, Task, is_split


def answered(
    data: Any,
    network: nn.Module,
    *,
    batch_size: int = 100,
    device: str | torch.device = "auto",
    autocast: str | None = None,
) -> Task:
    """The same inputs, with the network's own answers in place of targets.

    So no labels are needed: give the dense network before it is gated. Every example is answered
    once, in eval mode, and the answers are kept in memory; ``distill`` computes them in each step
    anew, and so is for data that is augmented or never ends.

    Args:
        data: what ``finetune`` takes. What it has for targets is not looked at. A batch of a
            DataLoader may also be the inputs alone.
        network: returns a tensor, or has one as ``.logits``. It is left as it was found.
        batch_size: examples at a time, where the source lets us choose.
        device: where it answers; see ``Settings``.
        autocast: see ``Settings``.

    Returns:
        A task with the loss and metric of ``data``, both of (outputs, answers); in place of
        ``"auto"`` the loss is ``"mse"``, since answers are numbers.

    Raises:
        DataError: there is nothing to learn from.
        UsageError: the network returns something else than a tensor.
    """
    task = Task.of(data)
    if task.loss == AUTO:
        task = Task.of(task, loss="mse")
    place = choose(device, network)

    def of(source: Source) -> Source:
        batches = source.batches(batch_size) if is_split(source) else iter(source)
        pairs = [_answered(network, _inputs_of(batch), place) for batch in batches]
        if isinstance(source, Tensors):
            return Tensors(source.inputs, torch.cat([answers for _, answers in pairs]))
        if isinstance(source, Loaded):
            answers = torch.cat([answers for _, answers in pairs])
            return Loaded(_Beside(source.dataset, answers), source.workers, None, _Collate(source))
        return pairs

    with on_device(network, place), evaluating(network), precision(place, autocast):
        train = of(task.train)
        test = None if task.test is None else of(task.test)
    return replace(task, train=train, test=test)


def _inputs_of(batch: Any) -> Any:
    return plain(batch if isinstance(batch, Tensor) else without_labels(pair(batch)[0]))


def _answered(network: nn.Module, inputs: Any, device: torch.device) -> tuple[Any, Tensor]:
    """The inputs and what the network answers, on the CPU."""
    outputs = call(network, moved(inputs, device))
    answers = tensor_in(outputs)
    if answers is None:
        raise UsageError(
            f"the network answers with a {type(outputs).__name__}; only a tensor, or one that it "
            "has as .logits, can be learned from. Put a module around it that returns one"
        )
    return inputs, answers.float().cpu()


class _Beside(Dataset):
    """Each example of a dataset, whatever it is, with its answer."""

    def __init__(self, dataset: Any, answers: Tensor) -> None:
        self._dataset, self._answers = dataset, answers

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self._dataset[index], self._answers[index]


class _Collate:
    """Makes a batch of such examples as their own source does; a class, for worker processes."""

    def __init__(self, source: Loaded) -> None:
        self._collate = source.collate

    def __call__(self, examples: list[tuple[Any, Tensor]]) -> tuple[Any, Tensor]:
        given, answers = zip(*examples, strict=True)
        return _inputs_of(self._collate(list(given))), torch.stack(answers)
