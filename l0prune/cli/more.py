"""Options that features add to commands of the core.

A feature's function behind the door ``more`` has the name of a command. Its keyword arguments are
options, and the command calls it with what else it takes: ``gate`` with the network and its
example, for the network with gates to come; ``export``, before anything is cut, with a function
that loads the examples for an option, for a ``More`` or None; so does ``shrink``, which takes
what it asks of the ONNX file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import chain
from types import MappingProxyType
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


class More(NamedTuple):
    """Files that an option of ``export`` asks for.

    Attributes:
        onnx: arguments of ``Export.save_onnx``, which then writes its file, too.
        finish: what writes further files; None for nothing.
    """

    onnx: Mapping[str, Any] = MappingProxyType({})
    finish: Finish | None = None


def extended(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options that features add, in the place of its ``extras``.

    A command without that parameter stays as it is.
    """
    if "extras" not in signature(command).parameters:
        return command
    found = [each for name, each in inner_first("more") if name == command.__name__]
    functions = [each.load("more", command.__name__) for each in found]
    added = {each: added_options(each) for each in functions}

    @wraps(command)
    def run(**given: Any) -> None:
        extras = [partial(f, **{p.name: given.pop(p.name) for p in added[f]}) for f in functions]
        command(**given, extras=extras)

    whole = signature(command, eval_str=True)
    more = [each for options in added.values() for each in options]
    options = [each.replace(kind=whole.parameters["extras"].kind) for each in more]
    own = whole.parameters.values()
    shown = (options if each.name == "extras" else [each] for each in own)
    run.__signature__ = whole.replace(parameters=[*chain(*shown)])  # type: ignore[attr-defined]
    return run


def added_options(function: Callable[..., Any]) -> list[Parameter]:
    """Return the options that a function behind ``more`` adds to its command."""
    found = signature(function, eval_str=True).parameters.values()
    return [each for each in found if each.kind is Parameter.KEYWORD_ONLY]
