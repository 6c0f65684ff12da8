"""Training of gates in a run, in parts of a step that a loop calls, as that of ``finetune``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from l0prune.doors import provided
from l0prune.errors import UsageError, warn
from l0prune.gating.attaching import gates_of, holder, put_back_rounding, weights_of
from l0prune.training.averages import Followers
from l0prune.training.compaction import Compaction, CompactionPolicy
from l0prune.training.doctor import Doctor
from l0prune.training.gate_settings import GATES, Compact, GateSettings
from l0prune.training.gate_terms import GateTerms, add_gradients
from l0prune.training.optimizers import free
from l0prune.training.penalty import param_groups
from l0prune.training.phases import Phases
from l0prune.training.start import Decision, stand

FORMAT = 1
_KEYS = {"format", "axes", "phases", "step", "begun", "doctor", "work", "cut"}
# Adam's betas for gates under a budget, whose multiplier changes within a few hundred steps.
BETAS = (0.9, 0.99)
_LOOKS = 20  # of the doctor, and for possible cuts, while the gates learn


def _check(
    state: dict[str, Any], axes: list[list[Any]], phases: Phases, *, has_budget: bool
) -> None:
    """Raise UsageError if the state is of a run with other axes, phases or budget."""
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
    if bool(state.get("budget")) != has_budget:
        raise UsageError("this state is of a run with another budget: give the same")


def planned(settings: GateSettings, steps: int, warmup: int | None, settle: int | None) -> Phases:
    """Return the phases of ``steps`` steps; nothing settles if the weights are frozen."""
    if settings.learn == GATES:
        return Phases.plan(steps, warmup, 0)
    # Gates are fitted to a budget, and to whole blocks, when settling begins.
    return Phases.plan(steps, warmup, settle, int(settings.budget is not None or settings.rounds))


class Penalty(Protocol):
    """Penalty on the weights of slots, in the place of gates that learn, for one run."""

    def before(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Change gradients before the optimizer's step of this number, if it does that."""

    def step(self, number: int, optimizers: Sequence[Optimizer]) -> None:
        """Shrink weights after the optimizer's step of this number."""

    def rank(self) -> str:
        """Choose what stays, before the weights settle; return a message, empty if none."""

    def record(self) -> dict[str, Any]:
        """Return what a record of the run has of it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a run goes on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""


class GateRun:
    """Training of gates in a run: phases, λ or budgets, annealing, fitting, compaction.

    Each step is ``begin_step``, a forward and backward, ``before_step``, the optimizer's step,
    ``shrink`` and ``advance``. Its attributes are those of ``Pruner``.
    """

    # Whether the loop is the user's, who may move the model to a device before the first step.
    in_own_loop = False

    def __init__(
        self,
        model: nn.Module,
        settings: GateSettings,
        phases: Phases,
        n: int | None,
        compact: Compact,
        say: Callable[[str], None] = warn,
    ) -> None:
        self.model, self.say, self.phases = model, say, phases
        self.gates = gates_of(model)
        self.gates.make_whole()
        self._settings, self._n = settings, n
        with put_back_rounding(model):
            self._quantizing = self._quantized(model)
            self._set_out()
        self.compaction = Compaction(model, own_loop=self.in_own_loop)
        self._shrinking = CompactionPolicy(self.compaction, compact, self._say_it)
        self.step = 0
        self._work = 0.0  # MACs of all steps, in steps of the whole model
        self._begun: int | None = None
        free(self.gates.parameters())
        self._followers = Followers(self.gates)

    def _quantized(self, model: nn.Module) -> Any:
        """Return what rounds during the run, if that is asked for; else remove an earlier one."""
        if self._settings.quantize is not None:
            bits = self._settings.bits if self._settings.quantize == "bits" else None
            return provided("Quantizing")(model, self.phases, bits)
        if self.gates.quantizer is not None:
            self.gates.quantizer.remove(holder(model)[0])
        return None

    def _set_out(self) -> None:
        """Set up objective, budget, branches, doctor and penalty from the present gates."""
        self._terms = GateTerms(self.model, self.gates, self._settings, self._n, self.phases)
        self.budget = self._terms.budget
        learning = self.phases.learning
        fraction = self._settings.branch_freeze_fraction
        self._decision = Decision(self.gates, learning, fraction, self.budget)
        self.doctor = Doctor(self._terms, self.phases)
        self._penalty: Penalty | None = None
        if self._settings.penalty is not None:
            self._penalty = provided("penalty_of")(
                self.model, self.gates, self._settings, self._n, self.phases, self.budget
            )

    @property
    def gate_lr(self) -> float:
        """The gates' learning rate."""
        return self._terms.gate_lr

    @property
    def weights(self) -> list[nn.Parameter]:
        """Trainable parameters without those of the gates: the ones to clip."""
        return [p for p in weights_of(self.model).values() if p.requires_grad]

    @property
    def _of_gates(self) -> list[nn.Parameter]:
        return [p for p in self.gates.learned if p.requires_grad]

    def param_groups(self, lr: float = 1e-3, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return groups for any optimizer: weights, and gates without decay at ``gate_lr``."""
        groups = param_groups(self.model, lr, self.gate_lr, weight_decay)
        if self.budget is not None:
            for group in groups:
                if group["name"] == "gates":
                    group["betas"] = BETAS
        return groups

    @property
    def phase(self) -> str:
        """Phase of the next step: ``warm-up``, ``prune`` or ``settle``."""
        return self.phases.at(self.step)

    @property
    def begins_to_settle(self) -> bool:
        """Return whether settling begins with the next step."""
        return self._begun != self.step and self.phases.begins_to_settle(self.step)

    def begin_step(self) -> None:
        """Prepare a step before its first forward: gates are sampled or fixed by the phase."""
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
            opened = self._terms.fit()
            if opened and not self.in_own_loop:
                self._say_it(opened)
            if self._penalty is not None:
                stand(self.gates)
            self._followers.follow(self.budget)
        self._begun = self.step
        self.gates.fixed = self.phase == "settle" or self._penalty is not None
        if self.step >= self.phases.total:
            return  # no step is left that a cut would make cheaper
        if self.gates.fixed:
            made_whole = self._is_time_to_look and self.compaction.cut is None  # since the last cut
            if settles or made_whole:
                self._shrinking.to_what_stands()
        elif self._is_time_to_look or (self.in_own_loop and self.step == 1):
            # In a user's loop the model may still be moved before the first step: slots that are
            # closed then are cut after it.
            begins = self.step == 0 and not self.in_own_loop
            self._shrinking.to_what_is_open(self.phases.total - self.step, begins=begins)

    def freeze_branches(self) -> None:
        """Keep branches that are open now, and remove the others, before the first step."""
        self._decision.first = 0
        if self.step == 0:
            self._decision.hold(0)

    def look_ahead(self, hindrance: str = "") -> None:
        """Report before the first step why the network cannot be cut, if that is known."""
        self._shrinking.look_ahead(hindrance or self.compaction.hindrance())

    def make_whole(self) -> None:
        """Restore the full size of a model that was cut while it trains."""
        self.compaction.end()

    def keep_whole(self, reason: str) -> None:
        """Make the model whole, report the reason, and cut nothing from now on."""
        self.make_whole()
        self._shrinking.fail(reason)

    def before_step(self, *, scale: float | Tensor = 1.0) -> Tensor | None:
        """Add the penalty's gradient, times ``scale``, and return the penalty; see ``Pruner``."""
        if self._penalty is not None:
            self._penalty.before(self.step, self.compaction.optimizers)
            return None
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
        return None if extra is None else extra.detach()

    def shrink(self) -> None:
        """Apply the weight penalty, after the optimizer's step and before ``advance``."""
        if self._penalty is not None:
            self._penalty.step(self.step, self.compaction.optimizers)

    def advance(self) -> None:
        """Count the step that was done, anneal the gates and hold those of branches."""
        if self._quantizing is not None:
            self._quantizing.advance()
        self.step += 1
        self._work += self.compaction.share
        self._anneal()
        if self._penalty is None:
            self._decision.hold(self.step)

    def _anneal(self) -> None:
        self.gates.gate = self.gates.gate.at(self.phases.learned(self.step))

    @property
    def _between_looks(self) -> int:
        return max(1, self.phases.learning // _LOOKS)

    @property
    def _is_time_to_look(self) -> bool:
        return self.step % self._between_looks == 0

    def _say_it(self, text: str) -> None:
        """Pass the text to the present ``say``, which may have been replaced."""
        self.say(text)

    def record(self) -> dict[str, Any]:
        """Expected and actual counts, budgets, open slots by axis, and axes without any.

        ``training_macs`` are the MACs of the steps so far, as a share of those at the model's full
        size.
        """
        own = {} if self._penalty is None else self._penalty.record()
        return {**self._terms.record(), **own, "training_macs": self._work / max(self.step, 1)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept beside those of the model and the optimizer."""
        return {
            "format": FORMAT,
            "axes": self._axes(),
            "phases": [self.phases.total, self.phases.warmup, self.phases.settle],
            "step": self.step,
            "begun": self._begun,
            "doctor": self.doctor.state_dict(),
            "fitted": self._terms.fitted,
            "work": self._work,
            "cut": self._shrinking.state_dict(),
            "decided": self._decision.first,
            **{name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``; see ``Pruner``."""
        _check(state, self._axes(), self.phases, has_budget=self.budget is not None)
        self.step, self._begun, self._work = state["step"], state["begun"], state["work"]
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(state[name])
        self.doctor.load_state_dict(state["doctor"])
        self._terms.fitted = state["fitted"]
        self._decision.first = state["decided"]
        if self._quantizing is not None and "quantize" in state:
            self._quantizing.begin(self.step)
        self._anneal()
        is_settled = self._begun == self.step and self.phase == "settle"
        self.gates.fixed = is_settled or self._penalty is not None
        self._shrinking.load_state_dict(state["cut"])

    @property
    def _parts(self) -> dict[str, Any]:
        """Return the parts of the run that have a state, by name."""
        parts = {"budget": self.budget, "penalty": self._penalty, "quantize": self._quantizing}
        return {name: part for name, part in parts.items() if part is not None}

    def _axes(self) -> list[list[Any]]:
        return [[axis.name, axis.size] for axis in self.gates.plan.axes]
