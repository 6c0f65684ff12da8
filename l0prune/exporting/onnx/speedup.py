"""Speedup of a small network's file beside its ideal by MACs, and where it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from l0prune.exporting.onnx import collect
from l0prune.exporting.onnx.profile import LayerTime, profile_of
from l0prune.exporting.onnx.times import Times, one_example, times_of
from l0prune.exporting.pieces import ExportedPart
from l0prune.plan.branch import KIND
from l0prune.plan.budget_text import SPEED
from l0prune.plan.globs import listed
from l0prune.plan.plan import Plan
from l0prune.plan.targets import TARGET
from l0prune.plan.width_times import are_in_blocks
from l0prune.progress.stages import stage
from l0prune.selection.fitting import times_on

NEAR = 0.8  # share of the ideal from which on nothing has to be explained
_MOST = 3  # losses that are told
_SLIGHT = 0.02  # share of the small network's time, up to which a loss is not told
_CALLS = 0.2  # the same of the time outside nodes, which a profile makes longer
_SHORT = 0.01  # milliseconds of a node, up to which its start counts
_SLOWER = 1.2  # times what full blocks would take, from which on a path is a slower one
_MET = 0.95  # share of a budget in times as fast, below which it is missed
_BUSY = 0.2  # spread of the turns, from which on the machine was busy
_IN_TIME = ("latency", "speed")  # measures of budgets that are about time
RUNTIME = "runtime"  # the operator of a loss that is in no node

Cause = Literal["widths", "memory", "start", "runtime", "size", "new"]


@dataclass(frozen=True)
class Loss:
    """Layer that takes longer than its share of the dense network's time.

    Attributes:
        path: of its module; empty for the model's own forward and for the runtime.
        operator: as in ONNX; ``runtime`` for time outside all nodes.
        ms: milliseconds in the small network.
        due: its milliseconds in the dense network, times the share of its MACs that is left.
        cause: in a word.
        reason: the same as a clause.
    """

    path: str
    operator: str
    ms: float
    due: float
    cause: Cause
    reason: str

    def __str__(self) -> str:
        where = f"{self.path or 'the model itself'} ({self.operator})"
        where = "the runtime itself" if self.operator == RUNTIME else where
        return f"{where}: {self.ms:.2g} ms instead of {self.due:.2g}: {self.reason}"


@dataclass(frozen=True)
class CutFacts:
    """Facts about a small network from which advice is chosen.

    Attributes:
        asked: the budgets that its gates met, as text.
        in_blocks: whether the widths that were cut are blocks in which the runtime is fastest.
        block: channels that it computes at once.
        may_drop_branches: whether branches without gates could have gates.
        beside: files of fewer bits that are written beside it, by name.
    """

    asked: tuple[str, ...] = ()
    in_blocks: bool = False
    block: int = 16
    may_drop_branches: bool = False
    beside: Sequence[str] = ()


@dataclass(frozen=True)
class Speedup:
    """Speedup of a file: asked for, measured, and the ideal by MACs.

    Attributes:
        asked: the budgets that the gates met, as text; empty without any.
        times: of the file beside the dense network's.
        macs: of the dense network and of the small one, for one example.
        losses: the layers that lose most, if the speedup is less than 0.8 of the ideal.
        advice: what to try next then; nothing that was already done.
    """

    asked: tuple[str, ...]
    times: Times
    macs: tuple[int, int]
    losses: tuple[Loss, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def measured(self) -> float:
        """Time of the dense network over that of the small one."""
        return 1 / self.times.share

    @property
    def ideal(self) -> float:
        """MACs of the dense network over those of the small one."""
        before, after = self.macs
        return before / after if after else 1.0

    @property
    def of_ideal(self) -> float:
        """The measured speedup as a share of the ideal one."""
        return self.measured / self.ideal

    @property
    def is_near(self) -> bool:
        """Return whether nothing has to be explained: it is near the ideal, or nothing was cut."""
        return self.of_ideal >= NEAR or self.ideal <= 1

    @property
    def missed(self) -> str:
        """The budget in times as fast that was missed by more than 5 %; empty if none was."""
        for text in self.asked:
            times = text.rpartition("=")[2].rstrip("x")
            if _measure(text) == SPEED and self.measured < _MET * float(times):
                return text
        return ""

    @property
    def warning(self) -> str:
        """Warning that MACs were cut and no time was gained; empty where some was."""
        if self.times.share < 1 or self.ideal <= 1:
            return ""
        return f"the file is not faster than the dense network's: {self}"

    def __str__(self) -> str:
        asked = f", asked {listed(self.asked, most=_MOST)}" if self.asked else ""
        ideal = f", ideal by MACs {self.ideal:.2f} times"
        said = [f"{self.times.pace}{asked}{ideal}; {self.times.setting}."]
        if self.times.spread > _BUSY:
            said.append("The machine was busy: take the times again before acting on them.")
        if self.missed:
            said.append(
                f"That misses {self.missed}: time the file again on a quiet machine, and if it "
                "stays so, ask for a little more."
            )
        if not self.is_near:
            said.append(f"That is {self.of_ideal:.0%} of the ideal.")
            if self.losses:
                said.append(f"Most is lost in {'; '.join(map(str, self.losses))}.")
            if self.advice:
                said.append(f"What can help: {'; '.join(self.advice)}.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, without the times."""
        return {
            "asked": list(self.asked),
            "speedup": self.measured,
            "ideal": self.ideal,
            "of_ideal": self.of_ideal,
            "before_ms": self.times.before,
            "after_ms": self.times.after,
            "spread": self.times.spread,
            "losses": [asdict(loss) for loss in self.losses],
            "advice": list(self.advice),
        }


def runtime_block() -> int:
    """Return how many channels ONNX Runtime computes at once on this processor."""
    flags = collect.processor_flags()
    return 8 if flags and "avx512f" not in flags else 16


def losses_of(
    dense: Sequence[LayerTime], small: Sequence[LayerTime], found: Speedup, block: int
) -> tuple[Loss, ...]:
    """Return the layers that lose most beside their share of the dense network's time.

    Args:
        dense, small: times of the layers in the two files.
        found: the speedup that was measured.
        block: channels that the runtime computes at once.
    """
    known = {layer.key: layer for layer in dense}
    losses = [_loss(layer, known.get(layer.key), block) for layer in small]
    before, after = (
        max(0.0, whole - sum(layer.ms for layer in layers))
        for whole, layers in ((found.times.before, dense), (found.times.after, small))
    )
    due = before / found.ideal
    text = "what a call costs beside its nodes, which no cut takes away"
    losses.append(Loss("", RUNTIME, after, due, "runtime", text))
    least = {RUNTIME: _CALLS}
    told = [
        loss
        for loss in losses
        if loss.ms - loss.due > least.get(loss.operator, _SLIGHT) * found.times.after
    ]
    return tuple(sorted(told, key=lambda loss: loss.due - loss.ms)[:_MOST])


def _loss(layer: LayerTime, was: LayerTime | None, block: int) -> Loss:
    if was is None:
        text = "the dense network's file has no such node"
        return Loss(*layer.key, layer.ms, 0.0, "new", text)
    share = layer.work / was.work if was.work else 1.0
    cause, reason = _reason(layer, was, share, block)
    return Loss(*layer.key, layer.ms, was.ms * min(share, 1.0), cause, reason)


def _reason(layer: LayerTime, was: LayerTime, share: float, block: int) -> tuple[Cause, str]:
    """Return why a layer takes longer than its share, by what its times show."""
    odd = [n for n in layer.widths if n % block and n not in was.widths]
    if layer.has_macs and odd:
        numbers = " and ".join(map(str, odd))
        filled = prod(n / (ceil(n / block) * block) for n in layer.widths)
        slower = "fills its blocks in part"
        if layer.ms * filled > _SLOWER * was.ms * share:
            slower = "takes a slower path"
        if (was.is_blocked and not layer.is_blocked) or layer.reorders > was.reorders:
            slower = "leaves its fast layout"
        return "widths", f"{numbers} channels are no multiple of {block}: the runtime {slower}"
    if layer.reorders > was.reorders and layer.reorders > layer.ms / 4:
        return "widths", "memory is put in another order for a layer beside it"
    if layer.ms <= _SHORT * layer.nodes:
        return "start", f"at {1e3 * layer.ms / layer.nodes:.2g} µs a node, starting it counts"
    if layer.is_depthwise or not layer.has_macs:
        return "memory", "it waits for memory, whatever its MACs"
    of_time = layer.ms / max(was.ms, 1e-3)  # profiles count whole microseconds
    return "size", f"it takes {of_time:.0%} of its time for {share:.0%} of its MACs"


def advice_for(losses: Sequence[Loss], facts: CutFacts) -> tuple[str, ...]:
    """Return what can bring a network nearer to its ideal and was not done yet."""
    causes = {loss.cause for loss in losses}
    found = []
    if not facts.in_blocks:
        found.append(
            f"whole blocks everywhere, round_to={facts.block} (the default leaves finer widths "
            "where a block costs more than it gains)"
        )
    if not any(_measure(text) in _IN_TIME for text in facts.asked):
        found.append("a budget in time (speed=2, on the command line --faster 2)")
    if facts.may_drop_branches and causes & {"memory", "start", "runtime"}:
        found.append("gates on whole branches (branches=True, no --no-branches)")
    if causes & {"start", "runtime"}:
        found.append("more examples in a call")
    if causes & {"memory", "size"} and "int8" not in facts.beside:
        found.append("a file in eight bits (int8=…, --int8)")
    return tuple(found)


def _measure(text: str) -> str:
    """Return the measure of a budget's text, such as ``layer3.*: params=0.3``."""
    return text.rpartition("=")[0].rpartition(":")[2].strip()


def cut_facts(
    plan: Plan, kept: Tensor, asked: tuple[str, ...], beside: Sequence[str] = ()
) -> CutFacts:
    """Return the facts of a network that keeps these slots, bool and flat.

    Widths of axes that stay whole are the model's own, and those of branches that are gone none.
    """
    in_blocks = are_in_blocks(plan, kept, times_on(TARGET).blocks(plan))
    gates_branches = any(axis.kind == KIND for axis in plan.axes)
    may_drop = bool(plan.branches) and not gates_branches
    return CutFacts(asked, in_blocks, runtime_block(), may_drop, beside)


def measured(
    path: Path,
    dense: Path,
    piece: ExportedPart,
    threads: int,
    macs: tuple[int, int],
    facts: CutFacts,
) -> Speedup:
    """Time a piece's file beside the dense network's, and find where time is lost.

    Args:
        path, dense: of the two files.
        piece: that the file was made from.
        threads: that a call may use.
        macs: of the dense network and of the small one.
        facts: from which advice is chosen.
    """
    given, batch = one_example(piece)
    found = Speedup(facts.asked, times_of(path, dense, given, threads, batch), macs)
    if found.is_near:
        return found
    with stage("finding the layers that lose time"):
        before = profile_of(dense, given, threads, found.times.before)
        after = profile_of(path, given, threads, found.times.after)
    losses = losses_of(before, after, found, facts.block)
    return replace(found, losses=losses, advice=advice_for(losses, facts))
