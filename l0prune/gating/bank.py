"""The gates of a gated model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from l0prune.capture.sizes import ALL_FIXED, FreeSizes
from l0prune.errors import UsageError
from l0prune.gating.kinds.base import AtTemperature, Gate
from l0prune.gating.rounding import Rounding
from l0prune.gating.sampled_gates import SampledGates
from l0prune.plan.plan import Plan
from l0prune.plan.widths import with_slots

# P(z ≠ 0) of a gate that ``set_open`` opens (low enough to close again) or closes.
OPENED = 0.75
CLOSED = 1e-3
# Below it twice in a row a gate is closed for good: one in a hundred is open in the end, as it is
# of those below a tenth of it, since a budget leaves room for it.
FOR_GOOD = 0.1
# Log odds of equally open gates differ by less than this (jitter).
_ALIKE = 0.5
# Largest change of log odds by a score.
_FURTHEST = 2.0
_CHANCES = (1e-6, 1 - 1e-6)

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GateAxis:
    """An axis of a gated model, with its present open slots.

    Attributes:
        name: the axis' name in the plan.
        kind: ``channel``, ``neuron``, ``head``, ``head_dim``, ``group``, ``input``,
            ``branch``, whose one slot is all of it, or ``bits``.
        size: number of slots.
        slice: their range in ``log_alpha``.
        open: which slots an export would keep; bool, shape ``(size,)``, on the CPU.
    """

    name: str
    kind: str
    size: int
    slice: slice
    open: Tensor


_alive: WeakSet[Gates] = WeakSet()

# Request of the run that trained a bank: a function that describes how open gates exceed it,
# empty if they do not; None while there is nothing to exceed. Neither copied nor saved.
asked_of: WeakKeyDictionary[Gates, Callable[[Tensor], str] | None] = WeakKeyDictionary()


def alive() -> list[Gates]:
    """Return every bank that is still referenced, copies included."""
    return list(_alive)


class Gates(SampledGates):
    """All gates of one model: one flat parameter, one sample per forward of the model.

    In train mode each forward of the model draws new multipliers z; in eval mode, and while
    ``fixed`` is set, z is the gate's estimate. A submodule called on its own draws once after
    every change of ``log_alpha``.

    Attributes:
        log_alpha: the gates' parameter, shape ``(plan.size,)``; float32, or float64 in a model
            of doubles, and never less precise than that.
        temperature: the learned temperatures, flat, of the same dtype; None where none are. See
            ``HardConcrete(beta="learn")``.
        clips: learned logarithms of the sizes of a quantizer's ranges, flat; None where none are.
            See ``LearnedBits``.
        plan: where the gates act.
        gate: the kind of gate and its settings. To anneal one, assign ``gate.at(part of the steps
            done)`` between two steps; ``finetune`` does.
        example: positional and keyword arguments of the model's forward, on the CPU.
        free: sizes of these that are free beside the batch.
        fixed: gates have their eval values, and do not learn, even in train mode.
        bypassed: the model reads its plain parameters, as if it had no gates.
        kept: the slots that are left while the model trains cut, bool, flat; None while it is
            whole.
        made_whole_by: function that makes a cut model whole again; None while it is whole.
        quantizer: the rounding that a training has put on; None for none.
        facts: properties of the training data, as JSON data, for the files of an export:
            ``preprocessing`` of images.
        outputs: names of the model's outputs that matter to scores and fidelity; empty for the
            documented ones.
        asked: the budgets that the gates met last, or are trained for, as text; empty for gates
            that something else opened and closed.
    """

    made_whole_by: Callable[[], None] | None = None
    quantizer: Rounding | None = None

    def __init__(
        self,
        plan: Plan,
        gate: Gate,
        log_alpha: Tensor,
        example: Example = ((), {}),
        free: FreeSizes = ALL_FIXED,
    ) -> None:
        super().__init__(plan, gate, log_alpha)
        self.example = example
        self.free = free
        self.facts: dict[str, Any] = {}
        self.asked: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        _alive.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _alive.add(self)

    def __prepare_scriptable__(self) -> None:
        """Refuse torch.jit.script, which calls this first on each module.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "TorchScript cannot hold gates. Export the model, and script what comes of it: "
            "torch.jit.script(l0prune.export(model).module)."
        )

    @property
    def axes(self) -> tuple[GateAxis, ...]:
        """The gated axes, in the order of ``log_alpha``.

        A slot counts as open where an export would keep it: a map that no open fine gate reads
        is closed, and an axis whose gates are all closed keeps one slot.
        """
        kept = self.plan.kept(self.open())
        return tuple(
            GateAxis(a.name, a.kind, a.size, a.slice, kept[a.slice]) for a in self.plan.axes
        )

    def open(self) -> Tensor:
        """Return the gates that are open (z > 0) in eval mode; bool, shape ``(plan.size,)``."""
        return self.z() > 0

    @torch.no_grad()
    def set_open(self, open_: Tensor | str, slots: Sequence[int] | None = None) -> None:
        """Open and close gates; ``log_alpha`` of gates that are already as wanted does not change.

        Args:
            open_: which gates are to be open in eval mode; bool, shape ``(plan.size,)``. Or the
                name of an axis, or the path of a layer that writes one: ``"layer1.0.conv1"``.
            slots: of that axis those that are to be open, all others closed: ``[0, 3, 7]``.

        Raises:
            UsageError: the model is cut, and the removed values are no longer available; or no
                gated axis is meant, or several are, or it has no such slots.
        """
        self.make_whole()
        now = self.open()
        if isinstance(open_, str):
            if slots is None:
                raise UsageError(f"which slots of {open_!r} are to be open? Give their numbers")
            open_ = with_slots(self.plan, now.cpu(), open_, slots)
        asked_of.pop(self, None)
        self.asked = ()
        wanted = open_.to(self.log_alpha.device)
        for target, probability in ((True, OPENED), (False, CLOSED)):
            moves = (wanted == target) & (now != target)
            starts = self.initial(probability).to(self.log_alpha)
            self.log_alpha.copy_(torch.where(moves, starts, self.log_alpha))

    @torch.no_grad()
    def initial(self, open_probability: float | Tensor) -> Tensor:
        """Return the ``log_alpha`` for one open probability, or for one of each gate; float64.

        Shape: result, and probabilities of each ``(plan.size,)``.
        """
        if isinstance(open_probability, Tensor):
            found = [self.gate.initial(p) for p in open_probability.tolist()]
        else:
            found = [self.gate.initial(open_probability)] * self.plan.size
        starts = torch.tensor(found, dtype=torch.float64, device=self.log_alpha.device)
        now = self.gate_now
        return starts + now.shift_learned if isinstance(now, AtTemperature) else starts

    @torch.no_grad()
    def are_uniform(self, among: Tensor | None = None) -> bool:
        """Return whether all gates but those of bits are equally open, as at the start.

        Args:
            among: of these gates alone; bool, shape ``(plan.size,)``.
        """
        odds = self._odds()[: self.plan.slots]
        if among is not None:
            odds = odds[among[: self.plan.slots].to(odds.device)]
        return not len(odds) or float(odds.max() - odds.min()) < _ALIKE

    @torch.no_grad()
    def init_from_scores(self, scores: Tensor) -> None:
        """Shift the log odds of each gate by the standardised logarithm of its slot's score.

        The logarithms have mean 0 and standard deviation 1 over all gates, and are clamped to ±2:
        learning starts from one look at the network or the data, and can still correct it. Gates of
        bits stay.

        Args:
            scores: what ``l0prune.score`` gives; 0 or more, shape ``(plan.size,)``.

        Raises:
            UsageError: they are not of this shape, or not all 0 or more; or the model is cut, and
                the removed values are no longer available.
        """
        self.make_whole()
        is_told = scores.shape == (self.plan.size,) and bool(scores.isfinite().all())
        if not is_told or not bool((scores >= 0).all()):
            raise UsageError(
                f"scores are {self.plan.size} finite numbers of 0 or more, one for each gate, as "
                f"l0prune.score gives them; these have shape {tuple(scores.shape)}"
            )
        first = self.plan.slots
        moves = torch.zeros_like(scores, dtype=torch.float64, device="cpu")
        moves[:first] = _standardised(scores[:first])
        odds = self._odds().cpu() + moves
        self.log_alpha[:first] = self.initial(odds.sigmoid()).to(self.log_alpha)[:first]

    def _odds(self) -> Tensor:
        """Return log P/(1−P), with P each gate's open probability, float64."""
        return self.gate_now.open_probability(self.log_alpha.double()).clamp(*_CHANCES).logit()

    def make_whole(self) -> None:
        """Restore the whole model if it trains cut; a ``Pruner`` may continue with it.

        Raises:
            UsageError: the removed values are no longer available.
        """
        if self.kept is not None and self.made_whole_by is not None:
            self.made_whole_by()
        if self.kept is not None:
            raise UsageError(
                "this is part of a model that is trained at the size that its gates leave "
                "(compact), and what was cut off is not here: take the model itself"
            )

    @torch.no_grad()
    def closed_for_good(self) -> Tensor:
        """Return the gates that are closed and hardly ever open in a sample; bool, flat.

        Shape: bool, ``(plan.size,)``.
        """
        return (self.open_probability() < FOR_GOOD) & ~self.open()

    def extra_repr(self) -> str:
        """Return the text that ``print(model)`` shows of the bank."""
        return f"{self.plan.size} gates on {len(self.plan.axes)} axes, {self.gate}"


def _standardised(scores: Tensor) -> Tensor:
    """Return log scores with mean 0 and deviation 1, within ±``_FURTHEST``; lowest for 0."""
    scores = scores.detach().cpu().double()
    known = scores[scores > 0].log()
    if len(known) < 2 or not float(known.std()):
        return torch.zeros_like(scores)
    found = (scores.log() - known.mean()) / known.std()
    return found.clamp(-_FURTHEST, _FURTHEST)
