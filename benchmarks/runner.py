"""The command line, the tables and the processes that all benchmarks share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import l0prune
from benchmarks import isolation, zoo
from benchmarks.isolation import Row, parser_of
from l0prune.exporting.onnx import collect
from l0prune.files.consent import RECIPES


class Some(list[str]):
    """Several of these names, by default all or those in ``default``."""

    def __init__(self, names: Iterable[str], default: Iterable[str] = ()) -> None:
        self.names = list(names)
        super().__init__(default or self.names)


class One(str):
    """One of these names, by default the first or ``default``."""

    names: list[str]

    def __new__(cls, names: Iterable[str], default: str = "") -> One:
        every = list(names)
        made = super().__new__(cls, default or every[0])
        made.names = every
        return made


HIDDEN = (str, argparse.SUPPRESS)
ALONE: dict[str, Any] = {
    "models": ([str], "by default all that have no result yet"),
    "limit": (900, "CPU seconds for one model"),
    "one": HIDDEN,
}
"""Options of a benchmark that has a process for each model, see ``alone``."""


def arguments(about: str | None, **asked: Any) -> argparse.ArgumentParser:
    """Return a parser of options, each by its default, or a pair of that and a help text.

    In the place of a default a type is an option that may be left out, and a list of a type one
    with several values, which may be given several times; ``False`` is a flag.
    """
    parser = parser_of(about or "")
    for name, given in asked.items():
        default, said = given if isinstance(given, tuple) else (given, None)
        settings: dict[str, Any] = {"help": said}
        if default is False:
            settings["action"] = "store_true"
        elif isinstance(default, list):
            is_type = isinstance(default[0], type)
            settings |= {"nargs": "+", "default": [] if is_type else default}
            settings |= {"type": default[0] if is_type else type(default[0])}
            settings |= {"action": "extend"} if is_type else {}
        elif isinstance(default, type):
            settings["type"] = default
        else:
            kind = str if isinstance(default, str) else type(default)
            settings |= {"default": default, "type": kind}
        if names := getattr(default, "names", None):
            settings["choices"] = names
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    return parser


def options(
    about: str | None, given: Sequence[str] | None = None, *, threads: Any = 1, **asked: Any
) -> argparse.Namespace:
    """Read the command line, see ``arguments``, and set the threads of torch.

    Args:
        about: the docstring of the benchmark.
        given: what to read, by default what the command was given.
        threads: how many; None for as many as there are; a pair is an option itself.
        **asked: the options.
    """
    if isinstance(threads, tuple):
        asked["threads"] = threads
    found = arguments(about, **asked).parse_args(given)
    if count := getattr(found, "threads", threads):
        torch.set_num_threads(count)
    return found


CHECKPOINTS = {"resnet20": "resnet20-12fca82f.th", "resnet56": "resnet56-4bfd9763.th"}
"""Published CIFAR-10 networks of the recipes, whose files are in ``$L0PRUNE_DATA/../models``."""


def published(name: str) -> nn.Module:
    """Return a network of the recipes, with its published weights where it has some."""
    file = CHECKPOINTS.get(name)
    weights = file and str(Path(os.environ["L0PRUNE_DATA"]).parent / "models" / file)
    return l0prune.load_model(f"{RECIPES / 'vision.py'}:{name}", weights)


def machine() -> str:
    """Return what everything is measured on."""
    versions = f"torch {torch.__version__}, ONNX Runtime {collect.version()}"
    return f"{versions}, {collect.processor()}, threads: {torch.get_num_threads()}"


def line(cells: Iterable[object]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def lines(head: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table; ``head`` has a bar between each two columns."""
    columns = head.split(" | ")
    yield line(columns)
    yield "|" + "---|" * len(columns)
    yield from map(line, rows)


def table(head: str, rows: Iterable[Iterable[object]]) -> None:
    """Print a table, each row as soon as it is known."""
    for each in lines(head, rows):
        print(each, flush=True)


def alone(
    given: argparse.Namespace,
    module: str,
    path: Path,
    steps: Callable[[str, str], Iterator[Row]],
    summary: Callable[[Row], str],
    also: Sequence[str] = (),
) -> list[Row]:
    """Measure models, each in a process of its own; return all rows of the file.

    Args:
        given: the command line, with the options ``ALONE`` and a zoo.
        module: the benchmark's name.
        path: of the rows; by default models are measured that have none there.
        steps: measures one model of a zoo, in its process.
        summary: of a row, for the terminal.
        also: options that a process is given.
    """
    if given.one:
        which, _, name = given.one.partition(":")
        isolation.measure(name, steps(which, name))
        raise SystemExit
    wanted = given.models or isolation.missing(path, zoo.names(given.zoo))
    isolation.run(f"benchmarks.{module}", path, given.zoo, wanted, given.limit, summary, also)
    return isolation.rows(path)
