"""The loss of a batch in a training step, as the settings want it computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from l0prune.errors import UsageError
from l0prune.running.batch import Batch
from l0prune.running.calling import call
from l0prune.running.device import precision
from l0prune.running.processes import World
from l0prune.running.task import Judge
from l0prune.training.distillation import Teacher
from l0prune.training.memory import images_channels_last
from l0prune.training.settings import Settings
from l0prune.training.wrappers import replicated, whole_everywhere


class Losses:
    """Losses whose gradients come out as those of the mean over the whole batch.

    The whole is what all processes have together, each in ``accumulate`` parts one after
    another. Each part is a forward, and has gates of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Judge,
        teacher: Teacher | None,
        settings: Settings,
        device: torch.device,
        world: World,
        weights: Sequence[nn.Parameter],
        of_loss: Sequence[nn.Parameter] = (),
    ) -> None:
        self._settings, self._device, self._world = settings, device, world
        shards = world.is_shared and settings.distributed == "fsdp"
        backend = None if shards else settings.backend  # shards are compiled block by block
        self._weights = weights
        self._by_hand = [*whole_everywhere(model), *of_loss] if world.is_shared else []
        self._of: nn.Module = _LossOf(model, loss, teacher, backend)
        self._replica: DistributedDataParallel | None = None
        if world.is_shared and not shards:
            self._of = self._replica = replicated(self._of, self._by_hand)

    def backward(self, batch: Batch, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Add the gradients of what is learned from; returns this process' share of the loss.

        Args:
            batch: this process' part of the whole batch.
            scale: of the loss before backward, for fp16.
        """
        parts = self._settings.accumulate
        total: Tensor | None = None
        for number, part in enumerate(batch.parts(parts)):
            with self._together(last=number + 1 == parts):
                with precision(self._device, self._settings.autocast):
                    loss, learned = self._of(self._laid_out(part.inputs), part.targets)
                share = part.weight / parts
                if self._leads_back(learned):
                    scale(learned if share == 1 else learned * share).backward()
            total = loss * share if total is None else total + loss * share
        self._average_by_hand()
        assert total is not None
        return total

    def _leads_back(self, loss: Tensor) -> bool:
        """Has the loss a gradient? It has none where all weights are frozen and the gates stand."""
        if not loss.requires_grad and self._weights:
            raise UsageError(
                "The loss has no gradient, so that nothing can be learned from it. The usual cause "
                "is a loss or a forward with torch.no_grad(), detach() or a rounding in it."
            )
        return loss.requires_grad

    def _laid_out(self, inputs: Any) -> Any:
        return images_channels_last(inputs) if self._settings.channels_last else inputs

    def _together(self, last: bool) -> AbstractContextManager[None]:
        """DDP averages once, in the last backward; FSDP2 in each, which needs the least memory."""
        replica = self._replica
        return nullcontext() if last or replica is None else replica.no_sync()

    @torch.no_grad()
    def _average_by_hand(self) -> None:
        for parameter in self._by_hand:
            if not parameter.requires_grad:
                continue
            given = parameter.grad
            gradient = torch.zeros_like(parameter) if given is None else given
            is_used = gradient.new_tensor([given is not None])
            mean = self._world.mean_(torch.cat([gradient.reshape(-1), is_used]))
            parameter.grad = mean[:-1].view_as(parameter) if mean[-1] else None


class _LossOf(nn.Module):
    """Model and loss as one module, which returns what is differentiated and nothing else."""

    def __init__(
        self, model: nn.Module, loss: Judge, teacher: Teacher | None, backend: str | None
    ) -> None:
        super().__init__()
        self.model = model
        self._loss, self._teacher = loss, teacher
        # In a list, since a compiled model is not to be a further child.
        self._runs = [model if backend is None else torch.compile(model, backend=backend)]

    def forward(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """The task's mean loss, and what is learned from: that, or mixed with a teacher's."""
        outputs = call(self._runs[0], inputs)
        loss = self._loss(outputs, targets)
        if loss is None:
            raise UsageError(
                "in train mode the model gives no loss to learn from: give loss=a function of "
                "(outputs, targets)"
            )
        teacher = self._teacher
        return loss.detach(), loss if teacher is None else teacher.mixed(loss, outputs, inputs)
