"""The penalty that makes gates close, and what the optimizer must know about them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from l0prune.cost.model import cost_of, group_weights
from l0prune.errors import UsageError
from l0prune.gating.attaching import gates_of, holder
from l0prune.gating.bank import Gates
from l0prune.objective.budget import Budget
from l0prune.objective.divergence import Divergence, Prior
from l0prune.objective.expected_l2 import Counting, ExpectedSquares
from l0prune.objective.lambdas import Lambda, LambdaLike
from l0prune.plan.plan import Plan


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
    """λ·E‖θ‖₀, to add to the loss: what the model's parameters are expected to cost.

    With ``counting="joint"`` a weight is there if the gates on all its sides are open, and the
    expectation is exact. With ``"groups"`` each gate is charged for its own weights, ``|g|`` of
    them, whatever the others do, as in the paper (eq. 16). Where λ differs between axes, a weight
    that several axes share is charged, in joint counting, at the mean of their λs; in groups, each
    axis is charged at its own.

    With ``l2`` the expected L2 penalty of eq. 15 and 17 is added: ½·l2·Σ P(weight is there)·W²
    over the model's trainable parameters, for the same meaning of "there". W is the plain
    parameter, before the gates multiply it. It closes gates of large weights as well as
    decaying weights; with ``l2_detach`` it only decays, at the rate of the gates' probabilities.

    With ``prior`` it is the variational penalty of eq. 21: Σ KL(q(z)‖p(z))/N is added, over all
    gates, for a prior p(z) that is a gate of the same kind which is open with that probability
    (eq. 27, 28). λ·N is then the code length of a weight in nats; docs/objective.md has the
    whole objective.

    Args:
        model: a gated model.
        lam: a ``Budget``, whose Lagrangian this then is; or λ as a number, as text (``"0.1/N"``,
            which needs ``n``; ``"convs.*=10/N, 0.1/N"``), or as a mapping from globs over axis
            names to numbers or texts.
        n: N, the number of training examples, over which the loss is a mean.
        counting: ``"joint"`` or ``"groups"``.
        l2: strength of the L2 term.
        l2_detach: keep the L2 term from changing the gates.
        prior: P(z ≠ 0) of the gates before any data are seen, strictly between 0 and 1, or a
            mapping from globs over axis names to it, where axes that no glob matches have no
            prior; needs ``n``.

    Returns a scalar of the dtype and on the device of the gates' ``log_alpha``.

    Raises:
        NotGated: the model carries no gates.
        UsageError: λ, ``counting``, ``l2`` or ``prior`` makes no sense.
    """
    if counting not in ("joint", "groups"):
        raise UsageError(f"counting must be 'joint' or 'groups' (eq. 16), not {counting!r}")
    if not l2 >= 0:
        raise UsageError(f"l2 must be 0 or more, not {l2}")
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
            squares = prices.squares.total(root, gates.log_alpha, there, counting)
            total = total + 0.5 * l2 * squares
        if prior is not None:
            if n is None or n < 1:
                raise UsageError(f"prior needs n, the number of training examples, not {n}")
            nats = prices.divergence.total(gates.log_alpha, gates.gate, prior)
            total = total + nats / n
    return total


def param_groups(
    model: nn.Module, lr: float = 1e-3, gate_lr: float = 0.1, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer: weights with decay, gates at their own rate without.

    The groups carry a ``"name"``: ``"weights"`` and ``"gates"``. Frozen parameters are left out.

    Raises:
        NotGated: the model carries no gates.
    """
    gates = gates_of(model).log_alpha
    weights = [p for p in model.parameters() if p.requires_grad and p is not gates]
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay},
        {"name": "gates", "params": [gates], "lr": gate_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if any(p.requires_grad for p in group["params"])]


def _full_precision(device_type: str) -> AbstractContextManager[None]:
    """Keeps counts out of an autocast; where there is none, it costs nothing."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class _Prices:
    """The penalty of one plan, with all that does not change from step to step worked out."""

    def __init__(self, plan: Plan, kept: Tensor | None) -> None:
        self.plan, self.kept = plan, kept
        self.squares = ExpectedSquares(plan, kept)
        self.divergence = Divergence(plan)
        self._cost = cost_of(plan)
        self._per_axis: dict[Lambda, tuple[float, ...]] = {}
        self._per_gate: dict[tuple[Lambda, torch.device], Tensor] = {}

    def penalty(self, p: Tensor, lam: Lambda, counting: Counting) -> Tensor:
        """λ·E‖θ‖₀ at open probabilities ``p``; a scalar of p's dtype."""
        if counting == "groups":
            return torch.dot(p, self._groups(lam, p))
        return self._cost.expected(p, "params", self._axes(lam), p.dtype)

    def _axes(self, lam: Lambda) -> tuple[float, ...]:
        if lam not in self._per_axis:
            self._per_axis[lam] = lam.for_axes(self.plan.names)
        return self._per_axis[lam]

    def _groups(self, lam: Lambda, p: Tensor) -> Tensor:
        """λ·|g| of each gate."""
        key = (lam, p.device)
        if key not in self._per_gate:
            self._per_gate[key] = group_weights(self.plan, self._axes(lam)).to(p)
        return self._per_gate[key]


# The compiled prices of each bank; they go with it, and are no part of what it saves.
_of_bank: WeakKeyDictionary[Gates, _Prices] = WeakKeyDictionary()


def _prices(gates: Gates) -> _Prices:
    prices = _of_bank.get(gates)
    if prices is None or prices.plan is not gates.plan or prices.kept is not gates.kept:
        prices = _of_bank[gates] = _Prices(gates.plan, gates.kept)
    return prices
