"""``Pruner``: the gates of a model in any training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Unpack
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.errors import UsageError, warn
from l0prune.files.around import all_around
from l0prune.gating.attaching import gates_of
from l0prune.gating.bank import asked_of
from l0prune.plan.numbers import check_whole
from l0prune.progress.display import shown
from l0prune.running.criteria import Loss
from l0prune.running.task import amounts
from l0prune.training.averages import excess_of
from l0prune.training.gate_run import BETAS, GateRun, planned
from l0prune.training.gate_settings import GATES, GateSettings
from l0prune.training.keywords import GateKeywords
from l0prune.training.optimizers import OwnOptimizer, bare
from l0prune.training.phases import Phases
from l0prune.training.settings import AUTO, NOTHING_SETTLES
from l0prune.training.standing import Standing, report_frozen
from l0prune.training.start import init_gates_from
from l0prune.training.wrapping import Wrap, Wrapping

_CALLS = 3  # of one method without the other, after which a warning is given
_NO_AFTER = (
    f"pruner.before_step() was called {_CALLS} times without pruner.after_step(): the run stays at "
    "its first step, and the gates never meet the budget. Call after_step() after each step of the "
    "optimizer"
)
_NO_BEFORE = (
    f"pruner.after_step() was called {_CALLS} times without pruner.before_step(): the gates feel "
    "neither penalty nor budget. Call before_step(optimizer) after backward, before each step"
)
_NOT_BEGUN = (
    "a Pruner was made for this model, and neither its before_step(optimizer) nor its after_step() "
    "was called: the gates have not learned, and an export has the slots that were open before. "
    "Call both in each step of the loop"
)


def _unfinished(pruner: ref[Pruner], open_: Tensor) -> str:
    """Return a warning if the run has not begun, or its gates exceed the budget; else empty."""
    run = pruner()
    if run is not None and not (run.step or run._pending):
        return _NOT_BEGUN
    if run is None or run.budget is None:
        return ""
    found = excess_of(run.budget, open_)
    return found and (
        f"the gates exceed the budget of the loop that trains them: an export has {found}. After "
        f"{run.step} of {run.phases.total} steps they are not fitted to it yet: call "
        "pruner.finish() before the export"
    )


class Pruner(GateRun):
    """Training of gates in any loop: phases, λ or budgets, annealing, fitting, and warnings.

    In a training loop of your own::

        pruner = l0prune.Pruner(model, budget="macs=0.5", steps=len(batches) * epochs)
        optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-3, weight_decay=0.01))
        for inputs, targets in batches:
            criterion(model(inputs), targets).backward()
            pruner.before_step(optimizer)  # after accumulation and clipping
            optimizer.step()
            pruner.after_step()
            optimizer.zero_grad()

    First λ warms up, then the network is pruned; at the end the gates are fixed, after the last of
    them were opened and closed so that an export just meets the budgets, and the weights settle.

    The gates learn by a separate optimizer, so that clipping, weight decay and schedules of
    learning rates do not reach them. Where other code makes the optimizer, over whatever
    parameters, ``take_gates()`` does the same.

    With ``learn="gates"`` the weights and BatchNorm statistics are frozen until the last step or
    ``finish()``: the loop has no optimizer, and calls ``before_step()`` and ``after_step()``.

    Attributes:
        model: the gated model.
        gates: its bank.
        phases: where each phase ends, in steps.
        step: optimizer steps that are done.
        compaction: the cut of the model, while its gates are fixed or learn.
        say: function called with the text of each warning.
        doctor: diagnoses of gates that do not learn or close as they should.

    Args:
        model: a gated model.
        steps: optimizer steps of the whole run.
        n: N, the number of training examples, for λ that is written in it, and for ``prior``.
        warmup: steps over which λ rises from 0, by default 5 % of them.
        settle: steps at the end in which the gates are fixed, by default 30 %.
        wrap: where several processes train the model, function that wraps it in DDP or FSDP2, as
            ``lambda model: DistributedDataParallel(model)``: called with the plain model, before
            the first step and after each cut. The loop then calls ``pruner.network``.
        say: function called with each warning's text; by default it is a Python warning.
        progress: whether long work is shown on stderr: the network is timed here and, under a
            budget in time, again when gates are fixed.
        **settings: see ``GateSettings``.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a setting makes no sense, or a budget cannot be met.
    """

    in_own_loop = True

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int,
        n: int | None = None,
        warmup: int | None = None,
        settle: int | None = None,
        wrap: Wrap | None = None,
        say: Callable[[str], None] | None = None,
        progress: bool = True,
        **settings: Unpack[GateKeywords],
    ) -> None:
        gates_of(model)  # raise NotGated before errors of settings
        known = GateSettings.of(settings)
        phases = _phases(known, steps, warmup, settle)
        compact = known.compact if "compact" in settings else "never"
        self._shows = progress
        with shown(progress):
            super().__init__(model, known, phases, n, compact, say or warn)
        self._wrapping = None if wrap is None else self._wrapped_by(wrap)
        self._own: OwnOptimizer | None = None
        self._pending = self._unprepared = 0  # calls of before_step, of after_step without one
        self._standing = Standing(model) if known.learn == GATES else None
        if self._standing is not None:
            self.take_gates()
        asked_of[self.gates] = partial(_unfinished, ref(self))
        self.begin_step()

    def _wrapped_by(self, wrap: Wrap) -> Wrapping:
        compaction, settings = self.compaction, self._settings
        if settings.penalty is not None or settings.quantize is not None or settings.learn == GATES:
            raise UsageError(
                "wrap=… goes with weights and gates that learn by λ or a budget: leave out "
                "penalty, quantize and learn='gates', or train in one process"
            )
        found = Wrapping(self.model, self.gates, wrap, lambda: compaction.optimizers)
        compaction.take_off = found.take_off
        return found

    @property
    def network(self) -> nn.Module:
        """The network that a loop with ``wrap`` calls: in DDP or FSDP2, made anew after each cut.

        Without ``wrap``, and after the last step, the model itself. The model should be on its
        training device before this is first read.
        """
        return self.model if self._wrapping is None else self._wrapping.put_on()

    def start_from(
        self,
        data: Any,
        *,
        start: str = AUTO,
        oneshot_fraction: float = 0.5,
        loss: Loss | str | None = None,
        batch_size: int = 100,
        device: str | torch.device = "auto",
        seed: int = 0,
    ) -> str:
        """Initialise the gates in place, before the first step, by scores on batches of data.

        As ``finetune`` does by default: under a budget a gate starts the further open the more its
        slot matters, and the slots that matter least, half of the way to it, are closed at once.

        Args:
            data: what ``finetune`` takes; its training part is used.
            start: a score, or alike; see ``Settings``, as of ``oneshot_fraction``.
            oneshot_fraction: the part of the way to a budget that is cut at once, 0 to 1.
            loss: see ``Task``; None for that of the data, or ``"auto"``.
            batch_size: examples a batch, where the data lets us choose.
            device: to compute scores on, as for ``finetune``.
            seed: of the order of the data.

        Returns:
            A description of the change; empty without one: by default without a budget, or where
            gates have moved before. Where the default cannot compute scores on this data, a
            warning says why.

        Raises:
            UsageError: the run has begun, a setting makes no sense, the weights are in shards, or
                a score that is named cannot be computed on this data.
            DataError: the data is empty, or nothing to learn from.
        """
        if self._penalty is not None:
            raise UsageError(
                "with a penalty slots close by their weights, not by scores: leave start_from out"
            )
        if self.step:
            raise UsageError(
                f"gates start before the first step, and {self.step} steps are done: call "
                "start_from before the loop, and before the state of a run that goes on is loaded"
            )
        with shown(self._shows):
            begun = init_gates_from(
                self.model,
                data,
                self.phases.learning,
                self.budget,
                start=start,
                oneshot_fraction=oneshot_fraction,
                loss=loss,
                batch_size=batch_size,
                device=device,
                seed=seed,
            )
        if begun.said:
            self._set_out()
            if begun.decided and self._settings.branch_freeze_fraction is None:
                self.freeze_branches()
            self._decision.hold(0)
        return begun.said

    def param_groups(self, lr: float = 1e-3, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return the weights' groups for any optimizer; ``take_gates`` is called for the gates."""
        if self._standing is not None:
            raise UsageError(
                "with learn='gates' no weights learn, so that there is nothing for an optimizer: "
                "leave it out, and call before_step() after backward, and after_step()"
            )
        if self.gates.log_alpha.requires_grad and self._penalty is None:
            self.take_gates()
        groups = super().param_groups(lr, weight_decay)
        return [group for group in groups if group["name"] != "gates"]

    def take_gates(self) -> None:
        """Train the gates by a separate optimizer, inside ``before_step``, from now on.

        Any other that holds ``log_alpha`` finds it without a gradient, and leaves it unchanged.

        Raises:
            UsageError: the gates are frozen.
        """
        if not self.gates.log_alpha.requires_grad:
            raise UsageError(
                "the gates are frozen (requires_grad of l0prune_gates.log_alpha is False), so that "
                "no optimizer can move them: freeze the weights alone, or set it back"
            )
        if self._own is None:
            betas = {} if self.budget is None else {"betas": BETAS}
            self._own = OwnOptimizer(self._of_gates, self.gate_lr, **betas)

    def release_gates(self) -> None:
        """Undo ``take_gates``."""
        if self._own is not None:
            self._own.release()
        self._own = None

    def make_whole(self) -> None:
        """Restore the full size of a model that was cut while it trains.

        Slots that were cut get their last values, and their gates are closed. After the last step
        this is done; before it, the model is cut again at the next look. The wrapper made by
        ``wrap`` is removed until ``network`` is read again.
        """
        super().make_whole()
        if self._wrapping is not None:
            self._wrapping.take_off()

    def before_step(self, *optimizers: Optimizer, scale: float | Tensor = 1.0) -> Tensor | None:
        """Add the penalty's gradient; once per step, after backward, accumulation and clipping.

        Args:
            *optimizers: those that step next; faults in how they treat the gates are reported
                once. With ``compact`` all whose states a cut affects have to be given: else the
                network keeps its size, with a warning.
            scale: factor on the current gradients, where a loss scaler has not yet been undone
                (``scaler.get_scale()``).

        Returns:
            The penalty, a scalar; None where there is none at this step.
        """
        if self._wrapping is not None and self._wrapping.network is None:
            raise UsageError(
                "this step's forward was not one of pruner.network, so that no other process "
                "knows of its gradients: with wrap=… the loop calls pruner.network(inputs)"
            )
        if optimizers:
            self._follow(optimizers)
        if self.phase != "settle":
            self._followers.look()
        if self.step == 0:
            self._speak(self.doctor.before(optimizers, is_taken=self._own is not None))
            self.look_ahead()
            if self._standing is None and self._penalty is None:
                report_frozen(self.model, self.say)
            around = all_around(self.model)
            self._speak({each.name: text for each in around if (text := each.unpaid())})
        self._pending += 1
        if self._pending == _CALLS:
            self.say(_NO_AFTER)
        own = self._own if self._penalty is None else None
        if own is not None:
            own.hand_over()
        extra = super().before_step(scale=scale)
        if own is not None:
            own.step(scale)
        return extra

    def _follow(self, optimizers: Sequence[Optimizer]) -> None:
        known = self.compaction.optimizers
        new = [each for each in map(bare, optimizers) if each not in known]
        if self._wrapping is not None and new:
            self._wrapping.adopt(new)
        self.compaction.follow(optimizers)
        if self._wrapping is not None and new:
            self._wrapping.adopt(new)  # again, with the states that are cut now

    def begin_step(self) -> None:
        """Begin a step; where learning ends, gates are fixed and choices are timed."""
        with shown(self._shows) if self.phases.begins_to_settle(self.step) else nullcontext():
            super().begin_step()

    def after_step(self) -> None:
        """Advance the run by one step, after the optimizer's step."""
        self.shrink()
        self.advance()
        self._unprepared += not self._pending
        if self._unprepared == _CALLS:
            self.say(_NO_BEFORE)
        self._pending = 0
        self._look()
        self.begin_step()
        if self.step >= self.phases.total:
            self.make_whole()
            self.release_gates()
            self._let_go()
        _ = self.network

    def finish(self) -> None:
        """Fit the gates to the budget and fix them, where a loop ends before its last step."""
        self.make_whole()
        if self.phase != "settle":
            self._shrinking.stop()
            self.step, self._begun = self.phases.learning, None
            self.begin_step()
        self._let_go()

    def _let_go(self) -> None:
        """Unfreeze the weights, and stop wrapping the model."""
        if self._standing is not None:
            self._standing.release()
        self._wrapping = None

    def _look(self) -> None:
        """Report the doctor's complaints every few steps."""
        if not self._is_time_to_look and self.step != self.phases.learning:
            return
        epoch = self.step / self._between_looks
        record = {"step": self.step, "epoch": epoch, "phase": self.phases.at(self.step - 1)}
        self._speak(self.doctor.after(record | self.record()))

    def _speak(self, complaints: dict[str, str]) -> None:
        for text in complaints.values():
            self.say(text)

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger: shares of the dense counts, and the state of the budgets.

        ``open`` is the share of slots that an export keeps; ``expected_macs`` and ``macs``, and
        the same of params and of each measure in the budget, are the expected amounts over the
        gates' noise and those of an export now.
        """
        record = self._terms.record()
        found = {"open": sum(record["open"].values()) / max(self.gates.plan.size, 1)}
        for name, of in amounts(record).items():
            found |= {f"expected_{name}": of.share(of.expected), name: of.share(of.actual)}
        for text, of in record.get("budget", {}).items():
            found |= {f"{name}:{text}": of[name] for name in ("target", "multiplier")}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept beside those of the model and the optimizer."""
        own = {} if self._own is None else {"own": self._own.state_dict()}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``, after the model's state is loaded.

        A model that was cut when the state was saved is cut again, and one that was not is whole.

        Raises:
            UsageError: it is the state of another model or run; then nothing has changed.
        """
        super().load_state_dict(state)
        if "own" in state:
            self.take_gates()
            assert self._own is not None
            self._own.load_state_dict(state["own"])


def _phases(settings: GateSettings, steps: int, warmup: int | None, settle: int | None) -> Phases:
    check_whole("steps", steps)
    for name, given in (("warmup", warmup), ("settle", settle)):
        if given is not None:
            check_whole(name, given, least=0)
    if not settings.learn:
        raise UsageError(
            "with learn=False the gates do not change, and a Pruner has nothing to do: close "
            "gates with l0prune.fit, and train the weights in your loop as they are"
        )
    if settle and settings.learn == GATES:
        raise UsageError(NOTHING_SETTLES)
    return planned(settings, steps, warmup, settle)
