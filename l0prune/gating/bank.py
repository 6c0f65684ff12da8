"""The one bank of gates that a gated model carries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l0prune.capture.compat import version_of, without_compiler
from l0prune.capture.sizes import ALL_FIXED, FreeSizes
from l0prune.errors import UsageError, warn_renamed
from l0prune.gating.compiled_products import CompiledProducts
from l0prune.gating.fake_quantizer import FakeQuantizer
from l0prune.gating.kinds.base import AtTemperature, Gate, LearnsTemperature
from l0prune.gating.multipliers import Current, GateValues, Spreader
from l0prune.gating.products import Products, is_joined
from l0prune.plan.layout import Layout
from l0prune.plan.plan import Plan, Site
from l0prune.plan.widths import with_slots

# P(z ≠ 0) of a gate that is opened or closed by hand: open, but not so that it could not close.
OPENED = 0.75
CLOSED = 1e-3
# Below it twice in a row a gate is closed for good: one in a hundred is open in the end, as it is
# of those below a tenth of it, since a budget leaves room for it.
FOR_GOOD = 0.1
# Log odds of gates that are put on alike differ by their jitter, …
_ALIKE = 0.5
# … and are moved by a score by so much at most.
_FURTHEST = 2.0
_CHANCES = (1e-6, 1 - 1e-6)
# P(z = 0) below which bits are there in eval mode (Bayesian Bits, eq. 22).
_THRESHOLD = 0.34

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GateAxis:
    """An axis of a gated model as it stands now.

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

# What the run that trained a bank was asked for: a function that says by what open gates exceed it,
# empty where they do not; None while there is nothing to exceed. It is in no copy and in no file.
asked_of: WeakKeyDictionary[Gates, Callable[[Tensor], str] | None] = WeakKeyDictionary()


def alive() -> list[Gates]:
    """Every bank that somebody holds, copies included."""
    return list(_alive)


class Gates(nn.Module):
    """All gates of one model: one flat parameter, one sample per forward of the model.

    In train mode each forward of the model draws new multipliers z; in eval mode, and while
    ``fixed`` is set, z is the gate's estimate. A submodule called on its own draws once after
    every change of ``log_alpha``.

    Attributes:
        log_alpha: the gates' parameter, shape ``(plan.size,)``; float32, or float64 in a model
            of doubles, and never less precise than that.
        temperature: what else of the gates learns, flat, as precise; None where nothing does. See
            ``HardConcrete(beta="learn")``.
        clips: what of the ranges of a quantizer learns with the weights, flat; None where nothing
            does. See ``LearnedBits``.
        plan: where the gates act.
        gate: the kind of gate and its settings. To anneal one, put ``gate.at(part of the steps
            done)`` in its place between two steps; ``finetune`` does.
        example: positional and keyword arguments of the model's forward, on the CPU.
        free: sizes of these that are free beside the batch.
        fixed: gates stand at their eval values, and do not learn, even in train mode.
        bypassed: the model reads its plain parameters, as if it had no gates.
        kept: the slots that are left while the model trains cut, bool, flat; None while it is
            whole.
        made_whole_by: what undoes that; None while it is whole.
        quantizer: the fake quantization that a training has put on; None for none.
        facts: what a training knew of its data, as JSON data, for the files of an export:
            ``preprocessing`` of images.
    """

    log_alpha: nn.Parameter
    temperature: nn.Parameter | None
    clips: nn.Parameter | None
    kept: Tensor | None = None
    made_whole_by: Callable[[], None] | None = None
    quantizer: FakeQuantizer | None = None

    def __init__(
        self,
        plan: Plan,
        gate: Gate,
        log_alpha: Tensor,
        example: Example = ((), {}),
        free: FreeSizes = ALL_FIXED,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.gate = gate
        self.example = example
        self.free = free
        self.fixed = False
        self.bypassed = False
        self.facts: dict[str, Any] = {}
        self._given: Tensor | None = None
        self.log_alpha = nn.Parameter(log_alpha)
        self.register_parameter("temperature", None)
        self.register_parameter("clips", None)
        self._start_temperature()
        self._values = {_place(plan, site): GateValues() for site in plan.sites}
        self._spread_over(None)
        self._now = Current()
        self.products = Products()
        _alive.add(self)

    def _start_temperature(self) -> None:
        """Let what else learns start, but for the part of it that has learned already."""
        if not isinstance(self.gate, LearnsTemperature):
            return
        sizes, before = [axis.size for axis in self.plan.axes], self.temperature
        if (started := self.gate.temperature_start(sizes)) is not None:
            started = started.to(self.log_alpha.detach())
            if before is not None:
                count = min(len(started), len(before))
                started[:count] = before.detach()[:count]
            self.temperature = nn.Parameter(started)
            self._temperature_index = self.gate.temperature_index(sizes)

    def change_plan(self, plan: Plan, log_alpha: Tensor) -> None:
        """Take a plan that has more axes at its end than the present one, or fewer.

        The parameters are new objects: no optimizer may have the former ones yet.

        Shape: log_alpha ``(plan.size,)``.
        """
        self.plan = plan
        self.log_alpha = nn.Parameter(log_alpha.detach(), self.log_alpha.requires_grad)
        self._start_temperature()
        self._spread_over(self.kept)
        self._forget()

    @property
    def learned(self) -> list[nn.Parameter]:
        """Parameters of the gates themselves, without ``clips``."""
        return [p for p in (self.log_alpha, self.temperature) if p is not None]

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

    @property
    def gate_now(self) -> Gate:
        """The kind of gate at the temperature that it has learned."""
        if self.temperature is None or not isinstance(self.gate, LearnsTemperature):
            return self.gate
        if self._temperature_index.device != self.temperature.device:
            self._temperature_index = self._temperature_index.to(self.temperature.device)
        return self.gate.at_temperature(self.temperature, self._temperature_index)

    @torch.no_grad()
    def z(self) -> Tensor:
        """The multipliers of eval mode, shape ``(plan.size,)``, without gradient."""
        return self.estimated(self.log_alpha)

    def estimated(self, log_alpha: Tensor) -> Tensor:
        """The multipliers of eval mode that gates of these values have, shape ``(plan.size,)``."""
        with nullcontext() if log_alpha.requires_grad else torch.no_grad():
            z = self.gate_now.estimate(log_alpha)
            if (first := self._slots) < len(z):
                chances = self.gate_now.open_probability(log_alpha.detach())[first:]
                z = torch.cat([z[:first], (chances > 1 - _THRESHOLD).to(z)])
        return self._with_one(z, log_alpha)

    def _with_one(self, z: Tensor, log_alpha: Tensor) -> Tensor:
        """Multipliers of which one is 1 in each axis that ``keeps_one`` and would have none.

        It is that of the gate which is furthest open, of those whose slots are not cut; the last
        one of several.
        """
        kept = [axis for axis in self.plan.axes if axis.keeps_one]
        if not kept:
            return z
        values, opened = log_alpha.detach(), torch.zeros_like(z)
        if self.kept is not None:
            values = values.masked_fill(~self.kept.to(values.device), float("-inf"))
        for axis in kept:
            best = F.one_hot(values[axis.slice].flip(0).argmax(), axis.size).flip(0)
            opened[axis.slice] = best * (z.detach()[axis.slice] == 0).all()
        return z + opened

    def open(self) -> Tensor:
        """Return the gates that are open (z > 0) in eval mode; bool, shape ``(plan.size,)``."""
        return self.z() > 0

    @torch.no_grad()
    def set_open(self, open_: Tensor | str, slots: Sequence[int] | None = None) -> None:
        """Open and close gates: those that stand otherwise move, all others stay as they are.

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
        wanted = open_.to(self.log_alpha.device)
        for target, probability in ((True, OPENED), (False, CLOSED)):
            moves = (wanted == target) & (now != target)
            starts = self.initial(probability).to(self.log_alpha)
            self.log_alpha.copy_(torch.where(moves, starts, self.log_alpha))

    @torch.no_grad()
    def initial(self, open_probability: float | Tensor) -> Tensor:
        """The ``log_alpha`` at which each gate is open with this probability, or its own; float64.

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
        """Return whether all gates but those of bits are equally open, as when they are put on.

        Args:
            among: of these gates alone; bool, shape ``(plan.size,)``.
        """
        odds = self._odds()[: self.plan.slots]
        if among is not None:
            odds = odds[among[: self.plan.slots].to(odds.device)]
        return not len(odds) or float(odds.max() - odds.min()) < _ALIKE

    @torch.no_grad()
    def init_from_scores(self, scores: Tensor) -> None:
        """Open each gate further the more its slot matters, and less the less it does.

        The log odds of each gate move by the logarithm of its score, of which the mean over all
        gates is taken away and the spread made 1, within ±2: learning begins where one look at the
        network or the data ends, and may still think better of it. Gates of bits stay.

        Args:
            scores: what ``l0prune.score`` gives; 0 or more, shape ``(plan.size,)``.

        Raises:
            UsageError: they are not of this shape, or not all 0 or more; or the model is cut, and
                nobody knows any more what was cut off.
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

    def put(self, open_: Tensor) -> None:
        """Call ``set_open``, by the name that it had."""
        warn_renamed("Gates.put", "set_open")
        self.set_open(open_)

    def lean(self, scores: Tensor) -> None:
        """Call ``init_from_scores``, by the name that it had."""
        warn_renamed("Gates.lean", "init_from_scores")
        self.init_from_scores(scores)

    def stand_alike(self) -> bool:
        """Call ``are_uniform``, by the name that it had."""
        warn_renamed("Gates.stand_alike", "are_uniform")
        return self.are_uniform()

    def _odds(self) -> Tensor:
        """log P/(1−P) of each gate's chance to be open, float64."""
        return self.gate_now.open_probability(self.log_alpha.double()).clamp(*_CHANCES).logit()

    def make_whole(self) -> None:
        """Make a model that is cut while it trains whole; a ``Pruner`` may go on with it.

        Raises:
            UsageError: nobody knows any more what was cut off.
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

    def open_probability(self) -> Tensor:
        """P(z ≠ 0) of each gate, shape ``(plan.size,)``, differentiable."""
        return self.gate_now.open_probability(self.log_alpha)

    def current(self) -> Tensor:
        """The multipliers that the model uses now, shape ``(plan.size,)``."""
        self.refresh()
        assert self._now.z is not None
        return self._now.z

    @contextmanager
    def using(self, z: Tensor) -> Iterator[None]:
        """Within the context the multipliers are ``z``, in every mode, and its gradient is taken.

        Shape: z ``(plan.size,)``, of the dtype and on the device of ``log_alpha``.
        """
        before, self._given = self._given, z
        try:
            yield
        finally:
            self._given = before

    def multiplier(self, site: Site) -> GateValues:
        """Return the buffer of a site's multipliers, renewed by each ``refresh``."""
        return self._values[_place(self.plan, site)]

    def cut_to(self, kept: Tensor | None) -> None:
        """Multiply parameters of which only these slots are left; None for all.

        The gates stay as they are: those of slots that are gone multiply nothing.

        Args:
            kept: as ``plan.kept`` gives it, bool, shape ``(plan.size,)``.
        """
        self.__dict__["kept"] = kept  # no buffer: it is not of the model's state
        self._spread_over(kept)
        self._forget()

    def _spread_over(self, kept: Tensor | None) -> None:
        """Compute multipliers from here on for the positions that these slots leave."""
        self._slots = self.plan.slots  # known here, since compilers cannot follow a search
        shared: dict[tuple[Layout, bytes], tuple[Tensor | None, list[GateValues]]] = {}
        for (layout, dim), values in self._values.items():
            mask = None if kept is None else self.plan.mask(layout if dim is None else dim, kept)
            left = None if mask is None or bool(mask.all()) else mask.nonzero().flatten().cpu()
            key = b"" if left is None else left.numpy().tobytes()
            shared.setdefault((layout, key), (left, []))[1].append(values)
        self._spreader = Spreader(self.plan, [(of[0], left) for of, (left, _) in shared.items()])
        self._by_layout = [places for _, places in shared.values()]
        for begin, places in zip(self._spreader.begins, self._by_layout, strict=True):
            for place in places:
                place.begin = begin
        sites = [(site.tensor, self.multiplier(site), site.dim) for site in self.plan.sites]
        self._compiled = CompiledProducts(sites)

    def forward(self, x: Any) -> Any:
        """``x`` itself, so that a model that runs its children in turn computes what it did."""
        return x

    def begin_forward(self, model: nn.Module | None = None, *_: Any) -> None:
        """Forward pre-hook of the model: from here on, new multipliers."""
        if not self.bypassed:
            self._now.noise = None
            if not self._now.stands(self.log_alpha, self._mode):
                self._compute()
            self._now.in_forward = True
            assert self._now.spread is not None
            if torch.compiler.is_compiling():
                if model is not None:
                    self.products.given(self._compiled.made(model, self._now.spread))
                return
            self.products.begin(self._now.spread)
            if model is not None:
                self._now.note_own(model)

    def is_own(self, module: nn.Module, name: str, parameter: Tensor) -> bool:
        """Return whether this tensor was the module's parameter when the model's forward began."""
        return self._now.is_own(module, name, parameter)

    def end_forward(self, *_: Any) -> None:
        """Forward hook of the model: from here on, look whether the multipliers still hold.

        A backward pass that computes parts of the forward again finds them as they were.
        """
        self._now.in_forward = False
        self._now.own = None
        self.products.end()
        if torch.compiler.is_compiling():
            self._forget()  # a tracer's tensors mean nothing outside its graph

    @property
    def in_forward(self) -> bool:
        """Return whether the model is in its forward right now."""
        return self._now.in_forward

    @property
    def is_flat_at_zero(self) -> bool:
        """Return whether a multiplier of 0 has no gradient, whatever the loss is."""
        return self._given is None and getattr(self.gate, "is_flat_at_zero", False)

    def refresh(self) -> None:
        """Compute the multipliers unless what there is still holds."""
        now = self._now
        if not (now.in_forward and now.grad == torch.is_grad_enabled()):
            self._refresh_outside()

    @without_compiler
    def _refresh_outside(self) -> None:
        """``refresh`` for a part of the model that runs on its own, or once more for backward."""
        now, value = self._now, self.log_alpha
        if now.value is not value or now.version != version_of(value):
            now.noise = None
        elif now.mode == self._mode():
            return
        self._compute()

    def _mode(self) -> tuple[object, ...]:
        inference = torch.is_inference_mode_enabled()
        grad = torch.is_grad_enabled()
        learned = None if self.temperature is None else version_of(self.temperature)
        return (self.gate, learned, id(self._given), self.training, self.fixed, grad, inference)

    def _compute(self) -> None:
        now, value = self._now, self.log_alpha
        if self._given is not None:
            now.z = self._given
        elif self.training and not self.fixed:
            if now.noise is None:
                now.noise = _uniform(value)
            now.z = self._with_one(self.gate_now.sample(value, now.noise), value)
            now.z = self._waited_for(now.z, [p for p in (self.clips,) if p is not None])
        elif self.fixed:
            now.z = self.estimated(value.detach())
            now.z = self._waited_for(now.z, self.parameters())
        else:
            now.z = self.estimated(value)
        now.spread, parts = self._spreader(now.z)
        for places, values in zip(self._by_layout, parts, strict=True):
            for place in places:
                place.values = values
        now.grad = torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            now.note(
                value, self._mode(), is_fleeting=now.noise is not None or self._given is not None
            )

    def _waited_for(self, z: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Let parameters have a gradient, of 0: DDP waits for one of each."""
        if self.training and is_joined():
            for each in parameters:
                z = z + 0 * each.sum()
        return z

    def _forget(self) -> None:
        """Drop what is computed: it belongs to this very object, and is cheap to compute again."""
        self._now = Current()
        self.products = Products()
        for place in self._values.values():
            place.values = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gates:
        """Move with the model, but never to a dtype in which exp and log lose the gates."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            exact = moved.dtype in (torch.float32, torch.float64)
            return moved if exact else tensor.to(moved.device)

        super()._apply(move, recurse)
        self._forget()
        return self

    def extra_repr(self) -> str:
        """Return the text that ``print(model)`` shows of the bank."""
        return f"{self.plan.size} gates on {len(self.plan.axes)} axes, {self.gate}"


def _standardised(scores: Tensor) -> Tensor:
    """Logarithms with mean 0 and spread 1, within ±``_FURTHEST``; those of 0 are the lowest."""
    scores = scores.detach().cpu().double()
    known = scores[scores > 0].log()
    if len(known) < 2 or not float(known.std()):
        return torch.zeros_like(scores)
    found = (scores.log() - known.mean()) / known.std()
    return found.clamp(-_FURTHEST, _FURTHEST)


def _place(plan: Plan, site: Site) -> tuple[Layout, Layout | None]:
    """Return what a site's multipliers depend on: its layout, and the dim's once it is cut."""
    dims = plan.tensors.get(site.tensor)
    return site.layout, None if dims is None else dims[site.dim]


def _uniform(like: Tensor) -> Tensor:
    """Noise strictly between 0 and 1 from the device's global generator."""
    epsilon = torch.finfo(like.dtype).eps
    return torch.empty_like(like).uniform_(epsilon, 1 - epsilon)
