"""One training step: forward, penalty, backward, optimizer, average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from l0prune.finetune.checkpoint import Checkpoint
from l0prune.finetune.device import precision
from l0prune.finetune.ema import Average
from l0prune.finetune.feed import call
from l0prune.finetune.optimize import Schedule, make_optimizer
from l0prune.finetune.phases import Phases
from l0prune.finetune.pruning import Pruning
from l0prune.finetune.settings import Settings
from l0prune.finetune.task import Loss


class Stepper:
    """Everything that a step changes beside the model.

    Attributes:
        phases: which step belongs to which phase.
        optimizer: of weights and gates.
        average: of the model over the steps, or None.
        scaler: of the loss in fp16, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        settings: Settings,
        device: torch.device,
        pruning: Pruning | None,
        steps_per_epoch: int,
    ) -> None:
        self._model, self._loss, self._settings = model, loss, settings
        self._device, self._pruning = device, pruning
        self.phases = (
            Phases.dense(settings.epochs, steps_per_epoch)
            if pruning is None
            else Phases.plan(settings.epochs, steps_per_epoch, settings.warmup, settings.settle)
        )
        gates = None if pruning is None else pruning.gates.log_alpha
        self._weights = [p for p in model.parameters() if p.requires_grad and p is not gates]
        self.optimizer = make_optimizer(settings, self._groups())
        self._schedule = Schedule(settings, self.optimizer, self.phases)
        self.average = Average(model, settings.ema) if settings.ema else None
        self.scaler = torch.amp.GradScaler(device.type) if settings.autocast == "fp16" else None
        self.optimizer.zero_grad(set_to_none=True)
        self._anneal(0)

    def _groups(self) -> list[dict[str, Any]]:
        settings = self._settings
        if self._pruning is not None:
            return self._pruning.param_groups(settings)
        rest = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        return [{"name": "weights", "params": self._weights, **rest}]

    def _anneal(self, steps: int) -> None:
        """Make the gates what they are after so many steps."""
        if self._pruning is not None:
            self._pruning.anneal(self.phases.learned(steps))

    def load(self, state: Checkpoint, steps: int) -> None:
        """Take up the state after so many steps; the model must have its weights already."""
        self._anneal(steps)
        if self.average is not None:
            self.average.load(state.average, state.updates)
        self.optimizer.load_state_dict(state.optimizer)
        if self.scaler is not None:
            self.scaler.load_state_dict(state.scaler)

    def __call__(self, step: int, inputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        """Do step number ``step`` of the run, from 0; returns the task's loss and the penalty."""
        self._schedule.set(step)
        settles = self.phases.at(step) == "settle"
        if self._pruning is not None:
            if self.average is not None and self.phases.begins_to_settle(step):
                self.average.install()
            self._pruning.fix(settles)
        with precision(self._device, self._settings.autocast):
            loss = self._loss(call(self._model, inputs), targets)
        extra = None if self._pruning is None else self._pruning.penalty(self.phases.factor(step))
        total = loss if extra is None else loss + extra
        (total if self.scaler is None else self.scaler.scale(total)).backward()
        if self._pruning is not None and settles:
            self._pruning.hold()
        self._apply_gradients()
        if self.average is not None:
            self.average.update()
        self._anneal(step + 1)
        return loss, extra

    def _apply_gradients(self) -> None:
        if self._settings.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._weights, self._settings.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def rate(self) -> float:
        """Learning rate of the weights in the last step."""
        return float(self.optimizer.param_groups[0]["lr"])
