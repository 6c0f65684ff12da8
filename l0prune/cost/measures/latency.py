"""Milliseconds on some runtime: what there is to know of them without a table of times."""

from __future__ import annotations

from typing import ClassVar

from l0prune.cost.measures.base import Measure
from l0prune.cost.measures.registry import register
from l0prune.cost.measures.terms import SumOfTerms
from l0prune.errors import UsageError
from l0prune.plan.plan import Plan


@register
class Latency(SumOfTerms):
    """The time of one call in milliseconds. A table of times makes it (a ``Source``)."""

    name, label = "latency", "latency"
    suffixes: ClassVar = {"ms": 1.0, "us": 1e-3, "µs": 1e-3, "s": 1e3}

    @classmethod
    def of(cls, plan: Plan) -> Measure:
        """Refused: a plan does not say how fast a machine is.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"a budget in {cls.name} needs the times of this network on the machine that will "
            "serve it: `l0prune measure model.gated.pt` writes a table, to be given as "
            f"--{cls.name} FILE; in Python, {cls.name}=l0prune.measure(model)"
        )
