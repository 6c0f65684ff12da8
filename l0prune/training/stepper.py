"""One training step: forward, penalty, backward, optimizer, average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from l0prune.running.batch import Batch
from l0prune.running.processes import World
from l0prune.running.shards import sharded_state
from l0prune.running.task import Loss
from l0prune.training.averages import Average
from l0prune.training.checkpoint import Checkpoint
from l0prune.training.controller import Controller
from l0prune.training.distillation import Teacher
from l0prune.training.losses import Losses
from l0prune.training.optimizers import Schedule, make_optimizers
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings


class Stepper:
    """Everything that a step changes beside the model.

    Attributes:
        phases: which step belongs to which phase.
        optimizers: of weights and gates, one or two.
        average: of the model over the steps, or None.
        scaler: of the loss in fp16, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        settings: Settings,
        device: torch.device,
        controller: Controller | None,
        phases: Phases,
        teacher: Teacher | None,
        world: World,
    ) -> None:
        self._settings, self._controller, self.phases = settings, controller, phases
        self.teacher = teacher
        gates = None if controller is None else controller.gates.log_alpha
        self._learning = [p for p in model.parameters() if p.requires_grad]
        self._weights = [p for p in self._learning if p is not gates]
        self._losses = Losses(model, loss, teacher, settings, device, world, self._weights)
        self.optimizers = make_optimizers(settings, self._groups())
        self._schedule = Schedule(settings, self.optimizers, self.phases)
        self.average = Average(model, settings.ema) if settings.ema else None
        self.scaler = torch.amp.GradScaler(device.type) if settings.autocast == "fp16" else None
        self.zero_grad()
        self._anneal(0)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Leave no gradients behind."""
        self.zero_grad()

    def _groups(self) -> list[dict[str, Any]]:
        settings = self._settings
        if self._controller is not None:
            return self._controller.param_groups()
        rest = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        return [{"name": "weights", "params": self._weights, **rest}]

    def _anneal(self, steps: int) -> None:
        """Make the gates what they are after so many steps."""
        if self._controller is not None:
            self._controller.anneal(self.phases.learned(steps))

    def load(self, state: Checkpoint, steps: int) -> None:
        """Take up the state after so many steps; the model must have its weights already."""
        self._anneal(steps)
        if self.average is not None:
            self.average.load(state.average, state.updates)
        for optimizer, of in zip(self.optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(sharded_state(optimizer, of))
        if self._controller is not None:
            self._controller.load(state.budget)
        if self.teacher is not None:
            self.teacher.load(state.teacher)
        if self.scaler is not None:
            self.scaler.load_state_dict(state.scaler)

    def __call__(self, step: int, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Do step number ``step`` of the run, from 0; returns the task's loss and the penalty.

        The loss is this process' share of it, such that the mean over all is that of the step.
        The penalty is the model's, and every process has its gradient in full.
        """
        self._schedule.set(step)
        settles = self.phases.at(step) == "settle"
        if self._controller is not None:
            if self.phases.begins_to_settle(step):
                self._begin_to_settle(self._controller)
            self._controller.fix(settles)
        loss = self._losses.backward(batch, self._scaled)
        extra = None if self._controller is None else self._controller.penalty(step)
        if extra is not None and extra.requires_grad:
            self._losses.add(self._scaled(extra), self._learning)
        if self._controller is not None and settles:
            self._controller.hold()
        elif self._controller is not None:
            self._controller.ascend()
        self._apply_gradients()
        if self.average is not None:
            self.average.update()
        self._anneal(step + 1)
        return loss, extra

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _begin_to_settle(self, controller: Controller) -> None:
        """From here on the gates stand: at their averages, and where the budgets want them."""
        if self.average is not None:
            self.average.install()
        controller.fit()
        if self.average is not None:
            self.average.restart()

    def _apply_gradients(self) -> None:
        if self._settings.clip is not None:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self._weights, self._settings.clip)
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        self.zero_grad()

    @property
    def rate(self) -> float:
        """Learning rate of the weights in the last step."""
        return float(self.optimizers[0].param_groups[0]["lr"])
