"""The training loop: steps, averages, measurements, checkpoints and signals of one run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from l0prune.data.preprocessing import Preprocessing
from l0prune.errors import DataError, Interrupted
from l0prune.gating.attaching import bypass
from l0prune.running import rng
from l0prune.running.batches import Batch, Feed, test_batches
from l0prune.running.environment import device_name, environment
from l0prune.running.evaluate import evaluate_batches, recalibrate
from l0prune.running.processes import ALONE, World, full_state, to_local
from l0prune.running.sources import loss_of_mean
from l0prune.training import phases
from l0prune.training.checkpoint import Checkpoint, digest, put_back, snapshot
from l0prune.training.doctor import costly_compiling, diverged, no_better_than_mean, parted
from l0prune.training.gate_run import GateRun
from l0prune.training.history import Display, History, Log, Meter, NotFinite, Record, measured
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings
from l0prune.training.stepper import Stepper, Teacher, retry_uncut
from l0prune.training.wrappers import average_buffers


def facts_of(
    settings: Settings,
    fingerprint: Mapping[str, str],
    phases: Phases,
    device: torch.device,
    preprocessing: Preprocessing | None = None,
) -> dict[str, Any]:
    """Return settings, phases, command, versions, machine and preprocessing as plain data."""
    return {
        "epochs": settings.epochs,
        "steps": phases.total,
        "warmup": phases.warmup,
        "settle": phases.settle,
        "seed": settings.seed,
        "settings": dict(fingerprint),
        "device": device_name(device),
        "preprocessing": None if preprocessing is None else preprocessing.model_dump(),
        **environment(),
    }


# Signals within this time are one: a terminal and torchrun both pass Ctrl-C on to each process.
_ECHO = 10.0  # seconds


class Interrupt:
    """Deferred signal, raised by ``check`` in all processes of ``world`` together."""

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._number: int | None = None
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal has come, to this process or another."""
        number = self._world.highest(self._number or 0)
        if number:
            raise Interrupted(number)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Defer the first signal within the context; a second one acts as usual.

        Only the main thread can do this; in other threads signals act as usual.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._remember)
        try:
            yield
        finally:
            self._release()

    def _remember(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._number is None:
            self._number, self._when = number, now
            if not self._world.is_shared:
                self._release()
        elif now - self._when > _ECHO:
            self._release()
            signal.raise_signal(number)

    def _release(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            # A handler that was not installed from Python is None, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}


class Loop:
    """Training run of a model that is already on its device and in its training mode."""

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        settings: Settings,
        device: torch.device,
        phases: Phases,
        pruner: GateRun | None,
        teacher: Teacher | None,
        interrupt: Interrupt,
        started_from: str,
        fingerprint: dict[str, str],
        world: World,
    ) -> None:
        self._model, self._feed, self._settings = model, feed, settings
        self._device, self._pruner, self._interrupt = device, pruner, interrupt
        self._task, self._world = feed.task, world
        self._stepper = Stepper(model, self._task, settings, device, pruner, phases, teacher, world)
        self._average = self._stepper.average
        self._folder = None if settings.out is None else Path(settings.out)
        shown = settings.progress and world.is_first
        self._display = Display(settings.epochs, feed.steps, shown=shown)
        if pruner is not None:
            pruner.say = self.note
        self._log: Log | None = None
        self.history = History(
            metric=self._task.metric_name,
            larger_is_better=bool(self._task.larger_is_better),
        )
        self._started_from = started_from
        self._fingerprint = fingerprint
        self._epoch, self._step, self._seconds = 0, 0, 0.0
        self._before: dict[str, float] = {}
        self._meter = self._new_meter()
        self._rng_of_epoch: rng.State | None = None

    def go_on_from(self, state: Checkpoint) -> None:
        """Resume the run from the checkpoint ``state``."""
        put_back(self._model, state.model)
        self._epoch, self._step = state.epoch, state.step
        self._stepper.load(state)
        loss, penalty, count, self._seconds = state.losses
        self._meter = self._new_meter(loss, penalty, count)
        rank = self._world.rank
        self._rng_of_epoch = None if state.rng_epoch is None else state.rng_epoch[rank]
        rng.restore(state.rng[rank], self._device, self._feed.generators())
        self.history.records, self._before = state.records, state.before
        if self._pruner is not None:
            self._pruner.doctor.go_on_from(state.records)
        self._started_from = state.models[0]

    def _new_meter(self, loss: float = 0.0, penalty: float = 0.0, count: int = 0) -> Meter:
        forgiving, world = self._stepper.scaler is not None, self._world
        return Meter(forgiving=forgiving, loss=loss, penalty=penalty, count=count, world=world)

    def run(self) -> None:
        """Train the remaining epochs, and leave the model as it was last measured."""
        folder, curves = self._folder, self._settings.tensorboard
        phases = self._stepper.phases
        fingerprint = self._fingerprint
        known = self._feed.task.preprocessing
        self.history.facts = facts_of(self._settings, fingerprint, phases, self._device, known)
        if self._pruner is not None and known is not None:
            self._pruner.gates.facts["preprocessing"] = known.model_dump()
        if folder is not None:
            self._log = self._world.first_alone(lambda: Log(folder, self.history, curves))
        self._display.start(self._done)
        if self._pruner is not None:
            teacher = self._stepper.teacher
            self._pruner.look_ahead("" if teacher is None else teacher.needs_whole)
        if not self._done:
            self._examine()
        try:
            if not self._done:
                with self._display.testing():
                    self._before = self._measured_before()
                if self._before and not self._done:
                    self.note(
                        f"before training, without gates: {', '.join(measured(self._before))}"
                    )
            while self._epoch < self._settings.epochs:
                self._train_epoch()
                self._finish_epoch(self._measured())
            training = sum(record["seconds"] for record in self.history.records)
            self._complain(costly_compiling(self._stepper.compiling, training))
            self._complain(no_better_than_mean(self.history.records, loss_of_mean(self._task)))
        except Interrupted as stop:
            self._look()
            raise Interrupted(stop.signal, self._leave()) from None
        finally:
            self._stepper.zero_grad()
            self._display.close()
            if self._log is not None:
                self._log.close()
        if self._average is not None:
            self._average.install()

    def _examine(self) -> None:
        """Report problems that are known before the first step."""
        if self._pruner is not None:
            self._complain(self._pruner.doctor.before(self._stepper.optimizers))
        if (teacher := self._stepper.teacher) is not None:
            with rng.preserved(self._device, self._feed.generators()):
                self._complain(teacher.before(self._feed, self._device, self._settings.autocast))

    def note(self, text: str) -> None:
        """Show a message to the user."""
        self._display.note(text)

    @property
    def _done(self) -> int:
        """Steps of the run that are done."""
        return self._epoch * self._feed.steps + self._step

    def _batches(self) -> Iterator[Batch]:
        """Return the remaining batches of this epoch."""
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
        """Run the remaining steps of this epoch."""
        batches = self._batches()
        began = time.perf_counter() - self._seconds
        for batch in batches:
            self._meter.add(*self._stepper(self._done, batch))
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
        """Return the epoch's record: mean losses, and tests of the averaged model in eval mode."""
        self._agree_on_buffers()
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
        own, alone = self._feed.generators(), None if self._world.is_shared else self._pruner
        with rng.preserved(self._device, own):
            record = retry_uncut(alone, partial(self._with_test, record))
        return self._world.from_first(record)

    def _with_test(self, record: Record) -> Record:
        """Complete the record by measurements of the averaged model."""
        with self._averaged():
            last = self._epoch + 1 == self._settings.epochs
            if self._settings.recalibrate > 0 and (last or self._phase == "settle"):
                self._recalibrate()
            record = record | self._tested()
            if self._before and not self.history.records:
                record["before"] = self._before
            if self._pruner is not None:
                record |= self._pruner.record()
                if complaints := self._pruner.doctor.after(record):
                    record["doctor"] = complaints
        if found := parted([*self.history.records, record], augment=self._settings.augment):
            record["doctor"] = record.get("doctor", {}) | found
        return record

    def _measured_before(self) -> dict[str, float]:
        """Test the model with its gates bypassed; empty without gates."""
        if self._pruner is None:
            return {}
        with rng.preserved(self._device, self._feed.generators()), bypass(self._model):
            return self._tested()

    def _tested(self) -> dict[str, float]:
        """Return loss and metric on the test data; empty without test data."""
        if self._task.test is None:
            return {}
        feed, autocast = self._feed, self._settings.autocast
        batches = test_batches(self._task, feed.batch_size, self._device, feed.part)
        between, world = self._interrupt.check, self._world
        return evaluate_batches(
            self._model, batches, self._task, self._device, autocast, between, world
        )

    def _complain(self, complaints: dict[str, str]) -> None:
        for text in complaints.values():
            self.note(f"doctor: {text}")

    @property
    def _phase(self) -> str:
        """Phase of the last step that is done."""
        return self._stepper.phases.at(self._done - 1) if self._pruner is not None else "dense"

    def _recalibrate(self) -> None:
        batches = islice(self._feed.train(self._epoch, self._device), self._settings.recalibrate)
        buffers = recalibrate(self._model, batches, self._device, self._settings.autocast)
        average_buffers(buffers, self._world)
        if self._average is not None:
            self._average.adopt(buffers)

    def _agree_on_buffers(self) -> None:
        """Average running statistics, and their moving averages, over all processes."""
        average_buffers(self._model.buffers(), self._world)
        if self._average is not None:
            average_buffers(self._average.buffers(), self._world)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Give the model its averaged values within the context."""
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
        log = self._log
        self._world.first_alone(lambda: None if log is None else log.write(record))
        self._display.epoch(record)
        self._complain(record.get("doctor", {}))
        self._epoch, self._step, self._seconds = self._epoch + 1, 0, 0.0
        self._meter = self._new_meter()
        self._rng_of_epoch = None
        self._save(leaves_it=self._epoch == self._settings.epochs)
        self._world.first_alone(lambda: phases.done(self.history))

    def _leave(self) -> str:
        """Write the checkpoint, install the averaged model, and return how to go on."""
        self._agree_on_buffers()
        self._check_weights()
        self._save(leaves_it=True)
        if self._average is not None:
            self._average.install()
        where = f"training stopped in epoch {self._epoch + 1}, step {self._step}"
        if self._folder is None:
            return f"{where}; without out there is no checkpoint to go on from"
        return (
            f"{where}; the checkpoint is in {self._folder}, and resume=True goes on from there "
            "(commands do so by themselves)"
        )

    def _save(self, *, leaves_it: bool) -> None:
        """Write the checkpoint; ``leaves_it`` if the run leaves the model with its averages now."""
        if self._folder is None:
            return
        models = [self._started_from]
        if leaves_it:
            with self._averaged():
                models.append(digest(self._in_whole(snapshot(self._model))))
        average, folder, gather = self._average, self._folder, self._world.gather
        state = Checkpoint(
            settings=self._fingerprint,
            models=models,
            model=self._in_whole(snapshot(self._model)),
            optimizers=[full_state(each) for each in self._stepper.optimizers],
            pruner={} if self._pruner is None else self._pruner.state_dict(),
            teacher={} if self._stepper.teacher is None else self._stepper.teacher.tensors(),
            loss={} if (loss := self._stepper.loss_module) is None else snapshot(loss),
            average={} if average is None else self._in_whole(average.tensors()),
            updates=0 if average is None else average.updates,
            scaler={} if self._stepper.scaler is None else self._stepper.scaler.state_dict(),
            epoch=self._epoch,
            step=self._step,
            losses=(self._meter.loss, self._meter.penalty, self._meter.count, self._seconds),
            rng_epoch=None if self._rng_of_epoch is None else gather(self._rng_of_epoch),
            rng=gather(rng.capture(self._device, self._feed.generators())),
            records=self.history.records,
            before=self._before,
        )
        self._world.first_alone(lambda: state.write(folder))

    def _in_whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Expand tensors of a cut model to those of the whole one."""
        return tensors if self._pruner is None else self._pruner.compaction.in_whole(tensors)

    def _look(self) -> None:
        """Fetch the losses since the last call, and raise an error if one is nan or inf."""
        try:
            mean = self._meter.look()
        except NotFinite as error:
            self._give_up(f"the loss is {error.value}", self._step - error.ago)
        if mean is not None:
            self._display.loss(mean)

    def _check_weights(self) -> None:
        """Raise an error if a parameter is nan or inf, before such weights are saved."""
        learned = ((n, to_local(p)) for n, p in self._model.named_parameters() if p.requires_grad)
        bad = next((name for name, p in learned if not bool(torch.isfinite(p).all())), None)
        for name in self._world.gather(bad):
            if name is not None:
                self._give_up(f"{name} holds nan or inf", self._step)

    def _give_up(self, what: str, step: int) -> NoReturn:
        done = self.history.last["epoch"] if self.history.records else 0
        where = f"epoch {self._epoch + 1}, step {step}"
        raise diverged(what, where, self._settings, done, gated=self._pruner is not None)
