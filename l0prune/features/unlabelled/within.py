"""The search for the smallest network within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from l0prune.capture.undisturbed import trying
from l0prune.errors import OutOfReach, UsageError
from l0prune.features.unlabelled.compensate import Calibration, multipliers
from l0prune.features.unlabelled.division import Division
from l0prune.features.unlabelled.fidelity import Fidelity
from l0prune.features.unlabelled.fitting import fit_and_compensate
from l0prune.files.artifact import named_tensors
from l0prune.plan.limits import Bound, LimitsLike
from l0prune.plan.measures import Latency
from l0prune.progress.stages import counting, stage
from l0prune.running.criteria import judged
from l0prune.selection.correction import observed

TRIED = 5  # sizes that are tried
_SMALLEST, _CLOSE = 0.05, 0.1  # smallest share that is tried, and logarithm of near ones
_FAR = 0.5  # logarithm of the most that goes at once from a network that learns: to 0.6 of it


@dataclass(frozen=True, slots=True)
class Step:
    """A network that ``shrink`` tried for a tolerance.

    Attributes:
        share: the requested share of the measure.
        measure: what is spared.
        fidelity: nearness of its outputs to the original's.
        far: what was compared with the tolerance.
        observed: the measured share, of a network within the tolerance where its time was measured.
    """

    share: float
    measure: str
    fidelity: Fidelity
    far: float
    observed: float | None = None

    def __str__(self) -> str:
        """Return how far it is as text."""
        return f"{self.far:.1%} from the original ({self.fidelity})"

    @property
    def left(self) -> float:
        """The share of the measure that is left: as measured, else as requested."""
        return self.share if self.observed is None else self.observed


@dataclass
class Cuts:
    """Cuts of one network, which start where it is held to.

    Attributes:
        found: the network and its inputs.
        settings: of ``fit`` and of ``fit_and_compensate``.
        learn: lets the cut network learn, and returns its fidelity; None where nothing is trained.
    """

    found: Calibration
    settings: Mapping[str, Any]
    learn: Callable[[], Fidelity] | None
    _start: dict[str, Tensor] = field(init=False)
    _division: Division = field(init=False)

    def __post_init__(self) -> None:
        self._start, self._division = held(self.found), self.found.division()

    def cut(self, budget: LimitsLike | None, **options: Any) -> Fidelity:
        """Cut to a budget from where cuts start; return the fidelity to the network there."""
        hold(self.found, self._start)
        asked = {**options, **self.settings}
        return fit_and_compensate(self.found, budget, self._division, **asked)[1].after

    def start_here(self) -> None:
        """Let the next cuts start from the present network.

        Its closed gates are multiplied into the weights, and open again: a slot of zeros is worth
        nothing, so that it goes first.
        """
        found, tensors = self.found, dict(named_tensors(self.found.root))
        for name, by in multipliers(found.gates, tensors).items():
            tensors[name].data = tensors[name].data * by.to(tensors[name])
        of_gates = _gates(found)
        self._start |= {
            name: each.detach() for name, each in tensors.items() if id(each) not in of_gates
        }
        hold(found, self._start)
        self._division = found.division()


@stage("looking for the smallest network within the tolerance")
def smallest(
    cuts: Cuts, allowed: float, spared: Bound, judge: Callable[[nn.Module], float] | None
) -> tuple[list[Step], Step]:
    """Keep the smallest network within the tolerance; return the tried sizes and that one.

    The share is bisected. Networks that learn come after those that do not: each is cut out of the
    smallest one within the tolerance so far, and learns on from there. So less goes at once, of
    which more comes back. Networks within are timed, if time is spared: of these the fastest is
    kept, and none that is not faster than the original.

    Args:
        spared: bound of the measure that is spared, at all of the original's amount.

    Raises:
        UsageError: no size that was tried is within the tolerance and smaller, or the judge finds
            that the uncut network is not.
    """
    if judge is not None and not (far := _judged(judge, cuts.found.root)) <= allowed:
        raise UsageError(
            f"the judge returned {far:.4g} for the network itself, of which nothing is cut, and "
            f"{allowed:g} is allowed. It must return how much worse a network is than that, such "
            "as 1 - right(network) / right(model), and not what it gets right, or its loss"
        )
    search = _Search(cuts, allowed, spared, judge)
    search.run()
    if cuts.learn is not None:
        search.run(cuts.learn)
    if search.best is None:
        raise UsageError(search.none_within())
    hold(cuts.found, search.best.tensors)
    return sorted(search.tried, key=lambda step: step.share), search.best.step


def _judged(judge: Callable[[nn.Module], float], network: nn.Module) -> float:
    """Return how much worse a judge finds a network, which stays as it is."""
    with trying(network):
        return judged(judge, network)


class _Within(NamedTuple):
    """A network within the tolerance."""

    step: Step
    tensors: dict[str, Tensor]


class _Search:
    """See ``smallest``.

    Attributes:
        tried: sizes in the order in which they were tried.
        best: smallest of the networks within that are smaller than the original.
    """

    def __init__(
        self,
        cuts: Cuts,
        allowed: float,
        spared: Bound,
        judge: Callable[[nn.Module], float] | None,
    ) -> None:
        self._cuts, self._allowed, self._spared, self._judge = cuts, allowed, spared, judge
        self._measure = spared.measure.name
        self._within = 0.0  # logarithm of the smallest share within the tolerance
        self.tried: list[Step] = []
        self.best: _Within | None = None

    def run(self, learn: Callable[[], Fidelity] | None = None) -> None:
        """Try ``TRIED`` shares below the smallest within so far."""
        found, until = self._cuts.found, len(self.tried) + TRIED
        low, known = math.log(_SMALLEST), dict[bytes, Step]()
        is_moved = False  # whether cuts are to start from the present network
        if learn is not None and self.best is not None:
            hold(found, self.best.tensors)
            is_moved = True
        with counting(TRIED) as counter:
            while len(self.tried) < until and self._within - low > _CLOSE:
                if is_moved:
                    self._cuts.start_here()
                middle, is_moved = (low + self._within) / 2, False
                share = math.exp(middle if learn is None else max(middle, self._within - _FAR))
                try:
                    after = self._cuts.cut(f"{self._measure}={share:.4f}", observe=False)
                except OutOfReach:
                    low = math.log(share)
                    continue
                open_ = found.gates.open()
                if bool(open_.all()):  # by an inexact table it is as fast as a whole
                    self._within = math.log(share)
                    continue
                cut = bytes(open_.byte().cpu().tolist())
                if cut not in known or learn is not None:  # coarse widths: many shares, one network
                    known[cut] = self._step(share, after if learn is None else learn())
                    counter.step()
                step = known[cut]
                if not step.far <= self._allowed:  # or no number
                    low = math.log(share)
                    continue
                self._within, is_moved = math.log(share), learn is not None

    def _step(self, share: float, after: Fidelity) -> Step:
        """Judge the present network, and hold it if it is the best so far."""
        found, spared = self._cuts.found, self._spared
        if self._judge is not None:
            far = _judged(self._judge, found.root)
        elif found.classes.are_known and after.agreement is not None:
            far = 1 - after.agreement
        else:
            far = after.error
        is_within = far <= self._allowed
        amount = observed(found.root, [spared]).get(spared) if is_within else None
        ratio = None if amount is None else amount / spared.dense
        step = Step(share, self._measure, after, far, ratio)
        self.tried.append(step)
        if is_within and step.left < min(1, self.best.step.left if self.best else 1):
            self.best = _Within(step, held(found))
        return step

    def none_within(self) -> str:
        """Return why there is no smaller network within the tolerance, and the way on."""
        allowed, tried, is_time = self._allowed, self.tried, self._measure == Latency.name
        if not tried:
            other = ": its time hardly depends on its widths. Try measure='macs' (--measure macs)"
            return f"no cut takes less {self._measure}{other if is_time else ''}"
        within = [step for step in tried if step.observed is not None]
        if within:
            fastest = min(within, key=lambda step: step.left)
            return (
                f"no network that stays within {allowed:.1%} is faster: one that was expected to "
                f"take {fastest.share:.2f} of the time took {fastest.left:.2f} of it. Allow more, "
                "or try measure='macs' (--measure macs)"
            )
        nearest = max(tried, key=lambda step: step.share)
        learns = self._cuts.learn is not None
        way_on = "Allow more" if learns else "Let it learn (recover=8, --recover 8), allow more"
        return (
            f"no smaller network was found that stays within {allowed:.1%}. With "
            f"{self._measure}={nearest.share:.2f}: {nearest}. {way_on}, or give more inputs"
        )


def held(found: Calibration) -> dict[str, Tensor]:
    """Return the tensors of a model whose weights are replaced and not written to, unlike gates."""
    of_gates = _gates(found)
    return {
        name: tensor.detach().clone() if id(tensor) in of_gates else tensor.detach()
        for name, tensor in named_tensors(found.root)
    }


def hold(found: Calibration, tensors: dict[str, Tensor]) -> None:
    """Let a model have those tensors of ``held`` again."""
    of_gates = _gates(found)
    for name, tensor in named_tensors(found.root):
        tensor.data = tensors[name].clone() if id(tensor) in of_gates else tensors[name]


def _gates(found: Calibration) -> set[int]:
    return {id(tensor) for _, tensor in named_tensors(found.gates)}
