"""Options that several commands share, and options generated from the settings of training."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import typer

from l0prune.doors import behind
from l0prune.errors import UsageError
from l0prune.training.fields import summary, types
from l0prune.training.settings import Settings

MODEL_HELP = (
    "A file written by torch.save(model, path), an ONNX file, torchvision:NAME, path.py:factory, "
    "timm:NAME or transformers:NAME."
)

Model = Annotated[
    str | None,
    typer.Argument(
        help=f"{MODEL_HELP} Default: the one *.pt, else *.onnx, here.", show_default=False
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Same as MODEL.")]
Weights = Annotated[
    Path | None, typer.Option(help="A state_dict file to load into the model that MODEL builds.")
]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Unpickle any class, which runs code in the file.")
]
Input = Annotated[
    str | None,
    typer.Option(
        help="Example input, batch first: 1x3x224x224; several by comma; 2x16:int64; by name "
        "input_ids=2x16:int64,attention_mask=2x16:int64. Without it and without data one is "
        "guessed from the model."
    ),
]
Dynamic = Annotated[
    list[str] | None,
    typer.Option(
        "--dynamic",
        help="A size that stays free, as the batch does: input:dim=name, such as input_ids:1=seq.",
    ),
]
DataSpec = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="mnist, fashion-mnist, cifar10, cifar100, digits, imagefolder:DIR (a folder for each "
        "class, or without labels images alone; "
        "of the size that the model was gated with, else of their own if they are squares of one "
        "size, else 224x224; of 160x160: imagefolder:DIR:160; "
        "grey ones: imagefolder:DIR:1x160), text (FILE.txt, "
        "text:DIR; in windows of 512 tokens: FILE.txt:512; for a classifier a text a line) or "
        "file.py:function.",
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of the data [$L0PRUNE_DATA, else a cache folder]."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Tokenizer of a text: its folder or name, for transformers [that of the model]."
    ),
]
GatedFile = Annotated[
    Path | None, typer.Argument(help="A gated model; default: the newest *.gated.pt here.")
]
Faster = Annotated[
    float | None,
    typer.Option(
        metavar="TIMES",
        help="Speedup over the original model on --target: 2 is twice as fast, the same as "
        "--budget speed=2. The model is timed at several widths for it.",
    ),
]
Latency = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Times of this model as `l0prune measure` wrote them, for budgets in time and for "
        "widths that the runtime is fast at [under such a budget MODEL.latency.json, which is made "
        "where there is none].",
    ),
]
Uniform = Annotated[
    bool, typer.Option("--uniform", help="Keep the same share of the width of all layers.")
]
LoadableBy = Annotated[
    str | None,
    typer.Option(help="Gate only what this program loads by itself: transformers, vllm, gguf."),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        help="Names of the model's outputs that matter, or globs: logits, output_0. Scores and "
        "nearness look at these alone [those that a model of transformers is for; else all]."
    ),
]
Pretrained = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write a folder that l0prune.from_pretrained and resize load."
    ),
]
Vllm = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write the folder that vLLM serves, of a Llama."),
]
Written = Annotated[
    list[Path] | None,
    typer.Option(
        *(f"--{suffix.lstrip('.')}" for suffix in dict(behind("writers"))),
        "--write",
        metavar="FILE",
        help="Write this file, too, in the format that its suffix says: "
        f"{', '.join(dict(behind('writers'))) or 'none is installed'}.",
    ),
]
WithReport = Annotated[
    bool,
    typer.Option(
        "--report/--no-report", help="Write report.html, a page with the results of the run."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Globs of axes, branches to leave whole.")]
Samples = Annotated[int, typer.Option(min=3, help="Largest number of inputs to use.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Inputs in a batch.")]
Recipe = Annotated[str, typer.Argument(help="A recipe's name (recipes ls) or a .toml file.")]


def key_and_value(text: str, example: str, *, may_be_empty: bool = False) -> tuple[str, str]:
    """Split KEY=VALUE, as ``--set``, ``--job`` and the overrides of a recipe take it.

    Raises:
        UsageError: there is no key, or no value although one is required.
    """
    key, equals, value = (each.strip() for each in text.partition("="))
    if not key.rpartition(".")[2] or not equals or not (value or may_be_empty):
        raise UsageError(f"{text!r} is not KEY=VALUE, such as {example}")
    return key, value


def toml_value(text: str) -> Any:
    """Return the text parsed as a TOML value, or the text itself if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def key_values(texts: Sequence[str] | None, example: str) -> dict[str, Any]:
    """Parse the KEY=VALUE texts of a repeated option, with values as in TOML.

    Raises:
        UsageError: one of them has no key or no value.
    """
    pairs = (key_and_value(text, example) for text in texts or ())
    return {key: toml_value(value) for key, value in pairs}


_FLAGS = {"lam": "--lambda", "measures": "--measure"}  # lambda is a keyword of Python
_REPEATED = {"budget", "measures"}  # options that may be repeated
_LISTS = {"bits"}  # options whose value is a list of numbers
_MORE = {
    "budget": "Repeat it for several. Without --lambda, no price is added",
    "bits": "Such as --bits 0,4,8",
}


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter ``settings`` by options for these settings.

    The command receives those that the user gave as a dict, by the settings' names. Others have no
    entry, so that defaults may come from elsewhere.
    """

    def made(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        options = [option for name in names for option in _options(name)]
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += options if parameter.name == "settings" else [parameter]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            settings = {name: given.pop(name) for name in names}
            refused = [name for name in names if given.pop(f"no_{name}", False)]
            settings |= dict.fromkeys(refused, False)
            command(**given, settings={k: v for k, v in settings.items() if v not in (None, [])})

        # typer reads the signature and the annotations.
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return made


def _options(name: str) -> list[inspect.Parameter]:
    """Return a setting's parameters for typer: an option, and maybe a second one with ``--no-``."""
    flags = (_FLAGS[name],) if name in _FLAGS else ()
    parser = _numbers if name in _LISTS else _plain_or_word if _has_words(name) else None
    option = typer.Option(*flags, help=_help(name), show_default=False, parser=parser)
    found = [_parameter(name, Annotated[_kind(name) | None, option])]
    if _has_words(name) and bool in types(Settings.model_fields[name]):
        flag = f"--no-{name.replace('_', '-')}"
        option = typer.Option(flag, help=f"The same as --{name} false.", show_default=False)
        found.append(_parameter(f"no_{name}", Annotated[bool | None, option]))
    return found


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _kind(name: str) -> Any:
    """Return the type that an option's text is parsed to; the settings check its value."""
    if name in _REPEATED:
        return list[str]
    if _has_words(name) or name in _LISTS:
        return str
    plain = [kind for kind in types(Settings.model_fields[name]) if kind in (bool, int, float)]
    return plain[0] if plain else str


def _has_words(name: str) -> bool:
    """Return whether a setting may be a number or boolean, or one of several words."""
    kinds = types(Settings.model_fields[name])
    return not {int, bool}.isdisjoint(kinds) and any(get_origin(kind) is Literal for kind in kinds)


def _plain_or_word(text: str) -> int | bool | str:
    return int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)


def _numbers(text: str) -> list[int]:
    """Parse integers separated by commas or blanks.

    Raises:
        ValueError: the text has something else.
    """
    try:
        return [int(each) for each in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers, such as 0,4,8") from None


def _help(name: str) -> str:
    """Return the description of a setting, and its default if there is one."""
    field = Settings.model_fields[name]
    text = ". ".join(filter(None, (summary(field), _MORE.get(name))))
    default = _shown(name, field.default)
    return f"{text} [{default}]." if default else f"{text}."


def _shown(name: str, default: Any) -> str:
    """Return a default as written on the command line; empty if there is none."""
    if isinstance(default, bool):
        return ("" if default else "no-") + name.replace("_", "-")
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None or default == () else str(default)
