"""Penalties on the size of a group of weights, by their proximal operators.

Each maps t ≥ 0, the root mean square of a group's weights, to the x ≥ 0 that minimises
½·(x − t)² + τ·p(x). τ is the strength of the pull in one step, and ``scale`` the usual size of t:
folded penalties do not shrink groups that are larger than a multiple of it, and those of ℓq pull by
just τ at it. A penalty of your own is one class::

    @register
    @dataclass(frozen=True)
    class Ridge:
        name: ClassVar[str] = "ridge"

        def shrunk(self, t, tau, scale):
            return t / (1 + tau)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from l0prune.errors import unknown


@runtime_checkable
class Shrinkage(Protocol):
    """A penalty, as its proximal operator.

    One that spares the largest groups has an attribute ``spares``, the share of them without a
    budget; one that only closes groups, as a projection, has ``projects = True``; and one under
    which the loss reaches the most salient groups alone has ``masks = True`` (``gsm``).
    """

    name: ClassVar[str]

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """Return x of each group; all of shape ``(groups,)``."""
        ...


Kind = TypeVar("Kind", bound=type[Shrinkage])
_known: dict[str, type[Shrinkage]] = {}


def register(kind: Kind) -> Kind:
    """Class decorator: make a penalty known by its ``name``."""
    _known[kind.name] = kind
    return kind


def names() -> list[str]:
    """Return the names of all registered penalties."""
    return list(_known)


def shrinkage_of(name: str) -> Shrinkage:
    """Return the penalty of this name, with the prefix ``group-`` or without."""
    for key in (name, name.removeprefix("group-")):
        if key in _known:
            return _known[key]()
    raise unknown(f"there is no penalty {name!r}", name, names())


@register
@dataclass(frozen=True)
class GroupLasso:
    """p(x) = x, so that x = max(t − τ, 0): soft thresholding (Yuan & Lin 2006; Wen et al. 2016)."""

    name: ClassVar[str] = "group-lasso"

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``."""
        return (t - tau).clamp(min=0)


@register
@dataclass(frozen=True)
class GroupLq:
    """Group ℓq penalty: p(x) = s^(1−q)·x^q/q with 0 < q < 1, of slope 1 at s, the scale.

    With c = τ·s^(1−q) and u = (2·c·(1−q)/q)^(1/(2−q)), x is 0 up to t = u + c·u^(q−1), where 0 and
    u are equally deep minima, and beyond it the larger root of x + c·x^(q−1) = t. Newton's method
    reaches that from t without a miss, since the left side is convex.
    """

    name: ClassVar[str] = "group-lq"
    q: float = 0.5

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``."""
        q = self.q
        c = tau * scale ** (1 - q)
        least = (2 * c * (1 - q) / q) ** (1 / (2 - q))
        stays = t > least + c * least ** (q - 1)
        x = torch.where(stays, t, 1.0)
        for _ in range(12):
            slope = 1 + c * (q - 1) * x ** (q - 2)
            x = torch.where(stays, x - (x + c * x ** (q - 1) - t) / slope, x)
        return torch.where(stays & (c > 0), x, torch.where(c > 0, 0.0, t))


@register
@dataclass(frozen=True)
class QShrinkage:
    """Shrinkage x = max(t − τ·(s/t)^(1−q), 0) with the scale s: large groups are shrunk less.
    Chartrand 2009; Woodworth & Chartrand 2016. q = 1 is soft thresholding; p has no closed form."""

    name: ClassVar[str] = "q-shrinkage"
    q: float = 0.5

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``."""
        safe = t.clamp(min=torch.finfo(t.dtype).tiny)
        return (t - tau * (scale / safe) ** (1 - self.q)).clamp(min=0)


def _best(
    t: Tensor, tau: Tensor, candidates: tuple[Tensor, ...], p: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the first candidate of each group at which ½·(x − t)² + τ·p(x) is least."""
    x = torch.stack(candidates)
    values = 0.5 * (x - t).square() + tau * p(x)
    return x.gather(0, values.argmin(0, keepdim=True))[0]


@register
@dataclass(frozen=True)
class Scad:
    """p′(x) = 1 up to s, then in a straight line to 0 at a·s (Fan & Li 2001); s is the scale.

    Each of the three pieces has one candidate for x, and 0 is a fourth.
    """

    name: ClassVar[str] = "scad"
    a: float = 3.7

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``."""
        a, last = self.a, self.a * scale
        soft = torch.minimum((t - tau).clamp(min=0), scale)
        rest = (a - 1) * scale - tau
        line = ((a - 1) * scale * t - tau * last) / torch.where(rest > 0, rest, 1.0)
        middle = torch.where(rest > 0, torch.clamp(line, scale, last), last)
        candidates = (torch.zeros_like(t), soft, middle, torch.maximum(t, last))
        return _best(t, tau, candidates, lambda x: self.value(x, scale))

    def value(self, x: Tensor, scale: Tensor) -> Tensor:
        """p(x)."""
        a, within = self.a, torch.minimum(x, self.a * scale)
        bent = within - (within - scale).clamp(min=0).square() / (2 * (a - 1) * scale)
        return bent


@register
@dataclass(frozen=True)
class Mcp:
    """p′(x) = max(1 − x/(a·s), 0) (Zhang 2010), s being the scale.

    x is 0 up to τ, t from a·s on, and between them (t − τ)/(1 − τ/(a·s)): firm thresholding (Gao &
    Bruce 1997). Where τ > a·s it is hard thresholding.
    """

    name: ClassVar[str] = "mcp"
    a: float = 3.0

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``."""
        last = self.a * scale
        rest = 1 - tau / last
        line = (t - tau).clamp(min=0) / torch.where(rest > 0, rest, 1.0)
        candidates = (torch.zeros_like(t), torch.minimum(line, last), torch.maximum(t, last))
        return _best(t, tau, candidates, lambda x: self.value(x, scale))

    def value(self, x: Tensor, scale: Tensor) -> Tensor:
        """p(x)."""
        within = torch.minimum(x, self.a * scale)
        return within - within.square() / (2 * self.a * scale)


@register
@dataclass(frozen=True)
class Firm(Mcp):
    """Firm thresholding between τ and 1.5 scales: the operator of MCP, on smaller groups alone."""

    name: ClassVar[str] = "firm"
    a: float = 1.5


@register
@dataclass(frozen=True)
class TrimmedL1:
    """p(x) = x for all groups but the largest, which are spared (Yun et al. 2019).

    Under a budget as many are spared as it allows; without, this share of each axis' slots.
    """

    name: ClassVar[str] = "trimmed-l1"
    spares: ClassVar[float] = 0.5

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``; of the groups that are not spared."""
        return (t - tau).clamp(min=0)


@register
@dataclass(frozen=True)
class L0Projection:
    """p(x) = s·1[x ≠ 0], so that x is t where t² > 2·τ·s, else 0: hard thresholding.

    Under a budget it is the projection on what the budget allows at this step: the smallest groups
    close (Blumensath & Davies 2008).
    """

    name: ClassVar[str] = "l0-projection"
    projects: ClassVar[bool] = True

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``."""
        return torch.where(t.square() > 2 * tau * scale, t, 0.0)


@register
@dataclass(frozen=True)
class GlobalSparseMomentum:
    """Global sparse momentum: only salient groups get the loss' gradient, others decay (``gsm``).
    Ding et al. 2019. Groups that are negligible beside s are 0: x is t where t > s/1000, else 0."""

    name: ClassVar[str] = "gsm"
    masks: ClassVar[bool] = True

    def shrunk(self, t: Tensor, tau: Tensor, scale: Tensor) -> Tensor:
        """See ``Shrinkage``; independent of τ, since the optimizer decays the weights."""
        return torch.where(t > 1e-3 * scale, t, 0.0)
