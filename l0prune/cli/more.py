"""Options that features add to commands of the core.

A feature's function behind the door ``more`` has the name of a command. Its keyword arguments are
options, and the command calls it with what else it takes: ``gate`` with the network and its
example, for the network with gates to come; ``export``, before anything is cut, with a function
that loads the examples for an option, for a ``Finish`` or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple

from l0prune.doors import inner_first

Extras = Sequence[Callable[..., Any]]
"""Functions of features with their options given, in the order in which they are called."""


class Written(NamedTuple):
    """Files that an option of ``export`` has led to.

    Attributes:
        files: their paths.
        result: what the command's result says of them.
        shown: what is printed of them; None for nothing.
    """

    files: Sequence[Any]
    result: dict[str, Any]
    shown: Any = None


Finish = Callable[..., Written]
"""Function of the ``Export`` and of the path of its files without an ending."""


def extended(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with all options that features add, which gets them as ``extras``."""
    own = command.__name__
    functions = [each.load("more", own) for name, each in inner_first("more") if name == own]
    added = {each: added_options(each) for each in functions}

    @wraps(command)
    def run(**given: Any) -> None:
        extras = [partial(f, **{p.name: given.pop(p.name) for p in added[f]}) for f in functions]
        command(**given, extras=extras)

    whole = signature(command, eval_str=True)
    kept = [each for each in whole.parameters.values() if each.name != "extras"]
    more = (each for options in added.values() for each in options)
    options = [each.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for each in more]
    run.__signature__ = whole.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return run


def added_options(function: Callable[..., Any]) -> list[Parameter]:
    """Return the options that a function behind ``more`` adds to its command."""
    found = signature(function, eval_str=True).parameters.values()
    return [each for each in found if each.kind is Parameter.KEYWORD_ONLY]
