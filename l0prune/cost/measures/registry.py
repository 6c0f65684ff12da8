"""The measures that there are, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from l0prune.cost.measures.base import Measure, Source
from l0prune.errors import UsageError
from l0prune.plan.plan import Plan

M = TypeVar("M", bound=type[Measure])

_kinds: dict[str, type[Measure]] = {}
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_SUFFIX = re.compile(r"[^\W\d_]*")


def register(kind: M) -> M:
    """Class decorator: let budgets be about a measure.

    Raises:
        UsageError: it is no measure, or another one has its name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Measure)):
        raise UsageError(f"{kind!r} is no measure: register a subclass of l0prune.Measure")
    missing = [a for a in ("name", "label", "suffixes") if not getattr(kind, a, None)]
    if missing:
        raise UsageError(f"the measure {kind.__qualname__} has no {' and no '.join(missing)}")
    if not _NAME.fullmatch(kind.name):
        raise UsageError(f"a measure cannot be called {kind.name!r}: use letters, digits, - and _")
    if 1.0 not in list(kind.suffixes.values())[:1] or not all(
        _SUFFIX.fullmatch(suffix) for suffix in kind.suffixes
    ):
        raise UsageError(
            f"the suffixes of {kind.name} must be letters only, the first of them worth 1, "
            f"such as {{'kB': 1.0, 'MB': 1e3}}, not {dict(kind.suffixes)!r}"
        )
    other = _kinds.get(kind.name)
    if other is not None and other.__qualname__ != kind.__qualname__:  # a cell that is run again
        raise UsageError(
            f"there is another measure called {kind.name!r} ({other.__module__}."
            f"{other.__qualname__}); give {kind.__qualname__} a name of its own"
        )
    _kinds[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """The names of all measures, in the order in which they were registered."""
    return tuple(_kinds)


def kind_of(name: str) -> type[Measure]:
    """The measure of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in _kinds:
        raise UsageError(
            f"a budget is about one of {', '.join(_kinds)}, not {name!r}; a measure of your own "
            "takes a class under @l0prune.measures.register (docs/extending.md), and on the "
            "command line --measure file.py:Class"
        )
    return _kinds[name]


def measure_of(plan: Plan, name: str, sources: Iterable[Source] = ()) -> Measure:
    """The measure of this name of a network with this plan.

    Args:
        plan: of the network.
        name: of the measure.
        sources: where measures come from that a plan alone does not make.

    Raises:
        UsageError: there is none, or it takes a source that is not there.
    """
    for source in sources:
        if source.name == name:
            return source.of(plan)
    return kind_of(name).of(plan)
