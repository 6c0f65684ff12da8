"""Options of a command that are settings of training, made from where those are declared."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_origin

import typer

from l0prune.training.fields import summary, types
from l0prune.training.settings import Settings

Command = Callable[..., None]

_FLAGS = {"lam": "--lambda", "measures": "--measure"}  # lambda is a keyword of Python
_REPEATED = {"budget", "measures"}  # options that may be given again
_MORE = {"budget": "Several: give it again. With one λ is 0, unless --lambda is given"}


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Give a command options for these settings, in the place of its parameter ``settings``.

    What the user gave of them comes to the command as a dict, by the settings' names. What is
    not given has no entry, so that defaults may come from elsewhere.
    """

    def made(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        options = [_option(name) for name in names]
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += options if parameter.name == "settings" else [parameter]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            settings = {name: given.pop(name) for name in names}
            command(**given, settings={k: v for k, v in settings.items() if v not in (None, [])})

        # What typer reads.
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return made


def _option(name: str) -> inspect.Parameter:
    """A setting as a parameter that typer makes an option of."""
    flags = (_FLAGS[name],) if name in _FLAGS else ()
    parser = _number_or_word if _has_words(name) else None
    option = typer.Option(*flags, help=_help(name), show_default=False, parser=parser)
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[_kind(name) | None, option],
    )


def _kind(name: str) -> Any:
    """What an option's text is read as; the settings themselves check more than that."""
    if name in _REPEATED:
        return list[str]
    if _has_words(name):
        return str
    plain = [kind for kind in types(Settings.model_fields[name]) if kind in (bool, int, float)]
    return plain[0] if plain else str


def _has_words(name: str) -> bool:
    """May it be a number or one of some words?"""
    kinds = types(Settings.model_fields[name])
    return int in kinds and any(get_origin(kind) is Literal for kind in kinds)


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _help(name: str) -> str:
    """What a setting is, and its default where there is one."""
    field = Settings.model_fields[name]
    text = ". ".join(filter(None, (summary(field), _MORE.get(name))))
    default = _shown(name, field.default)
    return f"{text} [{default}]." if default else f"{text}."


def _shown(name: str, default: Any) -> str:
    """A default as one would write it on the command line; empty where there is none."""
    if isinstance(default, bool):
        return ("" if default else "no-") + name.replace("_", "-")
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None or default == () else str(default)
