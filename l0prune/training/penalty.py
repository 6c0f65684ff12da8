"""Penalty that makes gates close: λ·E‖θ‖₀, a prior's divergence, and the expected L2 norm.

Under a spike-and-slab prior over weights and gates the variational free energy is (eq. 20)

    F = E_q(z)[−log p(D|θ, z)] + Σ KL(q(z)‖p(z)) + Σ q(z ≠ 0)·KL(q(θ|z ≠ 0)‖p(θ|z ≠ 0)),

one divergence for each gate and one for each weight that is there. λ·E‖θ‖₀ replaces the last
sum: with the weights at a point, each costs the same number of nats, λN where the loss is the
mean over N examples (eq. 21; eq. 22 drops the gates' own divergence as well, as a bound). A
Gaussian slab of variance τ² and a posterior of standard deviation r·τ around the weight W make
it exact: KL = (r²−1)/2 − log r + W²/(2τ²), hence λ = ((r²−1)/2 − log r)/N and l2 = 1/(N·τ²).

The middle sum is the cost of a prior, a gate of the same kind (eq. 27 and 28). The L2 term of gated
weights is Σ P(weight is there)·W² (eq. 15 and 17).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from l0prune.errors import UsageError
from l0prune.files.around import added_cost
from l0prune.gating.attaching import gates_of, holder, weights_of
from l0prune.gating.bank import Gates
from l0prune.gating.kinds.base import AtTemperature, Gate
from l0prune.plan.cost import cost_of, group_weights
from l0prune.plan.expected import precision
from l0prune.plan.globs import per_axis
from l0prune.plan.layout import Layout, axes_of, distinct
from l0prune.plan.numbers import check_number
from l0prune.plan.plan import Plan
from l0prune.running.processes import full_tensor
from l0prune.training.budget import Budget
from l0prune.training.lambdas import Lambda, LambdaLike

Prior = float | Mapping[str, float]
"""P(z ≠ 0) before any data are seen: for all gates, or by globs over axis names."""


@runtime_checkable
class HasDivergence(Protocol):
    """A gate whose divergence from another gate of its kind is known."""

    def divergence(self, log_alpha: Tensor, prior: Tensor) -> Tensor:
        """KL(q(z)‖p(z)) of each gate q from p at log α ``prior``, in nats; shape ``(gates,)``."""
        ...


class Divergence:
    """Σ KL(q(z)‖p(z)) over the gates of one plan, with the priors' log α cached."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._priors: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def total(self, log_alpha: Tensor, gate: Gate, prior: Prior) -> Tensor:
        """Return the sum in nats, a differentiable scalar of the dtype of ``log_alpha``.

        Axes that no glob of a prior matches have none, and their gates add nothing.
        """
        if not isinstance(gate, HasDivergence):
            raise UsageError(
                f"a prior needs gates whose divergence from it is known, and that of {gate.name} "
                "gates is not; hard_concrete gates have one"
            )
        items = tuple(prior.items()) if isinstance(prior, Mapping) else (("*", prior),)
        for _, probability in items:
            if not (isinstance(probability, float | int) and 0 < probability < 1):
                raise UsageError(
                    "prior is the probability that a gate is open before any data are seen, "
                    f"strictly between 0 and 1, not {probability!r}"
                )
        key = (gate, items, log_alpha.device)
        if key not in self._priors:
            chosen, at = self._worked_out(gate, prior)
            device = log_alpha.device
            self._priors[key] = chosen.to(device), at.to(device, precision(device))
        chosen, at = self._priors[key]
        own = log_alpha.to(at.dtype).index_select(0, chosen)
        if isinstance(gate, AtTemperature):
            gate = gate.among(chosen)
            at = at + gate.shift_learned
            assert isinstance(gate, HasDivergence)
        return gate.divergence(own, at).sum().to(log_alpha.dtype)

    def _worked_out(self, gate: Gate, prior: Prior) -> tuple[Tensor, Tensor]:
        """Return the numbers of the gates with a prior, and its log α for each of them."""
        chosen: list[int] = []
        at: list[float] = []
        given = per_axis(self._plan, prior, None, "prior")
        for axis, probability in zip(self._plan.axes, given, strict=True):
            if probability is not None:
                chosen += range(axis.slice.start, axis.slice.stop)
                at += [gate.initial(probability)] * axis.size
        return torch.tensor(chosen, dtype=torch.int64), torch.tensor(at, dtype=torch.float64)


Counting = Literal["joint", "groups"]


class ExpectedSquares:
    """Σ P(weight is there)·W² of a model, with everything that is constant over steps cached."""

    def __init__(self, plan: Plan, kept: Tensor | None = None) -> None:
        self._plan, self._kept = plan, kept
        self._chances: dict[tuple[str, Counting, torch.device], _Chance] = {}

    def total(self, root: nn.Module, p: Tensor, counting: Counting) -> Tensor:
        """Return Σ P(weight is there)·W² over the trainable weights of ``root``.

        A weight is there if the gates on all its sides are open (``"joint"``), or those that
        multiply it (``"groups"``); p are the gates' open probabilities, flat.
        """
        padded = torch.cat([p, p.new_ones(1)])
        total = p.new_zeros(())
        for name, parameter in weights_of(root).items():
            if parameter.requires_grad:
                square = _numbers(parameter).to(p.device, p.dtype).square()
                total = total + self._chance(name, counting, p.device).sum(square, padded)
        return total

    def _chance(self, name: str, counting: Counting, device: torch.device) -> _Chance:
        key = (name, counting, device)
        if key not in self._chances:
            sides = self._sides(self._plan.aliases.get(name, name), counting)
            tables = [(dim, self._table(name, dim, layout)) for dim, layout in sides]
            self._chances[key] = _Chance(tables, self._plan.size, device)
        return self._chances[key]

    def _table(self, name: str, dim: int, layout: Layout) -> Tensor:
        """Return the gates at each remaining position of a parameter's dim."""
        table, kept = self._plan.gate_table(layout), self._kept
        if kept is None:
            return table
        dims = self._plan.tensors[self._plan.aliases.get(name, name)]
        return table[:, self._plan.mask(dims[dim], kept)]

    def _sides(self, name: str, counting: Counting) -> list[tuple[int, Layout]]:
        """Return the dims of a parameter whose gates decide whether its elements are there."""
        if counting == "groups":
            return [(site.dim, site.layout) for site in self._plan.sites if site.tensor == name]
        dims = enumerate(self._plan.tensors.get(name, ()))
        return [(dim, layout) for dim, layout in dims if axes_of(layout)]


class _Chance:
    """The probability that an element of one parameter is there: all its gates are open."""

    def __init__(self, sides: Sequence[tuple[int, Tensor]], one: int, device: torch.device) -> None:
        """Build from tables of the dims with gates, where the number ``one`` means no gate."""
        self._dims = sorted({dim for dim, _ in sides})
        tables = []
        for dim, table in sides:
            shape = [table.shape[0], *[1] * len(self._dims)]
            shape[1 + self._dims.index(dim)] = table.shape[1]
            tables.append(table.reshape(shape))
        self._factors: list[Tensor] = []
        for group in _sharing(tables, one):
            shape = list(torch.broadcast_shapes(*(table.shape[1:] for table in group)))
            rows = torch.cat([table.expand(table.shape[0], *shape) for table in group])
            gates = distinct(rows.flatten(1).T, one)
            self._factors.append(gates.T.reshape(-1, *shape).to(device))

    def sum(self, square: Tensor, padded: Tensor) -> Tensor:
        """Return Σ chance·square; ``padded`` holds the open probabilities and a 1 at the end."""
        others = [dim for dim in range(square.dim()) if dim not in self._dims]
        compact = full_tensor(square.sum(others) if others else square)
        for gates in self._factors:
            chance = padded[gates[0]] if len(gates) == 1 else padded[gates].prod(0)
            compact = compact * chance
        return compact.sum()


def _numbers(parameter: Tensor) -> Tensor:
    """Return the parameter; a complex one with a last dim of real and imaginary parts."""
    return torch.view_as_real(parameter) if parameter.is_complex() else parameter


def _sharing(tables: Sequence[Tensor], one: int) -> list[list[Tensor]]:
    """Group the tables such that groups share no gate, and their probabilities multiply."""
    groups: list[tuple[set[int], list[Tensor]]] = []
    for table in tables:
        gates = set(torch.unique(table).tolist()) - {one}
        touching = [group for group in groups if group[0] & gates]
        groups = [group for group in groups if not group[0] & gates]
        merged = gates.union(*(g for g, _ in touching))
        groups.append((merged, [t for _, ts in touching for t in ts] + [table]))
    return [members for _, members in groups]


def penalty(
    model: nn.Module,
    lam: LambdaLike | Budget,
    *,
    n: int | None = None,
    counting: Counting = "joint",
    l2: float = 0.0,
    l2_detach: bool = False,
    prior: Prior | None = None,
) -> Tensor:
    """Return λ·E‖θ‖₀, the expected price of the model's parameters, to add to the loss.

    What is around the network (``add_input_gates``) pays, too, after a forward in training mode.

    Args:
        model: a gated model.
        lam: a ``Budget``, whose Lagrangian this then is; or λ as a number, as text (``"0.1/N"``,
            ``"convs.*=10/N, 0.1/N"``), or as a mapping from globs over axis names.
        n: N, the number of training examples, over which the loss is a mean.
        counting: ``"joint"``: a weight is there if the gates on all its sides are open, which is
            exact, and pays the mean λ of its axes. ``"groups"``: each gate pays for its own ``|g|``
            weights, at the λ of its axis, whatever the others do (eq. 16 of the paper).
        l2: strength of the expected L2 penalty (eq. 15, 17): ½·l2·Σ P(weight is there)·W² over the
            trainable parameters W, as they are before gates multiply them.
        l2_detach: keep the L2 term from changing the gates.
        prior: P(z ≠ 0) of the gates before any data are seen, one or by globs over axis names.
            Then Σ KL(q(z)‖p(z))/N over all gates is added, for a prior p(z) of the same kind of
            gate (eq. 21, 27, 28); docs/objective.md has the whole objective. Needs ``n``.

    Returns:
        A scalar of the dtype and on the device of the gates' ``log_alpha``.

    Raises:
        NotGated: the model carries no gates.
        UsageError: λ, ``counting``, ``l2`` or ``prior`` makes no sense.
    """
    options: dict[str, Any] = {"l2": l2, "l2_detach": l2_detach, "prior": prior}
    total = penalty_of_gates(model, lam, n=n, counting=counting, **options)
    extra = added_cost(model)
    return total if extra is None else total + extra.to(total)


def penalty_of_gates(
    model: nn.Module,
    lam: LambdaLike | Budget,
    *,
    n: int | None = None,
    counting: Counting = "joint",
    l2: float = 0.0,
    l2_detach: bool = False,
    prior: Prior | None = None,
) -> Tensor:
    """Return ``penalty`` without the part of what is around the network."""
    if counting not in ("joint", "groups"):
        raise UsageError(f"counting must be 'joint' or 'groups' (eq. 16), not {counting!r}")
    check_number("l2", l2)
    root, gates = holder(model)
    with _full_precision(gates.log_alpha.device.type):
        p = gates.open_probability()
        prices = _prices(gates)
        if isinstance(lam, Budget):
            total = lam.lagrangian(p)
        else:
            total = prices.penalty(p, Lambda.of(lam, n), counting)
        if l2:
            there = p.detach() if l2_detach else p
            squares = prices.squares.total(root, there, counting)
            total = total + 0.5 * l2 * squares
        if prior is not None:
            if n is None or n < 1:
                raise UsageError(
                    f"prior needs n, the number of training examples, not {n}: give n=… here, or "
                    "Task(…, size=N) where the data cannot say it"
                )
            nats = prices.divergence.total(gates.log_alpha, gates.gate_now, prior)
            total = total + nats / n
    return total


def param_groups(
    model: nn.Module, lr: float = 1e-3, gate_lr: float = 0.1, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return parameter groups: weights with weight decay, gates at ``gate_lr`` and without decay.

    The groups carry a ``"name"``: ``"weights"`` and ``"gates"``. Frozen parameters are left out.

    Raises:
        NotGated: the model carries no gates.
    """
    gates = [p for p in gates_of(model).learned if p.requires_grad]
    weights = [p for p in weights_of(model).values() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay},
        {"name": "gates", "params": gates, "lr": gate_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _full_precision(device_type: str) -> AbstractContextManager[None]:
    """Return a context that turns an enabled autocast off, so that counts are exact."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class _Prices:
    """Penalty of one plan, with everything that is constant over steps cached."""

    def __init__(self, plan: Plan, kept: Tensor | None) -> None:
        self.plan, self.kept = plan, kept
        self.squares = ExpectedSquares(plan, kept)
        self.divergence = Divergence(plan)
        self._cost = cost_of(plan)
        self._per_axis: dict[Lambda, tuple[float, ...]] = {}
        self._per_gate: dict[tuple[Lambda, torch.device], Tensor] = {}

    def penalty(self, p: Tensor, lam: Lambda, counting: Counting) -> Tensor:
        """Return λ·E‖θ‖₀ at open probabilities ``p``; a scalar of p's dtype."""
        if counting == "groups":
            return torch.dot(p, self._groups(lam, p))
        return self._cost.expected(p, "params", self._axes(lam), p.dtype)

    def _axes(self, lam: Lambda) -> tuple[float, ...]:
        if lam not in self._per_axis:
            self._per_axis[lam] = lam.for_axes(self.plan.names)
        return self._per_axis[lam]

    def _groups(self, lam: Lambda, p: Tensor) -> Tensor:
        """Return λ·|g| of each gate."""
        key = (lam, p.device)
        if key not in self._per_gate:
            self._per_gate[key] = group_weights(self.plan, self._axes(lam)).to(p)
        return self._per_gate[key]


# Cached prices of each bank; they are deleted with the bank, and not saved with it.
_of_bank: WeakKeyDictionary[Gates, _Prices] = WeakKeyDictionary()


def _prices(gates: Gates) -> _Prices:
    prices = _of_bank.get(gates)
    if prices is None or prices.plan is not gates.plan or prices.kept is not gates.kept:
        prices = _of_bank[gates] = _Prices(gates.plan, gates.kept)
    return prices
