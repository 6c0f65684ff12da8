"""``Pruner``: the gates of a model in any training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.errors import UsageError, warn, warn_renamed
from l0prune.gating.attaching import gates_of, weights_of
from l0prune.gating.bank import asked_of
from l0prune.plan.bits import check_menu
from l0prune.plan.numbers import check_whole
from l0prune.running.criteria import Loss
from l0prune.running.task import amounts
from l0prune.training.averages import Followers, excess_of
from l0prune.training.compaction import Compaction, CompactionPolicy
from l0prune.training.doctor import Doctor
from l0prune.training.elements import penalty_of
from l0prune.training.gate_terms import GateTerms, add_gradients
from l0prune.training.group_penalty import stand
from l0prune.training.input_cost import is_unpaid
from l0prune.training.keywords import GateKeywords
from l0prune.training.optimizers import OwnOptimizer, bare, free
from l0prune.training.penalty import param_groups
from l0prune.training.phases import Phases
from l0prune.training.quantizing import Quantizing, put_back_quantizer, without_quantizer
from l0prune.training.settings import AUTO, GATES, NOTHING_SETTLES, GateSettings
from l0prune.training.standing import Standing
from l0prune.training.start import Decision, init_gates_from
from l0prune.training.wrapping import Wrap, Wrapping

FORMAT = 1
_KEYS = {"format", "axes", "phases", "step", "begun", "budget", "own", "doctor", "work", "cut"}


def check(
    state: dict[str, Any], axes: list[list[Any]], phases: Phases, *, has_budget: bool
) -> None:
    """Refuse a state that is not of such a run."""
    if not isinstance(state, dict) or not state.keys() >= _KEYS or state["format"] != FORMAT:
        raise UsageError("this is no state of a Pruner of this version of l0prune")
    if state["axes"] != axes:
        raise UsageError(
            "this state is of a Pruner for another model: its gates are on other axes. Load "
            "it into the Pruner of a model that was gated in the same way"
        )
    mine = [phases.total, phases.warmup, phases.settle]
    if list(state["phases"]) != mine:
        raise UsageError(
            f"this state is of a run of {state['phases'][0]} steps ({state['phases'][1]} of "
            f"warm-up, {state['phases'][2]} of settling), and this Pruner is for {mine[0]} "
            f"({mine[1]}, {mine[2]}): make it with the same steps, warmup and settle"
        )
    if bool(state["budget"]) != has_budget:
        raise UsageError("this state is of a run with another budget: give the same")


# Adam's for gates under a budget, whose multiplier changes within a few hundred steps.
_BETAS = (0.9, 0.99)
_LOOKS = 20  # of the doctor, and for what may be cut, while the gates learn

_CALLS = 3  # of one method without the other, after which it is said
_NO_AFTER = (
    f"pruner.before_step() was called {_CALLS} times without pruner.after_step(): the run stays at "
    "its first step, and the gates never meet the budget. Call after_step() after each step of the "
    "optimizer"
)
_UNPAID = (
    "this model has input gates, and nothing makes them close: before its backward pass, the loss "
    "of each forward needs what they pay: loss = loss + l0prune.input_penalty(model)"
)
_NO_BEFORE = (
    f"pruner.after_step() was called {_CALLS} times without pruner.before_step(): the gates feel "
    "neither penalty nor budget. Call before_step(optimizer) after backward, before each step"
)


def _unfinished(pruner: ref[Pruner], open_: Tensor) -> str:
    """Warning of gates whose loop has ended before its last step, over the budget; else empty."""
    run = pruner()
    if run is None or run.budget is None or not (run.step or run._pending):
        return ""
    found = excess_of(run.budget, open_)
    return found and (
        f"the gates exceed the budget of the loop that trains them: an export has {found}. After "
        f"{run.step} of {run.phases.total} steps they are not fitted to it yet: call "
        "pruner.finish() before the export"
    )


def planned(settings: GateSettings, steps: int, warmup: int | None, settle: int | None) -> Phases:
    """Return the phases of so many steps; nothing settles where weights stand."""
    if settings.learn == GATES:
        return Phases.plan(steps, warmup, 0)
    # Gates are fitted to a budget, and to whole blocks, when they begin to stand.
    return Phases.plan(steps, warmup, settle, int(settings.budget is not None or settings.rounds))


class Pruner:
    """All that is about gates in a run: phases, λ or budgets, annealing, fitting, and warnings.

    In a training loop of your own::

        pruner = l0prune.Pruner(model, budget="macs=0.5", steps=len(batches) * epochs)
        optimizer = torch.optim.AdamW(pruner.param_groups(lr=1e-3, weight_decay=0.01))
        for inputs, targets in batches:
            criterion(model(inputs), targets).backward()
            pruner.before_step(optimizer)  # after accumulation and clipping
            optimizer.step()
            pruner.after_step()
            optimizer.zero_grad()

    First λ warms up, then the network is pruned; at the end the gates stand, after the last of
    them were opened and closed so that an export just meets the budgets, and the weights settle.

    The gates learn by an optimizer of their own, so that clipping, weight decay and schedules of
    learning rates do not reach them. Where something else makes the optimizer, over whatever
    parameters, ``take_gates()`` does the same.

    With ``learn="gates"`` the weights, and the statistics of BatchNorm, stand until the last step
    or ``finish()``: the loop has no optimizer, and calls ``before_step()`` and ``after_step()``.

    Attributes:
        model: the gated model.
        gates: its bank.
        phases: where each phase ends, in steps.
        step: optimizer steps that are done.
        compaction: the cut of the model, while its gates stand or learn.
        say: what is called with the text of a warning.
        doctor: says what is wrong with the gates.

    Args:
        model: a gated model.
        steps: optimizer steps of the whole run; or the phases themselves, for a loop that calls
            ``begin_step`` and ``advance``, and the doctor, itself.
        n: N, the number of training examples, for λ that is written in it, and for ``prior``.
        warmup: steps over which λ rises from 0, by default 5 % of them.
        settle: steps at the end in which the gates stand, by default 30 %.
        wrap: where several processes train the model, what puts it into DDP or FSDP2, such as
            ``lambda model: DistributedDataParallel(model)``: called with the plain model, before
            the first step and after each cut. The loop then calls ``pruner.network``.
        say: what is called with each warning's text; by default it is a Python warning.
        **settings: see ``GateSettings``.

    Raises:
        NotGated: the model carries no gates.
        UsageError: a setting makes no sense, or a budget cannot be met.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int | Phases,
        n: int | None = None,
        warmup: int | None = None,
        settle: int | None = None,
        wrap: Wrap | None = None,
        say: Callable[[str], None] | None = None,
        **settings: Unpack[GateKeywords],
    ) -> None:
        self.model, self.say = model, say or warn
        self.gates = gates_of(model)
        self.gates.make_whole()
        self._settings = GateSettings.of(settings)
        self._drives_itself = not isinstance(steps, Phases)
        self.phases = steps if isinstance(steps, Phases) else self._planned(steps, warmup, settle)
        self._n = n
        with put_back_quantizer(model):
            self._quantizing = self._quantized(model)
            self._set_out()
        is_asked = not self._drives_itself or "compact" in settings
        self.compaction = Compaction(model, own_loop=self._drives_itself)
        self._wrapping = None if wrap is None else self._wrapped_by(wrap)
        self._shrinking = CompactionPolicy(
            self.compaction, self._settings.compact if is_asked else "never", self._say_it
        )
        self.step = 0
        self._work = 0.0  # of so many steps of the whole model
        self._begun: int | None = None
        self._own: OwnOptimizer | None = None
        free(self.gates.parameters())
        stands = self._drives_itself and self._settings.learn == GATES
        self._standing = Standing(model) if stands else None
        self._followers = Followers(self.gates)
        self._pending = self._unprepared = 0  # calls of before_step, of after_step without one
        if self._drives_itself:
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

        Without ``wrap``, and after the last step, the model itself. The model should be where it
        is trained before this is first asked for.
        """
        return self.model if self._wrapping is None else self._wrapping.put_on()

    def _quantized(self, model: nn.Module) -> Quantizing | None:
        if self._settings.quantize is None:
            without_quantizer(model)
            return None
        menu = check_menu(self._settings.bits) if self._settings.quantize == "bits" else ()
        return Quantizing(model, self.phases, menu)

    def _set_out(self) -> None:
        """From the gates as they are now."""
        self._terms = GateTerms(self.model, self.gates, self._settings, self._n, self.phases)
        self.budget = self._terms.budget
        learning = self.phases.learning
        fraction = self._settings.branch_freeze_fraction
        self._decision = Decision(self.gates, learning, fraction, self.budget)
        self.doctor = Doctor(self._terms, self.phases)
        self._penalty = penalty_of(
            self.model, self.gates, self._settings, self._n, self.phases, self.budget
        )

    def _planned(self, steps: int, warmup: int | None, settle: int | None) -> Phases:
        check_whole("steps", steps)
        for name, given in (("warmup", warmup), ("settle", settle)):
            if given is not None:
                check_whole(name, given, least=0)
        if not self._settings.learn:
            raise UsageError(
                "with learn=False the gates do not change, and a Pruner has nothing to do: close "
                "gates with l0prune.fit, and train the weights in your loop as they are"
            )
        if settle and self._settings.learn == GATES:
            raise UsageError(NOTHING_SETTLES)
        return planned(self._settings, steps, warmup, settle)

    def start_from(
        self,
        data: Any,
        *,
        start: str = AUTO,
        oneshot_fraction: float = 0.5,
        at_once: float | None = None,
        loss: Loss | str | None = None,
        batch_size: int = 100,
        device: str | torch.device = "auto",
        seed: int = 0,
    ) -> str:
        """Before the first step: let gates start from what some batches of data tell, in place.

        What ``finetune`` does by itself: under a budget each gate starts the further open the more
        its slot matters, and what matters least, half of the way to the budget, is closed at once.

        Args:
            data: what ``finetune`` takes; its training part is used.
            start: a score, or alike; see ``Settings``, as of ``oneshot_fraction``.
            oneshot_fraction: the part of the way to a budget that is cut at once, 0 to 1.
            at_once: the former name of ``oneshot_fraction``, deprecated.
            loss: see ``Task``; None for that of the data, or ``"auto"``.
            batch_size: examples a batch, where the data lets us choose.
            device: where to look at the data, as for ``finetune``.
            seed: of its order.

        Returns:
            What was done, in words; empty where all stays as it was: as by default without a
            budget, or where gates have moved before.

        Raises:
            UsageError: the run has begun, a setting makes no sense, the weights are in shards, or
                a score that is named cannot be told of this data.
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
        if at_once is not None:
            warn_renamed("at_once", "oneshot_fraction")
            oneshot_fraction = at_once
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

    # --- optimizers ------------------------------------------------------------------------

    @property
    def gate_lr(self) -> float:
        """The gates' learning rate."""
        return self._terms.gate_lr

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that learn, without those of the gates: what is to be clipped."""
        return [p for p in weights_of(self.model).values() if p.requires_grad]

    @property
    def _of_gates(self) -> list[nn.Parameter]:
        return [p for p in self.gates.learned if p.requires_grad]

    def param_groups(self, lr: float = 1e-3, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Groups for any optimizer, which hold the weights alone: the gates are taken.

        A loop that drives the phases itself gets the gates as a group of their own, undecayed and
        at their own rate.
        """
        if self._standing is not None:
            raise UsageError(
                "with learn='gates' no weights learn, so that there is nothing for an optimizer: "
                "leave it out, and call before_step() after backward, and after_step()"
            )
        groups = param_groups(self.model, lr, self.gate_lr, weight_decay)
        if self._drives_itself:
            if self.gates.log_alpha.requires_grad and self._penalty is None:
                self.take_gates()
            return [group for group in groups if group["name"] != "gates"]
        if self.budget is not None:
            for group in groups:
                if group["name"] == "gates":
                    group["betas"] = _BETAS
        return groups

    def take_gates(self) -> None:
        """From here on the gates learn by an optimizer of their own, inside ``before_step``.

        Any other that holds ``log_alpha`` finds it without a gradient, and leaves it alone.

        Raises:
            UsageError: the gates are frozen.
        """
        if not self.gates.log_alpha.requires_grad:
            raise UsageError(
                "the gates are frozen (requires_grad of l0prune_gates.log_alpha is False), so that "
                "no optimizer can move them: freeze the weights alone, or set it back"
            )
        if self._own is None:
            betas = {} if self.budget is None else {"betas": _BETAS}
            self._own = OwnOptimizer(self._of_gates, self.gate_lr, **betas)

    def release_gates(self) -> None:
        """Undo ``take_gates``."""
        if self._own is not None:
            self._own.release()
        self._own = None

    # --- a step ----------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """``warm-up``, ``prune`` or ``settle``: that of the next step."""
        return self.phases.at(self.step)

    @property
    def begins_to_settle(self) -> bool:
        """Return whether settling begins with the next step."""
        return self._begun != self.step and self.phases.begins_to_settle(self.step)

    def begin_step(self) -> None:
        """Before a step's first forward: let the gates be sampled or stand, as the phase has it.

        A loop of your own need not call it: ``after_step`` does, for the next step.
        """
        if self._begun == self.step:
            return
        self._anneal()
        if self._quantizing is not None:
            self._quantizing.begin(self.step)
        if self.step == 0 and self._penalty is None:
            self._decision.hold(0)
        settles = self.phases.begins_to_settle(self.step)
        if settles:
            self.make_whole()
            if self._penalty is not None and (said := self._penalty.rank()):
                self._say_it(said)
            self._terms.fit()
            if self._penalty is not None:
                stand(self.gates)
            self._followers.follow(self.budget)
        self._begun = self.step
        self.gates.fixed = self.phase == "settle" or self._penalty is not None
        if self.step >= self.phases.total:
            return  # no step of the run is left to be cheaper
        if self.gates.fixed:
            made_whole = self._is_time_to_look and self.compaction.cut is None  # in between
            if settles or made_whole:
                self._shrinking.to_what_stands()
        elif self._is_time_to_look or (self._drives_itself and self.step == 1):
            # Before the first step of a loop of your own the model may still be moved: what is
            # closed then goes after it.
            begins = self.step == 0 and not self._drives_itself
            self._shrinking.to_what_is_open(self.phases.total - self.step, begins=begins)

    def freeze_branches(self) -> None:
        """Keep branches that are open now, and remove the others, before the first step."""
        self._decision.first = 0
        if self.step == 0:
            self._decision.hold(0)

    def branches_stand(self) -> None:
        """Call ``freeze_branches``, of which this is the former name."""
        warn_renamed("branches_stand", "freeze_branches")
        self.freeze_branches()

    def look_ahead(self, hindrance: str = "") -> None:
        """Before the first step: say so if it is known that the network cannot be cut.

        A loop of your own need not call it: the first ``before_step`` does.

        Args:
            hindrance: what else there is that needs the whole network.
        """
        self._shrinking.look_ahead(hindrance or self.compaction.hindrance())

    def make_whole(self) -> None:
        """Give a model that is trained at the size that its gates leave its own size back.

        What was cut off has its last values, and its gates are closed. After the last step of a
        loop of your own this is done; before it, the model is cut again at the next look. What
        ``wrap`` has put around it is taken off, until ``network`` is asked for again.
        """
        self.compaction.end()
        if self._wrapping is not None:
            self._wrapping.take_off()

    def keep_whole(self, reason: str) -> None:
        """Make the model whole, and cut nothing from here on, which is said.

        Args:
            reason: why.
        """
        self.make_whole()
        self._shrinking.fail(reason)

    def before_step(self, *optimizers: Optimizer, scale: float | Tensor = 1.0) -> Tensor | None:
        """Once a step, after backward, accumulation and clipping: add the penalty's gradient.

        Args:
            *optimizers: those that step next; what is wrong with how they treat the gates is
                said once. With ``compact`` all that are to follow a cut have to be given: else the
                network keeps its size, which is said.
            scale: by which the gradients are multiplied now, where a loss scaler has not yet
                been undone (``scaler.get_scale()``).

        Returns:
            The penalty, a scalar; None where there is none at this step.
        """
        if self._wrapping is not None and self._wrapping.network is None:
            raise UsageError(
                "this step's forward was not one of pruner.network, so that no other process "
                "knows of its gradients: with wrap=… the loop calls pruner.network(inputs)"
            )
        if optimizers and self._drives_itself:
            self._follow(optimizers)
        if self._drives_itself and self.phase != "settle":
            self._followers.look()
        if self._drives_itself and self.step == 0:
            self._speak(self.doctor.before(optimizers, is_taken=self._own is not None))
            self.look_ahead()
            if is_unpaid(self.model):
                self._speak({"input_penalty": _UNPAID})
        self._pending += 1
        if self._drives_itself and self._pending == _CALLS:
            self._speak({"after_step": _NO_AFTER})
        if self._penalty is not None:
            self._penalty.before(self.step, self.compaction.optimizers)
            return None
        if self._own is not None:
            self._own.hand_over()
        extra = self._terms.penalty(self.step)
        if extra is not None and extra.requires_grad:
            scaled = extra if isinstance(scale, float) and scale == 1 else extra * scale
            learned = self.model.parameters() if self._terms.decays else self._of_gates
            add_gradients(scaled, [p for p in learned if p.requires_grad])
        if self.phase == "settle":
            for parameter in self._of_gates:
                parameter.grad = None  # so that no optimizer moves them
        elif self.budget is not None:
            self.budget.step(scale)
        self._decision.keep(self.step)
        if self._own is not None:
            self._own.step(scale)
        return None if extra is None else extra.detach()

    def _follow(self, optimizers: Sequence[Optimizer]) -> None:
        known = self.compaction.optimizers
        new = [each for each in map(bare, optimizers) if each not in known]
        if self._wrapping is not None and new:
            self._wrapping.adopt(new)
        self.compaction.follow(optimizers)
        if self._wrapping is not None and new:
            self._wrapping.adopt(new)  # also what was cut of their states

    def shrink(self) -> None:
        """After the optimizer's step, and before ``advance``: the penalty's part of the step."""
        if self._penalty is not None:
            self._penalty.step(self.step, self.compaction.optimizers)

    def after_step(self) -> None:
        """After the optimizer's step: go on to the next one."""
        self.shrink()
        self.advance()
        if self._drives_itself:
            self._unprepared += not self._pending
            if self._unprepared == _CALLS:
                self._speak({"before_step": _NO_BEFORE})
            self._pending = 0
            self._look()
            self.begin_step()
            if self.step >= self.phases.total:
                self.make_whole()
                self.release_gates()
                self._let_weights_change()
                self._wrapping = None
            _ = self.network

    def advance(self) -> None:
        """Count the step that was done, and make the gates what they are after it."""
        if self._quantizing is not None:
            self._quantizing.advance()
        self.step += 1
        self._work += self.compaction.share
        self._anneal()
        if self._penalty is None:
            self._decision.hold(self.step)

    def _anneal(self) -> None:
        self.gates.gate = self.gates.gate.at(self.phases.learned(self.step))

    def finish(self) -> None:
        """Fit the gates to the budget and fix them, where a loop ends before its last step."""
        self.make_whole()
        if self.phase != "settle":
            self._shrinking.stop()
            self.step, self._begun = self.phases.learning, None
            self.begin_step()
        self._let_weights_change()
        self._wrapping = None

    def _let_weights_change(self) -> None:
        if self._standing is not None:
            self._standing.release()

    # --- what there is to say --------------------------------------------------------------

    def _look(self) -> None:
        """Say every few steps what the doctor complains of."""
        if not self._is_time_to_look and self.step != self.phases.learning:
            return
        epoch = self.step / self._between_looks
        record = {"step": self.step, "epoch": epoch, "phase": self.phases.at(self.step - 1)}
        self._speak(self.doctor.after(record | self.record()))

    @property
    def _between_looks(self) -> int:
        return max(1, self.phases.learning // _LOOKS)

    @property
    def _is_time_to_look(self) -> bool:
        return self.step % self._between_looks == 0

    def _speak(self, complaints: dict[str, str]) -> None:
        for text in complaints.values():
            self._say_it(text)

    def _say_it(self, text: str) -> None:
        """Pass the text to ``say`` as it is now."""
        self.say(text)

    def record(self) -> dict[str, Any]:
        """Expected and actual counts, budgets, open slots by axis, and axes without any.

        ``training_macs`` is the share of MACs that the steps so far had, of what they would have
        had at the model's own size.
        """
        own = {} if self._penalty is None else self._penalty.record()
        return {**self._terms.record(), **own, "training_macs": self._work / max(self.step, 1)}

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger: shares of the dense counts, and what the budgets are at.

        ``open`` is the share of slots that an export keeps; ``expected_macs`` and ``macs``, and
        the same of params and whatever else the budget is about, are the amounts over the gates'
        noise and those of an export now.
        """
        record = self._terms.record()
        found = {"open": sum(record["open"].values()) / max(self.gates.plan.size, 1)}
        for name, of in amounts(record).items():
            found |= {f"expected_{name}": of.share(of.expected), name: of.share(of.actual)}
        for text, of in record.get("budget", {}).items():
            found |= {f"{name}:{text}": of[name] for name in ("target", "multiplier")}
        return found

    # --- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept beside those of the model and the optimizer."""
        return {
            "format": FORMAT,
            "axes": self._axes(),
            "phases": [self.phases.total, self.phases.warmup, self.phases.settle],
            "step": self.step,
            "begun": self._begun,
            "budget": {} if self.budget is None else self.budget.state_dict(),
            "own": None if self._own is None else self._own.state_dict(),
            "doctor": self.doctor.state_dict(),
            "fitted": self._terms.fitted,
            "work": self._work,
            "cut": self._shrinking.state_dict(),
            "decided": self._decision.first,
            "penalty": None if self._penalty is None else self._penalty.state_dict(),
            "quantize": None if self._quantizing is None else self._quantizing.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave; the model has its own state already.

        A model that was trained at the size that its gates leave is so again, and one that was
        not is whole.

        Raises:
            UsageError: it is the state of another model or run; then nothing has changed.
        """
        check(state, self._axes(), self.phases, has_budget=self.budget is not None)
        self.step, self._begun, self._work = state["step"], state["begun"], state["work"]
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])
        if state["own"] is not None:
            self.take_gates()
            assert self._own is not None
            self._own.load_state_dict(state["own"])
        self.doctor.load_state_dict(state["doctor"])
        self._terms.fitted = state["fitted"]
        self._decision.first = state["decided"]
        if self._penalty is not None and state.get("penalty") is not None:
            self._penalty.load_state_dict(state["penalty"])
        if self._quantizing is not None and state.get("quantize") is not None:
            self._quantizing.load_state_dict(state["quantize"])
            self._quantizing.begin(self.step)
        self._anneal()
        is_settled = self._begun == self.step and self.phase == "settle"
        self.gates.fixed = is_settled or self._penalty is not None
        self._shrinking.load_state_dict(state["cut"])

    def _axes(self) -> list[list[Any]]:
        return [[axis.name, axis.size] for axis in self.gates.plan.axes]
