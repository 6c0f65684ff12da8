"""Train a gated model, or one without gates, by the same loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from l0prune.capture.copying import inside
from l0prune.doors import provided
from l0prune.errors import FileError, Interrupted, UsageError
from l0prune.files.around import Around
from l0prune.files.atomic import claimed
from l0prune.gating.attaching import bypass, check_ungated, gates_of, put_back_rounding
from l0prune.gating.bank import Gates
from l0prune.gating.kinds.base import Gate
from l0prune.progress.stages import stage
from l0prune.running import rng
from l0prune.running.batches import Feed, usual_batch_size
from l0prune.running.device import choose_device, device_of, on_device, train_mode
from l0prune.running.evaluate import check_first_batch, check_first_test
from l0prune.running.processes import World, process_group
from l0prune.running.sources import has_targets, with_pseudo_labels
from l0prune.running.task import ERROR, Task
from l0prune.training import checkpoint, start
from l0prune.training.compaction import whole_in_the_end
from l0prune.training.gate_run import GateRun, planned
from l0prune.training.gate_settings import GATES, GSM
from l0prune.training.history import History
from l0prune.training.keywords import DenseKeywords, Keywords
from l0prune.training.loop import Interrupt, Loop
from l0prune.training.phases import Phases
from l0prune.training.settings import DenseSettings, Settings
from l0prune.training.standing import Standing, report_frozen
from l0prune.training.stepper import Teacher
from l0prune.training.wrappers import agree_on_start, channels_last, checkpointed, sharded

OF_GATES = tuple(Settings.model_fields.keys() - DenseSettings.model_fields.keys())


def finetune(model: nn.Module, data: Any, **settings: Unpack[Keywords]) -> History:
    """Run ``l0prune.finetune`` without the report's page."""
    return _train(model, data, Settings.of(settings), gates_of(model))


def train_dense(model: nn.Module, data: Any, **settings: Unpack[DenseKeywords]) -> History:
    """Run ``l0prune.train_dense`` without the report's page."""
    for name in settings:
        if name in OF_GATES:
            raise UsageError(f"{name} is a setting of gates, and this model is trained without")
    if settings.get("optimizer") == GSM:
        raise UsageError(
            "optimizer='gsm' closes slots, and this model is trained without gates, which close "
            "them: gate it with l0prune.gate, then finetune(…, optimizer='gsm', budget=…)"
        )
    check_ungated(model)
    return _train(model, data, Settings.of(settings), None)


def _train(model: nn.Module, data: Any, settings: Settings, gates: Gates | None) -> History:
    if gates is not None and settings.learn is True and settings.penalty is None:
        report_frozen(model)
    if settings.learn == GATES and not has_targets(data):
        with bypass(model), stage("answering the inputs"):
            data = with_pseudo_labels(data, model, device=settings.device)
    task = with_own_loss(Task.of(data, settings.loss, settings.metric), model)
    if "batch_size" not in settings.model_fields_set:
        size = max(usual_batch_size(task.train), settings.accumulate)
        settings = settings.model_copy(update={"batch_size": size})
    with process_group(wanted=settings.distributed is not None) as world, ExitStack() as stack:
        if (out := settings.out) is not None:
            world.first_alone(lambda: stack.enter_context(claimed(Path(out))))
        if settings.learn == GATES:
            stack.callback(Standing(model, task.loss_module).release)
        with put_back_rounding(model):
            return _train_in(world, model, task, settings, gates)


def with_own_loss(task: Task, model: nn.Module) -> Task:
    """Return the task with the loss of what is around the network, if any; metrics stay."""
    network = inside(model)

    def loss(answer: Any, targets: Any) -> Tensor:
        found = task.loss_in(answer, targets)
        assert found is not None
        return found

    mixed = network.own_loss(loss) if isinstance(network, Around) else None
    if mixed is None:
        return task
    if isinstance(task.loss, nn.Module):
        mixed.of = task.loss  # its parameters learn, too
    metric = ERROR if task.metric is None and task.metric_name == ERROR else task.metric
    return replace(task, loss=mixed, metric=metric)


def _taught(
    model: nn.Module, settings: Settings, origin: nn.Module
) -> AbstractContextManager[Teacher | None]:
    """Return the context that provides the teacher, if one is asked for."""
    if not settings.distill:
        return nullcontext()
    found: AbstractContextManager[Teacher] = provided("taught")(model, settings, origin=origin)
    return found


def _train_in(
    world: World, model: nn.Module, task: Task, settings: Settings, gates: Gates | None
) -> History:
    device, home = choose_device(settings.device, model, world), device_of(model)
    part = (world.rank, world.size)
    feed = Feed(task, settings.batch_size, settings.seed, settings.augment, part)
    if gates is None:
        phases, pruner = Phases.dense(settings.epochs, feed.steps), None
    else:
        phases = _phases(settings, feed.steps)
        if settings.penalty == GSM:
            settings = provided("gsm_defaults")(settings, phases.learning)
        known = (settings, phases, feed.size, settings.compact_when)
        pruner = GateRun(model, *known)
    folder = None if settings.out is None else Path(settings.out)
    interrupt = Interrupt(world)
    kind = None if gates is None else gates.gate
    own = feed.generators()
    with _undone(model, task, gates, world) as found:
        agree_on_start(model, world)
        started_from = checkpoint.digest(checkpoint.snapshot(model) if world.is_shared else found)
        goes_on = settings.resume and folder is not None and (folder / checkpoint.NAME).exists()
        begun = start.Beginning()
        scored = pruner is not None and settings.penalty is None
        if pruner is not None and scored and not world.from_first(goes_on):
            learning, budget = pruner.phases.learning, pruner.budget
            begun = start.init_gates(model, settings, learning, budget, feed, device, world)
        with (
            interrupt.caught(),
            _placed(model, device, settings, world) as trained,
            task.on_device(device),
            train_mode(trained),
            _taught(trained, settings, model) as teacher,
            rng.preserved(device, own),
        ):
            for generator in own:
                generator.set_state(world.from_first(generator.get_state()))
            with rng.preserved(device, own):
                check_first_batch(trained, feed, device, settings.autocast)
                check_first_test(trained, feed, device, settings.autocast)
            rng.seed_all(settings.seed, world.rank)
            fingerprint = _fingerprint(settings, feed, world, kind)
            if pruner is not None and (begun.said or trained is not model or device != home):
                pruner = GateRun(trained, *known)  # with tensors on the present device
            if pruner is not None and begun.decided and settings.branch_freeze_fraction is None:
                pruner.freeze_branches()
            loop = Loop(
                trained,
                feed,
                settings,
                device,
                phases,
                pruner,
                teacher,
                interrupt,
                started_from,
                fingerprint,
                world,
            )
            with whole_in_the_end(None if pruner is None else pruner.compaction):
                if folder is not None:
                    _prepare(folder, loop, settings, started_from, fingerprint, world)
                if begun.said:
                    loop.note(begun.said)
                loop.run()
    return loop.history


@contextmanager
def _undone(
    model: nn.Module, task: Task, gates: Gates | None, world: World
) -> Iterator[dict[str, Tensor]]:
    """Yield the model's tensors, and restore model, loss and gates if training fails."""
    # Several processes take all weights from the first one.
    found = checkpoint.snapshot(model, shares_frozen=not world.is_shared)
    learns = task.loss_module
    of_loss = {} if learns is None else checkpoint.snapshot(learns)
    before = None if gates is None else (gates.fixed, gates.gate)
    try:
        yield found
    except Interrupted:
        raise
    except BaseException:
        checkpoint.put_back(model, found)
        if learns is not None:
            checkpoint.put_back(learns, of_loss)
        if gates is not None and before is not None:
            gates.gate = before[1]
        raise
    finally:
        if gates is not None and before is not None:
            gates.fixed = before[0]


def _fingerprint(settings: Settings, feed: Feed, world: World, kind: Gate | None) -> dict[str, str]:
    """Return the settings that decide the run's numbers; without gates, none of those of gates."""
    found = checkpoint.fingerprint(settings, feed.task)
    found |= {"N": str(feed.size), "processes": str(world.size)}
    if kind is not None:
        return found | {"gate": str(kind.at(0))}
    return {name: value for name, value in found.items() if name not in OF_GATES}


def _phases(settings: Settings, steps: int) -> Phases:
    """Return the phases of a run with gates."""
    if not settings.learn:
        return Phases.settling(settings.epochs, steps)
    warmup, settle = (
        None if epochs is None else round(epochs * steps)
        for epochs in (settings.warmup, settings.settle)
    )
    return planned(settings, settings.epochs * steps, warmup, settle)


@contextmanager
def _placed(
    model: nn.Module, device: torch.device, settings: Settings, world: World
) -> Iterator[nn.Module]:
    """Place the model, or a copy in shards, on ``device`` in the wanted layout."""
    with ExitStack() as stack:
        if world.is_shared and settings.distributed == "fsdp":
            if settings.channels_last:
                raise UsageError("channels_last cannot be used with FSDP (distributed='fsdp')")
            if settings.autocast == "fp16":
                raise UsageError("FSDP has no loss scaling for fp16: use autocast='bf16'")
            trained = stack.enter_context(sharded(model, device, settings.backend, world))
        else:
            stack.enter_context(on_device(model, device))
            stack.enter_context(channels_last(model, settings.channels_last))
            trained = model
        if settings.checkpointing:
            stack.enter_context(checkpointed(trained))
        yield trained


def _prepare(
    folder: Path,
    loop: Loop,
    settings: Settings,
    model: str,
    fingerprint: dict[str, str],
    world: World,
) -> None:
    """Resume from the folder's checkpoint, or delete it for a new run."""
    path = folder / checkpoint.NAME
    if not settings.resume:
        world.first_alone(lambda: path.unlink(missing_ok=True))
        return
    if not world.from_first(path.exists()):
        return
    state = checkpoint.read(folder)
    if state is None:
        raise FileError(
            f"process {world.rank} does not see {path}, from which the first process goes on; put "
            "out where all machines see it"
        )
    finished = state.epoch >= settings.epochs
    changed = state.check(fingerprint, model, finished)
    try:
        loop.go_on_from(state)
    # A damaged file may raise any of these errors.
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise FileError(f"{path} is damaged: {error!r}") from error
    if not finished:
        changes = f", with changes: {', '.join(changed)}" if changed else ""
        loop.note(f"resuming in epoch {state.epoch + 1}, step {state.step} from {folder}{changes}")
