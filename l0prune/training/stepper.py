"""One training step: loss, backward, penalty, clipping, optimizers and average.

A step that fails at the sizes of a cut network is repeated on the whole one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from l0prune.errors import L0pruneError, UsageError
from l0prune.files.around import added_cost
from l0prune.gating.attaching import gates_or_none, weights_of
from l0prune.gating.bank import Gates
from l0prune.running.batches import Batch, Feed, call
from l0prune.running.device import precision
from l0prune.running.processes import World, sharded_state
from l0prune.running.task import Judge, Task
from l0prune.training.averages import Average
from l0prune.training.checkpoint import Checkpoint, put_back
from l0prune.training.gate_run import GateRun
from l0prune.training.optimizers import Schedule, make_optimizers
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings
from l0prune.training.wrappers import images_channels_last, replicated, whole_everywhere

T = TypeVar("T")


def retry_uncut(
    pruner: GateRun | None, action: Callable[[], T], undo: Callable[[], None] | None = None
) -> T:
    """Run ``action``; if it fails only because the network is cut, make it whole, and run again.

    The user's loss, metric or forward may depend on the whole network's sizes, and raise any error.
    So it is run again at the same sizes first: an error that does not recur, such as that of a
    killed worker process, is not caused by the sizes, and is raised. The network then stays whole.
    """

    def fails() -> bool:
        if undo is not None:
            undo()
        try:
            action()
        except Exception:
            return True
        return False

    try:
        return action()
    except L0pruneError:
        raise
    except Exception as error:
        if pruner is None or pruner.compaction.cut is None or not fails():
            raise
        if undo is not None:
            undo()
        pruner.make_whole()
        result = action()  # raises if the sizes were not the cause
        pruner.keep_whole(f"what knows its own sizes fails at those that are left: {error}")
        return result


class Teacher(Protocol):
    """Network whose outputs the model learns to reproduce, beside the task's loss."""

    def before(self, feed: Feed, device: torch.device, autocast: str | None) -> dict[str, str]:
        """Return complaints about it before the first step, by their kind."""

    @property
    def needs_whole(self) -> str:
        """Reason why the model cannot be cut while it learns from this teacher; else empty."""

    def mixed(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """Return the task's loss mixed with what the teacher adds."""

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors for the checkpoint."""

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors that the run began with."""


class Losses:
    """Losses whose gradients add up to those of the mean over the whole batch.

    The whole batch is that of all processes, each of which computes ``accumulate`` parts one after
    another. Each part is one forward, with a separate sample of the gates.
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
        """Add the gradients of this process' part of the whole batch.

        Returns this process' share of the loss; ``scale`` is applied before backward, for fp16.
        """
        parts = self._settings.accumulate
        total: Tensor | None = None
        for number, part in enumerate(batch.parts(parts)):
            # DDP averages once, in the last backward; FSDP2 in each, which needs the least memory.
            waits = self._replica is not None and number + 1 < parts
            with self._replica.no_sync() if waits else nullcontext():  # type: ignore[union-attr]
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
        """Return whether the loss requires a gradient; UsageError if not, though weights learn."""
        if not loss.requires_grad and self._weights:
            raise UsageError(
                "The loss has no gradient, so that nothing can be learned from it. The usual cause "
                "is a loss or a forward with torch.no_grad(), detach() or a rounding in it."
            )
        return loss.requires_grad

    def _laid_out(self, inputs: Any) -> Any:
        return images_channels_last(inputs) if self._settings.channels_last else inputs

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
    """Model and loss as one module, whose only output with a gradient is the objective."""

    def __init__(
        self, model: nn.Module, loss: Judge, teacher: Teacher | None, backend: str | None
    ) -> None:
        super().__init__()
        self.model = model
        self._loss, self._teacher = loss, teacher
        # In a list, so that a compiled model is not registered as another child.
        self._runs = [model if backend is None else torch.compile(model, backend=backend)]
        gates = None if backend is None else gates_or_none(model)
        self._draws = None if gates is None else _Draws(gates)

    def forward(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return the task's mean loss, and the objective with distillation and added costs."""
        with nullcontext() if self._draws is None else self._draws.given():
            outputs = call(self._runs[0], inputs)
        loss = self._loss(outputs, targets)
        if loss is None:
            raise UsageError(
                "in train mode the model gives no loss to learn from: give loss=a function of "
                "(outputs, targets)"
            )
        teacher, extra = self._teacher, added_cost(self.model)
        learned = loss if teacher is None else teacher.mixed(loss, outputs, inputs)
        return loss.detach(), learned if extra is None else learned + extra


class _Draws:
    """Values z of the gates for a compiled model, sampled outside of the compiled code.

    The compiler would treat phases and the settings of an annealed gate as constants, and recompile
    at each change. For the same reason fixed values require a gradient if earlier ones did.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates, self._learned = gates, False

    def given(self) -> AbstractContextManager[None]:
        """Return a context in which the model's forward uses the next sample of z."""
        gates = self._gates
        gates.begin_forward()
        z = gates.current()
        gates.end_forward()
        self._learned |= z.requires_grad
        return gates.using(z if z.requires_grad else z.detach().requires_grad_(self._learned))


class Stepper:
    """Training step with its state: optimizers, schedule, moving average and loss scaler.

    ``compiling`` are the seconds of the first step at each size, if the model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: Settings,
        device: torch.device,
        pruner: GateRun | None,
        phases: Phases,
        teacher: Teacher | None,
        world: World,
    ) -> None:
        self._settings, self._pruner, self.phases = settings, pruner, phases
        self._world = world
        self.teacher = teacher
        self._weights = [p for p in weights_of(model).values() if p.requires_grad]
        self.loss_module = task.loss_module
        learned = () if self.loss_module is None else self.loss_module.parameters()
        self._of_loss = [p for p in learned if p.requires_grad]
        self._weights += self._of_loss
        for parameter in self._of_loss if world.is_shared else ():
            world.copy_from_first(parameter.data)
        loss, weights, of_loss = task.loss_in, self._weights, self._of_loss
        self._new_losses = partial(
            Losses, model, loss, teacher, settings, device, world, weights, of_loss
        )
        self._losses: Losses | None = None
        self.compiling: list[float] = []
        self.optimizers = make_optimizers(settings, self._groups())
        self._schedule = Schedule(settings, self.optimizers, self.phases)
        self.average = Average(model, settings.ema) if settings.ema else None
        self.scaler = torch.amp.GradScaler(device.type) if settings.autocast == "fp16" else None
        if pruner is not None:
            pruner.compaction.follow(self.optimizers)
            pruner.compaction.average = self.average
            # DDP replicas and compiled code are made for tensors of one size.
            pruner.compaction.let_go = lambda: setattr(self, "_losses", None)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _groups(self) -> list[dict[str, Any]]:
        rest = {"lr": self._settings.lr, "weight_decay": self._settings.weight_decay}
        if self._pruner is None:
            return [{"name": "weights", "params": self._weights, **rest}]
        of_loss = [{"name": "loss", "params": self._of_loss, **rest}] if self._of_loss else []
        return [*self._pruner.param_groups(**rest), *of_loss]

    def load(self, state: Checkpoint) -> None:
        """Restore the state of a whole model, which must have its weights already."""
        if self.average is not None:
            self.average.load(state.average, state.updates)
        for optimizer, of in zip(self.optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(sharded_state(optimizer, of))
        if self.teacher is not None:
            self.teacher.load(state.teacher)
        if self.loss_module is not None:
            put_back(self.loss_module, state.loss)
        if self.scaler is not None:
            self.scaler.load_state_dict(state.scaler)
        if self._pruner is not None:
            self._pruner.load_state_dict(state.pruner)

    def __call__(self, step: int, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Take step number ``step`` of the run, from 0; return the task's loss and the penalty.

        The loss is this process' share of it, such that the mean over all is that of the step.
        The penalty is the model's, and every process has its gradient in full.
        """
        self._schedule.set(step)
        if self._pruner is not None:
            self._begin(self._pruner)
        loss = self._backward(batch)
        self._clip()
        extra = None if self._pruner is None else self._add_penalty(self._pruner)
        self._apply_gradients()
        if self._pruner is not None:
            self._pruner.shrink()
        if self.average is not None:
            self.average.update()
        if self._pruner is not None:
            self._pruner.advance()
            if self._pruner.step == self.phases.total and self._pruner.begins_to_settle:
                self._begin(self._pruner)
        return loss, extra

    def _backward(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch and return the loss; see ``retry_uncut``.

        The user's loss or hooks may work at the whole network's sizes only: then it stays whole.
        Not with several processes, which would have to fail together.
        """
        alone = None if self._world.is_shared else self._pruner
        return retry_uncut(alone, partial(self._add_gradients, batch), self.zero_grad)

    def _add_gradients(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch at the model's present size."""
        compiles = self._losses is None and self._settings.backend is not None
        if self._losses is None:
            self._losses = self._new_losses()
        began = time.perf_counter()
        loss = self._losses.backward(batch, self._scaled)
        if compiles:
            self.compiling.append(time.perf_counter() - began)
        return loss

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _begin(self, pruner: GateRun) -> None:
        """Begin the step; if the gates are fixed from it on, install the moving averages first."""
        settles = pruner.begins_to_settle
        if settles and self.average is not None:
            self.average.install()
        pruner.begin_step()
        if settles and self.average is not None:
            self.average.restart()

    def _clip(self) -> None:
        """Clip the norm of the weights' gradient, without gates and before the penalty's part."""
        if self._settings.clip is None:
            return
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self._weights, self._settings.clip)

    def _add_penalty(self, pruner: GateRun) -> Tensor | None:
        if self.scaler is None or self._settings.clip is not None:
            return pruner.before_step()
        return pruner.before_step(scale=self._scaled(torch.ones_like(pruner.gates.log_alpha[0])))

    def _apply_gradients(self) -> None:
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
