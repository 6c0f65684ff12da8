"""One-shot scores: estimates of each gated slot's importance, from weights or a look at data.

Gates learn which slots can go; a score guesses it, as pruning without learning does. A new score is
one function under ``@register``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from l0prune.capture.compat import NormBase
from l0prune.doors import Registry
from l0prune.errors import DataError, UsageError
from l0prune.files.consent import is_code
from l0prune.files.user_code import function
from l0prune.gating.attaching import gated_tensor, holder
from l0prune.plan.layout import Layout, distinct
from l0prune.plan.names import check_score
from l0prune.plan.numbers import SEEDS, check_whole
from l0prune.plan.plan import Plan
from l0prune.plan.switches import switches_of
from l0prune.progress.display import displayed
from l0prune.progress.stages import counting, stage, steps
from l0prune.running.batches import usual_batch_size
from l0prune.running.criteria import Loss, describe
from l0prune.running.task import Task
from l0prune.selection.score_input import ScoreInput, even, mean_over_examples

FORWARDS = 5  # of a branch on each batch: after about so many rounds all are removed
TRIED = 10, 32  # batches, at most, and examples of each, on which ``auto`` tries branches
_ROUND = 0.25  # share of the remaining branches that is removed per round
_AUTO = 100  # batches of ``auto``
# A loss is at a minimum if its squared slope at z = 1 is less than this part of that nearby: for a
# trained ResNet-20 the ratio is 1.2, with its own answers as targets 0, in bfloat16 0.001.
_LEAST, _NEARBY = 0.01, 0.99
_NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Normalise = Literal["axis-mean", "none"]
Score = TypeVar("Score", bound=Callable[[ScoreInput], Tensor])
SCORES: Registry[Callable[[ScoreInput], Tensor]] = Registry("score", "scores")


@displayed
def score(
    model: nn.Module,
    how: str = "taylor",
    data: Any = None,
    *,
    loss: Loss | str | None = None,
    normalise: Normalise = "axis-mean",
    batches: int | None = None,
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Tensor:
    """Return each gated slot's estimated importance; higher is kept. The model stays as it was.

    It is of the network with all gates at 1.

    - ``"magnitude"``: the L2 norm of the weights that the slot's gate multiplies.
    - ``"group-magnitude"``: the L2 norm of all weights that are cut with the slot.
    - ``"bn-scale"``: ``|γ|`` of torch.nn's normalisation layers that the slot passes through, their
      mean where there are several; magnitudes over their mean on axes without.
    - ``"taylor"``: (dL/dz)² with L the mean loss over the data, in eval mode: to first order the
      square of how much the loss changes when the gate closes.
    - ``"fisher"``: the mean over the batches of their (dL/dz)², which does not vanish where L is at
      a minimum. It depends on the size of the batches.
    - ``"outputs"``: the mean over the examples of Σᵢ (doᵢ/dz)² with o the model's outputs, each
      estimated from one random direction. It looks at no labels and no loss.
    - ``"ablation"``: of branches the mean over the examples of ‖o − o'‖², o' without them. They go
      in rounds, those first that move the outputs least. Of other slots ``"outputs"``.
    - ``"auto"``: ``"fisher"`` of slots, from at most 100 batches (``"outputs"`` where the loss is
      at its least), and ``"ablation"`` of branches, from a few hundred examples.
    - ``"random"``: uniform between 0 and 1, the floor under all others.
    - ``"file.py:function"``: a function of a ``ScoreInput`` (see ``register``).

    Args:
        model: a gated model.
        data: what ``finetune`` takes, for scores that look at it; its training part is used.
        loss: see ``Task``; None for that of the data, or ``"auto"``.
        normalise: ``"axis-mean"`` divides by the mean of the axis, ``"none"`` does not.
        batches: at most so many batches of the data; None for all.
        batch_size: examples a batch, where the data lets us choose; None for the usual.
        device: where to take gradients, as for ``finetune``.
        seed: of the order of the data, and of ``"random"``.

    Shape: ``(plan.size,)``, float64 on the CPU; 0 or more.
        progress: show progress on stderr.

    Raises:
        NotGated: the model carries no gates.
        UsageError: there is no such score, it needs data, or an argument makes no sense.
        DataError: the data is empty, does not fit the model, or its loss is nan or inf.
    """
    root, gates = holder(model)
    gates.make_whole()
    task = None if data is None else Task.of(data, loss)
    if batch_size is None:
        batch_size = usual_batch_size(None if task is None else task.train)
    _check_options(normalise, batches, batch_size, seed)
    of = ScoreInput(root, gates, task, batches, batch_size, device, seed)
    values = compute_score(check_name(how), of).values
    return over_axis_mean(gates.plan, values) if normalise == "axis-mean" else values


def _check_options(normalise: str, batches: int | None, batch_size: int, seed: int) -> None:
    if normalise not in ("axis-mean", "none"):
        raise UsageError(f"normalise must be 'axis-mean' or 'none', not {normalise!r}")
    check_whole("seed", seed, 0, SEEDS)
    check_whole("batch_size", batch_size)
    if batches is not None:
        check_whole("batches", batches)


def names() -> list[str]:
    """Return the names of all registered scores."""
    return sorted(SCORES)


def check_name(name: str) -> str:
    """Return the name of a score; raise UsageError if it is neither registered nor code."""
    if not is_code(name):
        check_score(name, SCORES)
    return name


def register(name: str) -> Callable[[Score], Score]:
    """Decorator: make a function known to ``score``.

    It takes a ``ScoreInput`` and returns one number of 0 or more for each gate: float64, shape
    ``(plan.size,)``, on the CPU.
    """

    def known(function: Score) -> Score:
        SCORES[name] = function
        return function

    return known


class ComputedScore(NamedTuple):
    """Values of a score, with all that they were computed from.

    Attributes:
        name: of the score.
        input: the network, and the part of the data that was used.
        values: 0 or more, and finite; float64, shape ``(plan.size,)``, on the CPU.
    """

    name: str
    input: ScoreInput
    values: Tensor


def compute_score(
    name: str, of: ScoreInput, by: Callable[[ScoreInput], Tensor] | None = None
) -> ComputedScore:
    """Compute a score, registered or ``file.py:function``, or the function ``by`` instead of it."""
    score_of = by or (function(name, "score") if is_code(name) else SCORES[name])
    with stage(f"scoring by {name}"):
        values = score_of(of)
    if not isinstance(values, Tensor) or values.shape != (of.plan.size,):
        raise UsageError(
            f"the score {name} must return a number for each gate, a tensor of shape "
            f"({of.plan.size},), not {describe(values)}"
        )
    values = values.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise DataError(f"some {name} scores are nan or inf: look for that in the data and weights")
    return ComputedScore(name, of, values)


def compute_best_scores(slots: ScoreInput, branches: ScoreInput) -> list[ComputedScore]:
    """Compute the score that suits each kind of axis best: ``ablation`` of branches.

    There is one for each kind that the network has, with 0 for the other kind. Branches have a
    separate input, of fewer examples.
    """
    switches, found = switches_of(slots.plan), []
    if not switches.all():
        name, of, values = compute_score(_best_for_slots(slots), slots)
        found.append(ComputedScore(name, of, values.masked_fill(switches, 0)))
    if switches.any():
        found.append(compute_score("ablation", branches, _branch_ablation))
    return found


def joined_scores(plan: Plan, found: Iterable[ComputedScore]) -> Tensor:
    """Join the scores of each kind of axis into one vector."""
    return sum((each.values for each in found), torch.zeros(plan.size, dtype=torch.float64))


@register("magnitude")
def magnitude(of: ScoreInput) -> Tensor:
    """‖W − W⊙z‖₂ where this gate alone is closed, over all sites of the gate."""
    sites = ((gated_tensor(of.root, s).detach(), s.dim, s.layout) for s in of.plan.sites)
    return _sums(of.plan, ((_squares(t, dim), layout) for t, dim, layout in sites)).sqrt()


@register("group-magnitude")
def group_magnitude(of: ScoreInput) -> Tensor:
    """The L2 norm of every parameter's slices along the slot."""
    parts = (
        (_squares(value, dim), layout)
        for name, value in of.tensors().items()
        for dim, layout in enumerate(of.plan.tensors.get(name, ()))
    )
    result = _sums(of.plan, parts).sqrt()
    switches = switches_of(of.plan)  # no parameter is as wide as one
    return torch.where(switches, magnitude(of), result)


@register("bn-scale")
def bn_scale(of: ScoreInput) -> Tensor:
    """The mean |γ| at the slot; over the axis mean, the magnitude of an axis without any."""
    tensors = of.tensors()
    names = {
        of.plan.aliases.get(f"{name}.weight", f"{name}.weight")
        for name, module in of.root.named_modules()
        if isinstance(module, _NORMS)
    }
    gammas = [
        (tensors[name].abs().cpu().double(), layout)
        for name in sorted(names & tensors.keys())
        for layout in of.plan.tensors.get(name, ())
        if tensors[name].dim() == 1  # a LayerNorm over several dims scales no slot as one
    ]
    total = _sums(of.plan, gammas)
    count = _sums(of.plan, [(torch.ones_like(gamma), layout) for gamma, layout in gammas])
    result = over_axis_mean(of.plan, magnitude(of))
    for axis in of.plan.axes:
        if (count[axis.slice] > 0).all():
            result[axis.slice] = total[axis.slice] / count[axis.slice]
    return result


@register("taylor")
def taylor(of: ScoreInput) -> Tensor:
    """(dL/dz)² with L the mean loss over all examples."""
    return mean_over_examples(of.gradients()).square()


@register("fisher")
def fisher(of: ScoreInput) -> Tensor:
    """The mean over the examples of their batch's (dL/dz)²."""
    return mean_over_examples((slope.square(), length) for slope, length in of.gradients())


@register("outputs")
def outputs(of: ScoreInput) -> Tensor:
    """The mean over the examples of E (d⟨v, o⟩/dz)², v of independent N(0, 1), o the outputs.

    Several outputs count alike: each is in its unit; see ``units_of``.
    """
    generator = torch.Generator().manual_seed(of.seed)

    def along(outputs: Any, targets: Any) -> Tensor:
        """⟨v, o⟩ of all examples, so that its squared slope is the examples' mean."""
        found = even(outputs, of.gates.outputs, [])
        direction = torch.randn(found.shape, generator=generator).to(found)
        return (found * direction).sum() / math.sqrt(len(found))

    task = None if of.task is None else replace(of.task, loss=along)
    return fisher(replace(of, task=task))


@register("ablation")
def ablation(of: ScoreInput) -> Tensor:
    """Score branches by the change of the outputs without them, smallest removed first."""
    switches = switches_of(of.plan)
    moved = _branch_ablation(of)
    return moved if switches.all() else torch.where(switches, moved, outputs(of))


def _branch_ablation(of: ScoreInput) -> Tensor:
    """Each switch's mean over the examples of ‖o − o'‖², o' the outputs without it.

    A network may do without either of two branches, but not without both. So branches go in
    rounds, and the remaining ones are tried again without those. The values are assigned to
    switches in the order in which these go, smallest first.

    Shape: ``(plan.size,)``, float64; 0 but for switches.
    """
    switches = switches_of(of.plan)
    result = torch.zeros_like(switches, dtype=torch.float64)
    left: list[int] = switches.nonzero().flatten().tolist()
    gone: list[int] = []
    alone = moved = torch.zeros_like(result)
    rounds = _rounds(len(left))
    with counting(sum(rounds)) as counter:
        for tried in rounds:
            if tried > 1 or not gone:
                with counter.takes(tried):
                    moved = _change_without(of, gone, left)
            alone = alone if gone else moved
            left.sort(key=moved.__getitem__)
            count = math.ceil(_ROUND * len(left))
            gone, left = gone + left[:count], left[count:]
    result[gone] = alone[switches].sort().values
    return result


def _rounds(branches: int) -> list[int]:
    """Return how many branches are tried in each round."""
    found = []
    while branches:
        found.append(branches)
        branches -= math.ceil(_ROUND * branches)
    return found


def _change_without(of: ScoreInput, gone: Sequence[int], switches: Sequence[int]) -> Tensor:
    """‖o − o'‖² of each of these switches, o' without it and the removed ones."""
    open_ = torch.ones_like(of.gates.log_alpha)

    def found() -> Iterator[tuple[Tensor, int]]:
        for run, length in of.forwards():
            whole, moved = run(open_), list[Tensor]()
            for number in steps(switches):
                closed = torch.tensor([*gone, number], device=open_.device)
                without = run(open_.index_fill(0, closed, 0))
                moved.append((without - whole).square().sum())
            values = torch.zeros(of.plan.size, dtype=torch.float64)
            if moved:
                values[list(switches)] = torch.stack(moved).cpu() / length  # one wait for all
            yield values, length

    return mean_over_examples(found())


@register("auto")
def auto(of: ScoreInput) -> Tensor:
    """Score each kind of axis by the score that suits it best."""
    most = _AUTO if of.batches is None else of.batches
    few = replace(of, batches=min(most, TRIED[0]), batch_size=min(of.batch_size, TRIED[1]))
    return joined_scores(of.plan, compute_best_scores(replace(of, batches=most), few))


def _best_for_slots(of: ScoreInput) -> str:
    """Return ``"fisher"``, or ``"outputs"`` if the loss is at a minimum.

    There its slope is rounding error, and far larger with all gates at 0.99.
    """

    def slope(at: float) -> float:
        found = replace(of, batches=1, autocast=None).gradients(at)
        return float(mean_over_examples((each.square(), n) for each, n in found).mean())

    return "outputs" if slope(1.0) <= _LEAST * slope(_NEARBY) else "fisher"


@register("random")
def random(of: ScoreInput) -> Tensor:
    """Uniform between 0 and 1."""
    generator = torch.Generator().manual_seed(of.seed)
    return torch.rand(of.plan.size, dtype=torch.float64, generator=generator)


def over_axis_mean(plan: Plan, values: Tensor) -> Tensor:
    """Divide each value by the mean of its axis, or of all switches; axes of zeros stay 0."""
    result, switches = values.clone(), switches_of(plan)
    numbers = torch.arange(plan.size)
    among = [numbers[axis.slice] for axis in plan.axes if axis.is_width]
    for slots in (*among, switches.nonzero().flatten()):
        mean = values[slots].mean() if len(slots) else 0
        if mean > 0:
            result[slots] /= mean
    return result


def _squares(tensor: Tensor, dim: int) -> Tensor:
    """The sum of squares of each slice along ``dim``; float64 on the CPU, shape ``(slices,)``."""
    slices = tensor.movedim(dim, 0).flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
    return slices.abs().cpu().double().square().sum(1)  # |w|², as some are complex


def _sums(plan: Plan, parts: Iterable[tuple[Tensor, Layout]]) -> Tensor:
    """Return, for each gate, the sum of the values at all positions where it acts.

    Shape: each part's values ``(layout.size,)``; result ``(plan.size,)``.
    """
    total = torch.zeros(plan.size + 1, dtype=torch.float64)  # the last: ungated positions
    for values, layout in parts:
        for gates in distinct(plan.gate_table(layout).T, plan.size).T:
            total.index_add_(0, gates, values)
    return total[:-1]
