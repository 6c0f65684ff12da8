"""Options that several commands share.

Options of a command that are settings of training, made from where those are declared.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import typer

import l0prune
from l0prune.cli.edge import say
from l0prune.cli.project import chosen, image_folder, only_model, output_path, side_of_images
from l0prune.errors import DataError, FileError, UsageError
from l0prune.files.consent import check_consent, check_root_consent, remember
from l0prune.training.fields import summary, types
from l0prune.training.settings import Settings

LATENCY = ".latency.json"
NO_DATA = (
    'no data is named: give --data mnist, imagefolder:DIR or file.py:function, or data = "…" in '
    "l0prune.toml, or put a folder of images here, in it a folder for each class."
)
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
ModelOption = Annotated[
    str | None, typer.Option("--model", help="The same as MODEL, for use with --weights.")
]
Weights = Annotated[
    Path | None, typer.Option(help="A state_dict file to load into the model that MODEL builds.")
]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Unpickle any class: this runs code in the file.")
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
        help="A size that stays free beside the batch, as input:dim=name: input_ids:1=seq.",
    ),
]
DataSpec = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="mnist, fashion-mnist, cifar10, cifar100, digits, imagefolder:DIR (images of 224x224; "
        "of 160x160: imagefolder:DIR:160; grey ones: imagefolder:DIR:1x160), text (FILE.txt, "
        "text:DIR; in windows of 512 tokens: FILE.txt:512) or file.py:function.",
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(help="Folder of the data [$L0PRUNE_DATA, else a cache folder]."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Of a text: a folder or name, for transformers [that of the model]."),
]
GatedFile = Annotated[
    Path | None, typer.Argument(help="A gated model; default: the newest *.gated.pt here.")
]
Latency = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Times of this model as `l0prune measure` wrote them, for budgets in latency and for "
        "widths that the runtime is fast at [under such a budget MODEL.latency.json].",
    ),
]
WithReport = Annotated[
    bool,
    typer.Option(
        "--report/--no-report", help="Write report.html, a page that shows what the run came to."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def open_model(
    model: str | None, option: str | None, weights: Path | None, trust_pickle: bool
) -> tuple[str, Any]:
    """Return the model's spec and the module itself.

    Raises:
        UsageError: no model, or two, are named.
    """
    if model and option and model != option:
        raise UsageError(f"two models are named: {model} and {option}.")
    spec = chosen(model or option, "model") or only_model()
    if spec is None:
        raise UsageError(
            "no model is named, and there is no *.pt, *.pth or *.onnx here that no command has "
            f"written. MODEL is one of: {MODEL_HELP}"
        )
    if not (model or option):
        say(f"the model is {spec}")
    text = str(weights) if weights else None
    module = l0prune.load_model(spec, text, trust_pickle=trust_pickle)
    if said := _about_named(spec, module, text):
        say(said)
    return spec, module


def _about_named(spec: str, module: Any, weights: str | None) -> str:
    """Describe a network of a package: outputs of its last layer, and its weights; else empty."""
    package, _, name = spec.partition(":")
    if package not in ("torchvision", "timm", "transformers") or not name:
        return ""
    sizes = {path: _outputs(each) for path, each in module.named_modules()}
    last = next((path for path in reversed(sizes) if sizes[path]), None)
    outputs = "" if last is None else f"its last layer, {last}, has {sizes[last]:,} outputs; "
    if weights is not None:
        return f"{spec}: {outputs}its weights are {weights}"
    if package == "transformers":
        return f"{spec}: {outputs}its weights are those that {name} holds"
    way_on = "DEFAULT for published ones, or a file" if package == "torchvision" else "FILE"
    return f"{spec}: {outputs}its weights are random, not pretrained (--weights {way_on})"


def _outputs(layer: Any) -> int:
    """Return the outputs of a Linear or a convolution; 0 for other modules."""
    return int(getattr(layer, "out_features", 0) or getattr(layer, "out_channels", 0))


def example_inputs(
    text: str | None, data: Any, model: Any
) -> tuple[str | None, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return example inputs from ``--input``, else the first two of the data, else a guess.

    They are positional and keyword arguments, after the text of them if they are made from one. A
    batch of one is doubled: torch.export takes a size of one for a constant.

    Raises:
        UsageError: no input that the model runs on could be guessed.
    """
    from l0prune.files.model_sources import parse_input  # loads torch, as do the next ones
    from l0prune.files.onnx_network import OnnxNetwork

    text = chosen(text, "input")
    if text is None and data is not None:
        from l0prune.data.dataset import as_arguments
        from l0prune.running.batches import example_inputs
        from l0prune.running.task import Task

        return None, as_arguments(example_inputs(Task.of(data), 2))
    if text is None and isinstance(model, OnnxNetwork):
        own = model.example_input_array
        text = ",".join(
            "x".join(map(str, x.shape)) + f":{x.dtype}".replace("torch.", "") for x in own
        )
        say(f"the example input is {text}, from the file; to give another one: --input {text}")
        return text, (own, {})
    if text is None:
        from l0prune.files.example_guess import guess_example

        text, origin = guess_example(model, _sides())
        say(f"the example input is {text}, from {origin}; to give another one: --input {text}")
    args, kwargs = parse_input(text)
    is_fixed = getattr(model, "fixed_batch", 0) == 1
    if not is_fixed and all(tensor.shape[0] == 1 for tensor in (*args, *kwargs.values())):
        args = tuple(map(_doubled, args))
        kwargs = {name: _doubled(tensor) for name, tensor in kwargs.items()}
    return text, (args, kwargs)


def _sides() -> list[int]:
    """Return the side of the images that lie here, if they are squares of one size."""
    with suppress(UsageError):  # several folders of images are none
        folder = image_folder()
        if folder is not None and (side := side_of_images(folder)):
            return [side]
    return []


def latency_table(given: Path | None, path: Path, budget: str | Sequence[str] | None) -> Any:
    """Return the table that is given, or the one beside the model where a budget needs it.

    Raises:
        FileError: it cannot be read.
    """
    if given is None:
        beside = output_path(None, str(path), LATENCY)
        texts = (budget,) if isinstance(budget, str) else budget or ()
        is_needed = any(l0prune.LatencyTable.name in text for text in texts)
        given = beside if is_needed and beside.exists() else None
    return None if given is None else l0prune.LatencyTable.load(given)


def free_dims(given: list[str] | None, model: Any) -> dict[str, dict[int, str]] | None:
    """Read ``--dynamic`` into torch.export's format; else what the model's own file leaves free.

    Raises:
        UsageError: it is not of the form input:dim=name.
    """
    found: dict[str, dict[int, str]] = {}
    for text in given or ():
        match = re.fullmatch(r"(\w+):(\d+)=(\w+)", text)
        if match is None:
            raise UsageError(f"--dynamic takes input:dim=name, like input_ids:1=seq, not {text!r}")
        found.setdefault(match[1], {})[int(match[2])] = match[3]
    return found or getattr(model, "free", None) or None


def _doubled(tensor: Any) -> Any:
    return tensor.repeat(2, *[1] * (tensor.ndim - 1))


def parse_setting(text: str) -> tuple[str, Any]:
    """Read ``name=value`` of ``--set``, with the value as TOML reads it, or as text.

    Raises:
        UsageError: there is no value.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: write name=value.")
    return name.strip(), toml_value(value)


def toml_value(text: str) -> Any:
    """Return a value as TOML reads it, or else the text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def recorded_data(
    given: str | None,
    root: Path | None,
    info: dict[str, Any],
    path: Path,
    trust_pickle: bool,
    missing: str | None = NO_DATA,
) -> tuple[str | None, Path | None]:
    """Return the data and their root: as given, of the file, of the project, or images here.

    Raises:
        FileError: the file names code or a folder of its own choice.
        UsageError: no data is named, and there is no one folder of images, unless ``missing``, what
            is said then, is None.
    """
    asked = {name: str(info[name]) for name in ("data", "data_root") if info.get(name) is not None}
    if given is None and "data" in asked and not trust_pickle:
        check_consent(asked["data"], path)
    if root is None and "data_root" in asked and not trust_pickle:
        check_root_consent(asked["data_root"], path)
    spec, folder = chosen(given, "data", asked), chosen(root, "data_root", asked)
    if spec is None:
        with nullcontext() if missing else suppress(UsageError):
            spec = _images_here(info)
    if spec is None and missing:
        raise UsageError(missing)
    return None if spec is None else str(spec), None if folder is None else Path(folder)


def _images_here(info: dict[str, Any]) -> str | None:
    """Return the spec of the images in this folder, of the size that a model takes, and say it.

    None where there are none, or where the file says that the model takes no square images.
    """
    known = info.get("preprocessing")
    sizes = known.get("input_size") if isinstance(known, dict) else None
    text = info.get("input") if sizes is None else "x".join(map(str, (1, *sizes)))
    takes = re.fullmatch(r"\d+x([13])x(\d+)x\2", str(text))
    if (text is not None and takes is None) or (folder := image_folder()) is None:
        return None
    channels = "1x" if takes is not None and takes[1] == "1" else ""
    spec = f"imagefolder:{folder}:{channels}{224 if takes is None else takes[2]}"
    say(f"no data is named, so it is the images here: --data {spec}")
    return spec


def recorded_tokenizer(
    given: str | None, info: dict[str, Any], path: Path, trust_pickle: bool
) -> str | None:
    """Return the name of the tokenizer: as given, of the file, or of the project.

    Raises:
        FileError: the file names one that has to be fetched.
    """
    name = info.get("tokenizer")
    if given is None and name is not None and not trust_pickle and not Path(str(name)).exists():
        check_consent(f"transformers:{name}", path)
    found = chosen(given, "tokenizer", {} if name is None else {"tokenizer": str(name)})
    return None if found is None else str(found)


def load_data(
    spec: str | None,
    root: Path | None,
    model: Any = None,
    tokenizer: str | None = None,
    *,
    labelled: bool = True,
) -> Any:
    """Load the data source of this name, as ``l0prune.load_data``, and tell the user about it.

    None where none is named. The model may know its tokenizer.

    Raises:
        DataError: it is inputs alone where labels are needed.
    """
    if spec is None:
        return None
    source: Any = l0prune.load_data(spec, root, tokenizer=tokenizer or model)
    if not hasattr(source, "train"):  # a tensor or a mapping of some
        if labelled:
            raise DataError(
                f"{spec} returns inputs without labels: `l0prune shrink` takes these, and "
                "`l0prune finetune --learn gates`"
            )
        return source
    if tokenizer:
        remember(f"transformers:{tokenizer}")
    parts = [f"{len(part):,} {name} examples" for name, part in _sized(source).items()]
    classes = [f"{source.classes} classes"] if getattr(source, "classes", 0) else []
    images = [] if source.preprocessing is None else [str(source.preprocessing)]
    if known := [*parts, *classes, *images]:
        say(f"{spec}: {', '.join(known)}")
    return source


def _sized(source: Any) -> dict[str, Any]:
    """Return the parts of a data source that say how many examples they have."""
    parts = {"training": source.train, "test": source.test}
    return {name: part for name, part in parts.items() if hasattr(part, "batches")}


def preprocessing_in(info: dict[str, Any], path: Path) -> Any:
    """Return the preprocessing of images that a model file records, if any.

    Raises:
        FileError: it is damaged.
    """
    from pydantic import ValidationError

    from l0prune.data.preprocessing import Preprocessing  # loads torch

    found = info.get("preprocessing")
    try:
        return None if found is None else Preprocessing.model_validate(found)
    except ValidationError as error:
        raise FileError(
            f"{path} is damaged: its preprocessing of images cannot be read."
        ) from error


def with_step(
    info: dict[str, Any],
    path: Path | None = None,
    source: Any = None,
    more: Sequence[str] = (),
    table: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the facts of a model file, with this command and the preprocessing of its data.

    Args:
        info: what the file says that the command was given.
        path: of that file; the command names it, also where it was found.
        source: the data, if any.
        more: arguments that came from elsewhere than the command line.
        table: a latency table that the command used, whose own command comes before.
        options: by name, with values that may have come from elsewhere; None for those that
            nobody gave.
    """
    from l0prune.running.environment import command  # loads torch

    typed = [*sys.argv, *more]
    for name, value in options.items():
        is_there = any(each == str(value) or each.endswith(f"={value}") for each in typed)
        if value is not None and not is_there:
            typed += [f"--{name.replace('_', '-')}", str(value)]
    if path is not None and str(path) not in typed:
        typed.append(str(path))
    measured = [table.command] if table is not None and table.command else []
    found = {**info, "commands": [*info.get("commands", ()), *measured, command(typed)]}
    if source is not None:
        known = source.preprocessing
        found["preprocessing"] = None if known is None else known.model_dump()
    return found


def with_commands(report: l0prune.Report, info: dict[str, Any]) -> l0prune.Report:
    """Return the report with the commands that its model file records, the last one of the run."""
    *before, last = info["commands"]
    repeat = report.content.repeat.model_copy(update={"commands": before, "command": last})
    return l0prune.Report(report.content.model_copy(update={"repeat": repeat}))


Command = Callable[..., None]

_FLAGS = {"lam": "--lambda", "measures": "--measure"}  # lambda is a keyword of Python
_REPEATED = {"budget", "measures"}  # options that may be given again
_LISTS = {"bits"}  # options whose value is several numbers
_MORE = {
    "budget": "Several: give it again. With one λ is 0, unless --lambda is given",
    "bits": "Such as --bits 0,4,8",
}


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Give a command options for these settings, in the place of its parameter ``settings``.

    What the user gave of them comes to the command as a dict, by the settings' names. What is
    not given has no entry, so that defaults may come from elsewhere.
    """

    def made(command: Command) -> Command:
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

        # What typer reads.
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return made


def _options(name: str) -> list[inspect.Parameter]:
    """A setting as parameters that typer makes options of: one, or one with a ``--no-`` beside."""
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
    """Type as which an option's text is read; the settings themselves check more."""
    if name in _REPEATED:
        return list[str]
    if _has_words(name) or name in _LISTS:
        return str
    plain = [kind for kind in types(Settings.model_fields[name]) if kind in (bool, int, float)]
    return plain[0] if plain else str


def _has_words(name: str) -> bool:
    """Return whether a setting may be a number, or true or false, or one of some words."""
    kinds = types(Settings.model_fields[name])
    return not {int, bool}.isdisjoint(kinds) and any(get_origin(kind) is Literal for kind in kinds)


def _plain_or_word(text: str) -> int | bool | str:
    return int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)


def _numbers(text: str) -> list[int]:
    """Read whole numbers with commas or blanks between.

    Raises:
        ValueError: there is something else.
    """
    try:
        return [int(each) for each in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers, such as 0,4,8") from None


def _help(name: str) -> str:
    """Description of a setting, and its default where there is one."""
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
