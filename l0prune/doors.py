"""The doors of the core: all the ways by which a feature reaches it.

The core is the rooms in the table of ``docs/architecture.md``. It imports no feature. A feature is
a package with one object in its ``__init__``::

    FEATURE = Feature(__name__, names={"shrink_experts": "cut"}, commands={"experts": "command"})

It says in which of its modules each thing is, and they are imported when someone asks for one. So
an ``__init__`` costs next to nothing: it imports this file and no torch. Built-in features are the
folders of ``l0prune/features``; those of other packages are entry points of the group
``l0prune.features``, and the doors are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from l0prune.errors import UsageError, in_a_line, unknown, warn

T = TypeVar("T")
K = TypeVar("K")
GROUP = "l0prune.features"  # the folder, and the group of entry points

# What a user may ask of each built-in feature, so that one that was left out is still named.
BUILT_IN: dict[str, tuple[str, ...]] = {
    "distillation": ("taught",),
    "example_guess": ("guess_example",),
    "exits": ("EarlyExits", "add_exits", "choose_exits", "exits"),
    "experts": ("FewerExperts", "shrink_experts", "experts", "active_params"),
    "gguf": (".gguf", "save_gguf"),
    "half": ("dtype", "half_io"),
    "input_gates": (
        "InputMacs",
        "add_input_gates",
        "input_macs",
        "input_penalty",
        "save_skipping",
        "input_gates",
        "skipping",
    ),
    "int8": (
        "Quantizing",
        "check_menu",
        "int8_for_times",
        "rounded_again",
        "int8",
        "compensate_rounding",
        "fastest",
        "int8_tolerance",
    ),
    "latency": (
        "LatencyTable",
        "measure",
        "latency_table",
        "known_table",
        "width_times",
        "add_time",
        "table_of_files",
        "onnxruntime",
        "onnxruntime-int8",
        "eager",
        "compile",
        "cuda-graph",
        "torch-cuda-bf16",
    ),
    "loadable": ("loadable", "write_for_vllm"),
    "memory": ("memory",),
    "old_opsets": ("of_older_opset",),
    "onnx_in": (".onnx",),
    "openvino": ("openvino", "openvino-int8"),
    "page": ("html",),
    "penalties": ("penalty_of", "shrinkage_of", "gsm_defaults"),
    "phones": (".pte", ".tflite", "executorch", "litert"),
    "recipes": ("run", "recipes"),
    "sweep": ("sweep",),
    "unlabelled": ("Compensation", "compensate", "shrink", "fit_compensated"),
    "vocabulary": ("SmallerVocabulary", "shrink_vocabulary", "vocabulary"),
}


@dataclass(frozen=True)
class Feature:
    """A feature: its doors map the name of each thing to the module of the package that has it.

    Attributes:
        package: that it is in; the last part of it is the feature's name.
        needs: other features that it imports. It is there only where they are.
        names: public names of ``l0prune``.
        commands: of the command line, each a function with options in the way of typer, or a group
            of such (``typer.Typer``).
        options: of its commands, by parameter name, for each group of ``--help``.
        most_used: options that ``--help`` shows, by command; of one without any it shows all.
        more: options of commands of the core: functions of the commands' names (``cli/more.py``).
        functions: that the core asks for, by ``provided``.
        sources: of models, by what is before the colon of a spec, or the suffix of a file
            (``files/consent.py``). The module registers them when it is imported, as do those of
            all doors below.
        rules: operators, as ``aten.conv2d`` (``infer/registry.py``).
        gates: kinds of gates (``gating/kinds/base.py``).
        measures: that a budget can be about (``plan/measures.py``).
        units: of these: the suffixes of an amount with their values, known without torch.
        scores: one-shot scores of slots (``selection/scores.py``).
        penalties: on the sizes of weights (``features/penalties/shrinkage.py``).
        runtimes: that networks are timed on and made for (``features/latency/runtimes.py``).
        formats: of programs, by the suffix of the file (``exporting/programs.py``).
        writers: of other files of a network of its own class, by the suffix of the file
            (``exporting/own_class/writing.py``).
        programs: that load cuts by themselves (``features/loadable/programs.py``).
        derived: files of fewer bits made of an ONNX file, by the keywords of ``save_onnx`` that
            they are asked for by (``exporting/onnx/derived.py``).
        file_checks: functions of an ONNX file and of what it was made from, which run it elsewhere
            and return comparisons for the certificate.
        launchers: of the runs of a sweep (``features/sweep/launchers.py``).
        sections: of a recipe: modules with a class ``Section`` (``features/recipes/files.py``).
        around: networks that are put around a network, by the names that files know them by
            (``files/around.py``).
        criteria: of how sure an early exit is (``features/exits/criteria.py``).
        report_sections: of a report's page: functions of its content (``report/content.py``) that
            return a heading and a text, or None.
    """

    package: str
    needs: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    most_used: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    gates: Mapping[str, str] = field(default_factory=dict)
    measures: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scores: Mapping[str, str] = field(default_factory=dict)
    penalties: Mapping[str, str] = field(default_factory=dict)
    runtimes: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    writers: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    file_checks: Mapping[str, str] = field(default_factory=dict)
    launchers: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)
    around: Mapping[str, str] = field(default_factory=dict)
    criteria: Mapping[str, str] = field(default_factory=dict)
    report_sections: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the feature."""
        return self.package.rpartition(".")[2]

    def module(self, door: str, name: str) -> ModuleType:
        """Import the module of a thing."""
        return import_module(f"{self.package}.{getattr(self, door)[name]}")

    def load(self, door: str, name: str) -> Any:
        """Import the module of a thing, and return what it has under this name."""
        return getattr(self.module(door, name), name)


@cache
def features() -> dict[str, Feature]:
    """Return all features that are installed with those that they need, by name."""
    from importlib.metadata import entry_points
    from pkgutil import iter_modules

    found: dict[str, Feature] = {}
    for each in iter_modules(import_module(GROUP).__path__):
        found[each.name] = import_module(f"{GROUP}.{each.name}").FEATURE
    for entry in entry_points(group=GROUP):
        try:
            found.setdefault(entry.name, entry.load())
        except Exception as error:  # of a package of someone else
            warn(f"the feature {entry.name!r} ({entry.value}) is left out: {in_a_line(error)}")
    while lone := [name for name, each in found.items() if not {*each.needs} <= {*found}]:
        for name in lone:
            del found[name]
    return found


def behind(door: str) -> Iterator[tuple[str, Feature]]:
    """Yield what all features have behind a door: each name with its feature."""
    for feature in features().values():
        for name in getattr(feature, door):
            yield name, feature


def inner_first(door: str) -> list[tuple[str, Feature]]:
    """Return all that is behind a door, of each feature before those that it needs.

    In this order they change a network: what a feature needs works on what the feature made.
    """

    def depth(feature: Feature) -> int:
        return 1 + max((depth(features()[name]) for name in feature.needs), default=0)

    return sorted(behind(door), key=lambda each: depth(each[1]), reverse=True)


def feature_with(door: str, name: str) -> Feature | None:
    """Return the feature that has a thing of this name behind a door; None if none has."""
    return next((feature for known, feature in behind(door) if known == name), None)


def provided(name: str) -> Callable[..., Any]:
    """Return a function of a feature that the core needs.

    Raises:
        UsageError: its feature is not installed.
    """
    feature = feature_with("functions", name)
    if feature is None:
        raise UsageError(missing(name) or f"no feature has the function {name!r}")
    function: Callable[..., Any] = feature.load("functions", name)
    return function


def is_provided(name: str) -> bool:
    """Return whether a feature has this function, for what the core does without it as well."""
    return feature_with("functions", name) is not None


def missing(word: str) -> str | None:
    """Return the sentence about the built-in feature that a word is of, if it is not installed."""
    for name, words in BUILT_IN.items():
        if word in (name, *words) and name not in features():
            return f"this installation of l0prune has no feature {name!r}"
    return None


class Registry(MutableMapping[str, T]):
    """Things of one kind by name: what registers itself, and what is behind a door of features.

    Attributes:
        what: one of them is called in messages.
    """

    def __init__(self, what: str, door: str = "") -> None:
        self.what, self._door = what, door
        self._known: dict[str, T] = {}

    def register(self, kind: K) -> K:
        """Class decorator: make a class known by its ``name``."""
        self[kind.name] = kind  # type: ignore[attr-defined, assignment]
        return kind

    def knows(self, name: str) -> bool:
        """Return whether a name is one of these, or would be with all built-in features."""
        return name in self or missing(name) is not None

    def named(self, name: str) -> T:
        """Return the thing of this name.

        Raises:
            UsageError: there is none; the text has those that there are.
        """
        if name in self:
            return self[name]
        raise no_such(self.what, name, self)

    def __getitem__(self, name: str) -> T:
        if name not in self._known and self._door:
            feature = feature_with(self._door, name)
            if feature is not None:
                feature.module(self._door, name)  # which registers it
        return self._known[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._known[name] = value

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        there = dict(behind(self._door)) if self._door else {}
        return iter([*self._known, *(name for name in there if name not in self._known)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def no_such(what: str, name: object, known: Iterable[str], more: str = "") -> UsageError:
    """Return the error for an unknown name: the feature that has it, or the nearest name."""
    said = missing(str(name))
    return UsageError(said) if said else unknown(f"there is no {what} {name!r}", name, known, more)
