"""Memory and time that ``shrink`` will take, from the plan and a few timed operators."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from l0prune.capture.capture import capture
from l0prune.capture.compat import pytree
from l0prune.data.dataset import as_arguments, map_tensors
from l0prune.features.unlabelled.compensate import (
    BATCH_SIZE,
    JUDGED,
    SAMPLES,
    calibration,
    examples_compared,
)
from l0prune.features.unlabelled.division import PROBES
from l0prune.features.unlabelled.repair import LARGEST
from l0prune.features.unlabelled.shrink import check_asked, gated_copy, is_empty
from l0prune.features.unlabelled.within import TRIED
from l0prune.gating.attaching import gates_of
from l0prune.gating.bank import Gates
from l0prune.plan.activations import steps
from l0prune.plan.cost import Amounts, cost_of
from l0prune.plan.layout import axes_of
from l0prune.plan.limits import LimitsLike, limits
from l0prune.plan.numbers import in_thousands
from l0prune.plan.plan import Plan
from l0prune.running.batches import call
from l0prune.running.criteria import class_dim as usual_class_dim
from l0prune.running.inputs import inputs_of
from l0prune.running.task import batch_length
from l0prune.selection.least_squares import precision
from l0prune.selection.score_input import output_tensor

_DOUBLE = 8  # bytes of a float64
_UNITS = ("B", "kB", "MB", "GB", "TB")
_MATRIX, _TIMED = 512, 3  # rows of the products that are timed, and how often
_STRENGTHS = 10  # systems that are solved for each weight


@dataclass(frozen=True, slots=True)
class Foreseen:
    """One step of ``shrink``.

    Attributes:
        name: of the step.
        bytes: the most that it holds beside the model, about.
        seconds: on this machine.
    """

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Memory and time of the steps of ``shrink``.

    Attributes:
        weights: bytes of the model's own tensors.
        examples: inputs that would be used.
        steps: one after the other.
    """

    weights: int
    examples: int
    steps: tuple[Foreseen, ...]

    @property
    def peak(self) -> int:
        """Most bytes beside the model."""
        return max(step.bytes for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as data for JSON."""
        return {**asdict(self), "steps": [asdict(each) for each in self.steps], "peak": self.peak}

    def __str__(self) -> str:
        """Return a line for each step."""
        lines = [
            f"{each.name:<14}{in_thousands(each.bytes, _UNITS):>10}{each.seconds:>10.0f} s"
            for each in self.steps
        ]
        took = sum(each.seconds for each in self.steps) / 60
        return "\n".join(
            [
                f"{self.examples} inputs; weights of {in_thousands(self.weights, _UNITS)}",
                *lines,
                f"at most {in_thousands(self.peak, _UNITS)} beside the model, about {took:.1f} "
                "minutes on this machine",
            ]
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """A weight that reads slots: its matrix, and the rows that it multiplies for one example."""

    owner: str
    axes: frozenset[int]
    features: int
    outputs: int
    rows: float

    @property
    def square(self) -> int:
        """Bytes of C in float64."""
        return self.features**2 * _DOUBLE

    @property
    def moments(self) -> int:
        """Bytes of the sums of products while the weight is fitted."""
        if self.features > LARGEST:
            return 0
        return 6 * self.features**2 * precision(self.features).itemsize


def _readers(plan: Plan, model: nn.Module) -> Iterator[_Reader]:
    macs = cost_of(plan).by_owner(torch.ones(plan.size), "macs")
    for name, roles in plan.roles.items():
        parameter = dict(model.named_parameters()).get(name)
        if parameter is None or "read" not in roles:
            continue
        pairs = zip(plan.tensors[name], roles, strict=True)
        axes = {axis for layout, role in pairs if role == "read" for axis in axes_of(layout)}
        writes = [n for n, role in zip(parameter.shape, roles, strict=True) if role == "write"]
        outputs = prod(writes) or 1
        owner = name.rpartition(".")[0]
        rows = macs.get(owner, 0.0) / parameter.numel()
        yield _Reader(owner, frozenset(axes), parameter.numel() // outputs, outputs, rows)


def _waiting(plan: Plan) -> float:
    """Return the most bytes of values that one example holds between two operators."""
    if not plan.activations:
        return 0.0
    sizes = Amounts(plan, plan.activations).expected(torch.ones(plan.size)).tolist()
    change = [0.0] * (steps(plan.activations) + 2)
    for each, size in zip(plan.activations, sizes, strict=True):
        if not each.is_fixed and each.last > each.made:
            change[each.made + 1] += size
            change[each.last + 1] -= size
    most = now = 0.0
    for step in change:
        now += step
        most = max(most, now)
    return most


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of this machine with a network.

    Attributes:
        forward: seconds for one example.
        products, solutions: operations a second, in float32 and in float64.
        gating: seconds that gating took, which an export takes about, too.
        tries: networks that are compensated, one after the other.
    """

    forward: float
    products: float
    solutions: float
    gating: float
    tries: int

    @classmethod
    def of(cls, model: nn.Module, batch: Any, plan: Plan, gating: float, tries: int) -> Speed:
        """Time a forward of a batch, and products of matrices.

        The forward of a model without values takes the time of products in its dtype.
        """
        if is_empty(model):
            dtype = next(each.dtype for each in model.parameters() if each.is_meta)
            macs = cost_of(plan).dense_amount("macs")
            forward = 2 * macs / _products(dtype)
        else:
            with torch.no_grad():
                call(model, batch)
                forward = _seconds(lambda: call(model, batch)) / batch_length(batch, None)
        return cls(forward, _products(torch.float32), _products(torch.double), gating, tries)


def _products(dtype: torch.dtype) -> float:
    """Return the operations a second of products of matrices on the CPU."""
    matrix = torch.rand(_MATRIX, _MATRIX).to(dtype)
    return 2 * _MATRIX**3 / min(_seconds(lambda: matrix @ matrix) for _ in range(_TIMED))


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)


def foresee(
    model: nn.Module,
    inputs: Any,
    budget: LimitsLike | None = None,
    *,
    tolerance: float | str | None = None,
    measure: str | None = None,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
    device: str | torch.device = "auto",
    seed: int = 0,
    class_dim: int | None = None,
    **gating: Any,
) -> Forecast:
    """Return the memory and time that ``shrink`` would take; see there for the arguments.

    The model is gated, and some operators are timed. It may be on the meta device.
    """
    check_asked(budget, tolerance, measure)
    start = time.perf_counter()
    work, inputs = gated_copy(model, inputs, seed, gating)
    gating_took = time.perf_counter() - start
    asked = () if budget is None else limits(budget)
    own = [each for each in asked if each.measure == "params" and each.glob == "*"]
    share = min(
        (each.share(cost_of(gates_of(work).plan).dense("params")) for each in own), default=1.0
    )
    tries = 1 if tolerance is None else TRIED
    if is_empty(model):
        batches = inputs_of(inputs, samples, batch_size, torch.device("cpu"), seed)
        lengths = [batch_length(*batch) for batch in batches]
        judged = sum(lengths[::JUDGED])
        used = sum(lengths) - judged
        plan = gates_of(work).plan
        probes = min(used / 3, _compared(model, inputs, plan, class_dim))
        speed = Speed.of(work, None, plan, gating_took, tries)
        return forecast(work, gates_of(work), (used, judged, probes), share, speed)
    with calibration(work, inputs, samples, batch_size, device, seed, class_dim) as found:
        used, judged, probes = (
            sum(batch_length(each, None) for each in batches)
            for batches in (found.used, found.judged, found.divided()[1])
        )
        speed = Speed.of(found.root, found.used[0], found.gates.plan, gating_took, tries)
        return forecast(work, found.gates, (used, judged, probes), share, speed)


def _compared(model: nn.Module, inputs: Any, plan: Plan, asked: int | None) -> float:
    """Return the examples whose outputs are compared, by the shape of a model without values."""
    first, _ = next(inputs_of(inputs, 2, 2, torch.device("cpu"), 0))
    batch = map_tensors(first, lambda tensor: tensor.to("meta") if tensor.dim() else tensor)
    program = capture(model, *as_arguments(batch)).program
    made = {node.name: node.meta.get("val") for node in program.graph.nodes}
    leaves = [made.get(name) for name in program.graph_signature.user_outputs]
    outputs = pytree.tree_unflatten(leaves, program.call_spec.out_spec)
    scores, needed = output_tensor(outputs), examples_compared(plan)
    dim = usual_class_dim(outputs) if asked is None else asked
    if dim is None or scores.dim() < 2:
        return needed
    places = scores.numel() / scores.shape[dim] / batch_length(first, None)
    return PROBES / places if places > PROBES else math.ceil(needed / places)


def forecast(
    model: nn.Module, gates: Gates, counts: tuple[float, float, float], share: float, speed: Speed
) -> Forecast:
    """Return the memory and time of ``shrink``.

    Args:
        model: gated; it may be on the meta device.
        gates: its bank.
        counts: examples that weights are fitted to, that are held out, and that outputs are
            compared on in the division.
        share: part of the parameters that stays.
        speed: of this machine.
    """
    used, judged, probes = counts
    plan = gates.plan
    readers, waiting = list(_readers(plan, model)), _waiting(plan)
    of_gates = {id(p) for p in gates.parameters()}
    own = [p for p in model.parameters() if id(p) not in of_gates]
    weights = sum(p.nbytes for p in own)
    tensor = max((p.numel() for p in own), default=0) * _DOUBLE
    square = max((each.square for each in readers), default=0)
    held = {}  # readers of one input, as queries, keys and values, lie beside each other
    for axis in range(len(plan.axes)):
        of_axis = [each for each in readers if axis in each.axes]
        alike = {(r.owner.rpartition(".")[0], r.features): r.square for r in of_axis}
        held[axis] = 3 * sum(alike.values())
    solving = max(((r.moments + 9 * r.features * r.outputs * _DOUBLE) for r in readers), default=0)
    found = {
        "division": max(held.values(), default=0) + 3 * square + used * waiting,
        "compensation": weights + 2 * used * waiting + solving,
        "export": weights + share * weights + 3 * tensor,
    }
    evaluated = len(plan.axes) * probes  # two widths, half of a forward each
    squares = sum(2 * r.rows * used * r.features**2 for r in readers)
    across = sum(2 * r.rows * used * r.features * min(r.outputs, r.features) for r in readers)
    cubes = sum(r.features**3 for r in readers)
    solved = sum(2 * r.features**2 * r.outputs for r in readers)
    seconds = {
        "division": (used + evaluated) * speed.forward
        + squares / speed.products
        + 4 * cubes / speed.solutions,
        "compensation": speed.tries
        * (
            (2 * used + 4 * judged) * speed.forward
            + (squares + across) / speed.products
            + _STRENGTHS * (cubes / 3 + 2 * solved) / speed.solutions
        ),
        "export": speed.gating,
    }
    steps_ = tuple(Foreseen(name, int(most), seconds[name]) for name, most in found.items())
    return Forecast(weights, int(used + judged), steps_)
