"""The training loop: steps, averages, measurements and checkpoints of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from l0prune.errors import DataError
from l0prune.finetune import rng
from l0prune.finetune.checkpoint import Checkpoint, digest, put_back, snapshot
from l0prune.finetune.diverged import diverged
from l0prune.finetune.doctor import Doctor
from l0prune.finetune.evaluate import measure
from l0prune.finetune.feed import Feed, test_batches
from l0prune.finetune.history import History, Log, Record
from l0prune.finetune.interrupt import Interrupt, Interrupted
from l0prune.finetune.meter import Meter, NotFinite
from l0prune.finetune.phases import Phases
from l0prune.finetune.progress import Display
from l0prune.finetune.pruning import Pruning
from l0prune.finetune.recalibrate import recalibrate
from l0prune.finetune.settings import Settings
from l0prune.finetune.stepper import Stepper


class Loop:
    """One run of a model that is on its device and in the mode in which it trains.

    Attributes:
        history: what was measured so far.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        settings: Settings,
        device: torch.device,
        phases: Phases,
        pruning: Pruning | None,
        interrupt: Interrupt,
        started_from: str,
        fingerprint: dict[str, str],
    ) -> None:
        self._model, self._feed, self._settings = model, feed, settings
        self._device, self._pruning, self._interrupt = device, pruning, interrupt
        self._task = feed.task
        self._stepper = Stepper(model, self._task.loss, settings, device, pruning, phases)
        self._average = self._stepper.average
        self._doctor = None if pruning is None else Doctor(pruning, phases, pruning.gate_lr)
        self._folder = None if settings.out is None else Path(settings.out)
        self._display = Display(settings.epochs, feed.steps, shown=settings.progress)
        self._log: Log | None = None
        self.history = History(metric=self._task.metric_name)
        self._started_from = started_from
        self._fingerprint = fingerprint
        self._epoch, self._step, self._seconds = 0, 0, 0.0
        self._meter = Meter(forgiving=self._stepper.scaler is not None)
        self._rng_of_epoch: rng.State | None = None

    def go_on_from(self, state: Checkpoint) -> None:
        """Take up a run where ``state`` left it.

        Raises:
            FileError: it is the state of another model.
        """
        put_back(self._model, state.model)
        self._epoch, self._step = state.epoch, state.step
        self._stepper.load(state, self._done)
        loss, penalty, count, self._seconds = state.losses
        self._meter = Meter(
            forgiving=self._stepper.scaler is not None, loss=loss, penalty=penalty, count=count
        )
        self._rng_of_epoch = state.rng_epoch
        rng.restore(state.rng, self._device, self._feed.generators())
        self.history.records = state.records
        if self._doctor is not None:
            self._doctor.go_on_from(state.records)
        self._started_from = state.models[0]

    def run(self) -> None:
        """All epochs that are left; then the model is the one that was measured last.

        Raises:
            TrainingError: a loss or a weight became nan or inf.
            Interrupted: Ctrl-C or SIGTERM; the checkpoint, if any, is written.
            FileError: the checkpoint or the metrics cannot be written.
        """
        if self._folder is not None:
            records, curves = self.history.records, self._settings.tensorboard
            self._log = Log(self._folder, records, curves)
        self._display.start(self._done)
        if self._doctor is not None and not self._done:
            self._complain(self._doctor.before(self._stepper.optimizers))
        try:
            while self._epoch < self._settings.epochs:
                self._train_epoch()
                self._finish_epoch(self._measured())
        except Interrupted as stop:
            self._look()
            raise Interrupted(stop.signal, self._leave()) from None
        finally:
            self._stepper.close()
            self._display.close()
            if self._log is not None:
                self._log.close()
        if self._average is not None:
            self._average.install()

    def note(self, text: str) -> None:
        """Tell the user."""
        self._display.note(text)

    @property
    def _done(self) -> int:
        """Steps of the run that are done."""
        return self._epoch * self._feed.steps + self._step

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        """The batches of this epoch that are left."""
        own = self._feed.generators()
        now = rng.capture(self._device, own)
        if self._rng_of_epoch is None:
            self._rng_of_epoch = now
        # A source draws its order from generators as they were when the epoch began.
        rng.restore(self._rng_of_epoch, self._device, own)
        batches = self._feed.train(self._epoch, self._device)
        for _ in islice(batches, self._step):
            pass
        if self._step:
            rng.restore(now, self._device, own)
        return batches

    def _train_epoch(self) -> None:
        """The steps of this epoch that are left."""
        batches = self._batches()
        began = time.perf_counter() - self._seconds
        for inputs, targets in batches:
            self._meter.add(*self._stepper(self._done, inputs, targets))
            self._step += 1
            self._seconds = time.perf_counter() - began
            if self._meter.is_due:
                self._look()
            self._display.step(self._done, self._stepper.phases.at(self._done - 1))
            self._interrupt.check()
        self._look()
        self._seconds = time.perf_counter() - began
        if self._step < self._feed.steps:
            raise DataError(
                f"an epoch of the training data had {self._step} batches, not {self._feed.steps} "
                "as announced; say how many there are with Task(…, steps=…)"
            )

    def _measured(self) -> Record:
        """The record of the epoch: its means, and the averaged model in eval mode."""
        self._check_weights()
        loss, penalty = self._meter.means()
        record: Record = {
            "epoch": self._epoch + 1,
            "step": self._done,
            "phase": self._phase,
            "seconds": self._seconds,
            "lr": self._stepper.rate,
            "train_loss": loss,
            "penalty": penalty,
        }
        own = self._feed.generators()
        with rng.undisturbed(self._device, own), self._averaged():
            if self._recalibrates:
                self._recalibrate()
            if self._task.test is not None:
                batches = test_batches(self._task, self._feed.batch_size, self._device)
                autocast, check = self._settings.autocast, self._interrupt.check
                record |= measure(self._model, batches, self._task, self._device, autocast, check)
            if self._pruning is not None:
                record |= self._pruning.record()
            if self._doctor is not None and (complaints := self._doctor.after(record)):
                record["doctor"] = complaints
        return record

    def _complain(self, complaints: dict[str, str]) -> None:
        for text in complaints.values():
            self.note(f"doctor: {text}")

    @property
    def _phase(self) -> str:
        """The phase of the step that was done last."""
        return self._stepper.phases.at(self._done - 1) if self._pruning is not None else "dense"

    @property
    def _recalibrates(self) -> bool:
        last = self._epoch + 1 == self._settings.epochs
        return self._settings.recalibrate > 0 and (last or self._phase == "settle")

    def _recalibrate(self) -> None:
        batches = islice(self._feed.train(self._epoch, self._device), self._settings.recalibrate)
        buffers = recalibrate(self._model, batches, self._device, self._settings.autocast)
        if self._average is not None:
            self._average.adopt(buffers)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within the context the model has its averaged values."""
        if self._average is None:
            yield
            return
        self._average.show()
        try:
            yield
        finally:
            self._average.hide()

    def _finish_epoch(self, record: Record) -> None:
        self.history.records.append(record)
        if self._log is not None:
            self._log.write(record)
        self._display.epoch(record)
        self._complain(record.get("doctor", {}))
        self._epoch, self._step, self._seconds = self._epoch + 1, 0, 0.0
        self._meter = Meter(forgiving=self._stepper.scaler is not None)
        self._rng_of_epoch = None
        self._save(leaves_it=self._epoch == self._settings.epochs)

    def _leave(self) -> str:
        """Write the checkpoint, leave the averaged model, and say how to go on."""
        self._check_weights()
        self._save(leaves_it=True)
        if self._average is not None:
            self._average.install()
        where = f"training stopped in epoch {self._epoch + 1}, step {self._step}"
        if self._folder is None:
            return f"{where}; without out there is no checkpoint to go on from"
        return f"{where}; the checkpoint is in {self._folder}, and resume=True goes on from there"

    def _save(self, *, leaves_it: bool) -> None:
        """Write the checkpoint; ``leaves_it`` if the model is left as it is averaged now."""
        if self._folder is None:
            return
        models = [self._started_from]
        if leaves_it:
            with self._averaged():
                models.append(digest(snapshot(self._model)))
        average = self._average
        Checkpoint(
            settings=self._fingerprint,
            models=models,
            model=snapshot(self._model),
            optimizers=[each.state_dict() for each in self._stepper.optimizers],
            budget={} if self._pruning is None else self._pruning.state(),
            teacher={} if self._stepper.teacher is None else self._stepper.teacher.tensors(),
            average={} if average is None else average.tensors(),
            updates=0 if average is None else average.updates,
            scaler={} if self._stepper.scaler is None else self._stepper.scaler.state_dict(),
            epoch=self._epoch,
            step=self._step,
            losses=(self._meter.loss, self._meter.penalty, self._meter.count, self._seconds),
            rng_epoch=self._rng_of_epoch,
            rng=rng.capture(self._device, self._feed.generators()),
            records=self.history.records,
        ).write(self._folder)

    def _look(self) -> None:
        """Fetch the losses since the last time, and stop if one is no number."""
        try:
            mean = self._meter.look()
        except NotFinite as error:
            self._give_up(f"the loss is {error.value}", self._step - error.ago)
        if mean is not None:
            self._display.loss(mean)

    def _check_weights(self) -> None:
        """Stop if a parameter is no number, before anything is written that is no good."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
                self._give_up(f"{name} holds nan or inf", self._step)

    def _give_up(self, what: str, step: int) -> NoReturn:
        done = self.history.last["epoch"] if self.history.records else 0
        where = f"epoch {self._epoch + 1}, step {step}"
        raise diverged(what, where, self._settings, done, gated=self._pruning is not None)
