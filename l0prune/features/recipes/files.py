"""Recipes: TOML files that describe a run from data to a small ONNX file, and their schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from l0prune.cli.options import key_and_value, toml_value
from l0prune.errors import UsageError
from l0prune.files.checked_json import read_toml
from l0prune.files.consent import RECIPES, is_code
from l0prune.gating import defaults
from l0prune.gating.kinds.base import Gate, gate_of
from l0prune.plan.limits import limits
from l0prune.plan.measures import Latency
from l0prune.plan.numbers import LARGEST, MOST, NETWORKS, SEEDS, THREADS
from l0prune.plan.targets import TARGET, check_target
from l0prune.running.criteria import check_name
from l0prune.training.settings import Settings


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelSection(_Section):
    """Source of the network; paths are relative to the recipe."""

    source: str
    weights: str | None = None


def _checked(given: str | None, kind: str) -> str | None:
    try:
        if given is not None:
            check_name(given, kind)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return given


class DataSection(_Section):
    """Data, loss and metric; paths are relative to the recipe.

    With ``answers`` the targets are the dense network's outputs (``with_pseudo_labels``), in the
    precision in which the gates learn (``finetune.autocast``).
    """

    source: str
    loss: Annotated[str | None, AfterValidator(lambda given: _checked(given, "loss"))] = None
    metric: Annotated[str | None, AfterValidator(lambda given: _checked(given, "metric"))] = None
    answers: bool = False


class GateSection(_Section):
    """Options of ``gate``, and the gates' initial state."""

    include: list[str] = list(defaults.INCLUDE)
    exclude: list[str] = list(defaults.EXCLUDE)
    keep: list[str] = list(defaults.KEEP)
    open_probability: float | dict[str, float] = defaults.OPEN_PROBABILITY
    jitter: Annotated[float, Field(ge=0, le=LARGEST)] = defaults.JITTER
    seed: Annotated[int, Field(ge=0, le=SEEDS)] = defaults.SEED
    keep_class: bool | Literal["native"] = defaults.KEEP_CLASS
    branches: bool | list[str] | None = defaults.BRANCHES
    uniform: bool = defaults.UNIFORM
    loadable_by: str | None = defaults.LOADABLE_BY
    kind: str = defaults.KIND
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_known(self) -> GateSection:
        self.made()
        return self

    def made(self) -> Gate:
        """Return the kind of gate with its settings."""
        try:
            return gate_of(self.kind, self.settings)
        except UsageError as error:
            raise ValueError(str(error)) from error  # pydantic reports it with its place


def _settings_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Check settings of ``l0prune.finetune`` early, so that no later stage fails by them."""
    try:
        Settings.of(settings)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return settings


Learning = Annotated[dict[str, Any], AfterValidator(_settings_of)]


class FitSection(_Section):
    """Options of closing gates by a score, in one shot (``l0prune.score``, ``l0prune.fit``)."""

    budget: str | list[str] | dict[str, Any]
    score: str = "magnitude"
    batches: int | None = Field(None, ge=1, le=MOST)
    batch_size: int = Field(100, ge=1, le=MOST)
    round_to: Annotated[int, Field(ge=1, le=MOST)] | Literal["auto"] = "auto"
    target: Annotated[str, AfterValidator(check_target)] = TARGET
    kinds: list[str] = []


class RoundSection(_Section):
    """Round of pruning: gates are added, learned (or closed by a score), and cut out."""

    gate: GateSection = Field(default_factory=GateSection)
    fit: FitSection | None = None
    finetune: Learning = Field(default_factory=dict)

    @model_validator(mode="after")
    def _learns_or_is_fitted(self) -> RoundSection:
        if self.fit is not None and self.finetune:
            raise ValueError(
                "a round has either fit or finetune: cut by fit in a round, then learn in the next"
            )
        return self

    @property
    def limited(self) -> set[str]:
        """Names of the measures of the round's budget."""
        budget = self.finetune.get("budget") if self.fit is None else self.fit.budget
        return set() if budget is None else {limit.measure for limit in limits(budget)}

    @property
    def goes_by_times(self) -> bool:
        """Return whether a latency table changes the cut: by the budget, or by preferred widths."""
        asked = self.finetune.get("round_to") if self.fit is None else self.fit.round_to
        return Latency.name in self.limited or asked in (None, "auto")


class LatencySection(_Section):
    """Setting of latency budgets: ``l0prune.measure`` on this machine."""

    runtime: str = "onnxruntime"
    provider: str | None = None
    threads: int = Field(1, ge=1, le=THREADS)
    batch: int = Field(1, ge=1, le=MOST)
    samples: Annotated[int, Field(ge=1, le=NETWORKS)] | Literal["auto"] = "auto"


class ExitsSection(_Section):
    """Early exits: options of ``add_exits`` and of ``choose_exits``.

    A share ``held_out`` of the training examples is held out, on which thresholds are chosen.
    """

    at: Annotated[int, Field(ge=1, le=MOST)] | list[str] = 2
    weights: float | list[float] = 1.0
    distill: Annotated[float, Field(ge=0, le=1)] = 0.5
    temperature: Annotated[float, Field(gt=0, le=LARGEST)] = 2.0
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    criterion: str = "confidence"
    budget: str | None = None
    tolerance: float | str | None = None
    measure: str = "macs"

    @model_validator(mode="after")
    def _is_one_of_both(self) -> ExitsSection:
        if (self.budget is None) == (self.tolerance is None):
            raise ValueError("give either a budget (latency=8ms) or a tolerance (1%)")
        return self


class InputGatesSection(_Section):
    """Input gates: options of ``add_input_gates``."""

    at: str | list[str] = "*"
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    price: Annotated[float, Field(ge=0, le=LARGEST)] | None = None
    shape: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    skip: bool = True
    per: Literal["example", "position"] = "example"
    hidden: Annotated[int, Field(ge=1, le=MOST)] | None = None
    gate: Literal["hard-concrete", "binary-concrete"] = "hard-concrete"


class ExportSection(_Section):
    """Files to write besides ONNX."""

    pt2: bool = False
    state: bool = False


class Recipe(RoundSection):
    """Whole recipe of a run.

    ``dense``, ``finetune`` and ``recover`` hold settings of ``l0prune.finetune``: for the network
    before it is gated, for the gated one, and for the small one alone, if given.
    ``rounds`` cut the network beforehand, which makes the steps of the last round, that of the
    recipe itself, cheaper. If a stage distils, the dense network is the teacher. ``report`` is a
    ``file.py:function`` for measurements beside the metric: given the dense network and the path
    of the ONNX file, it returns them by name.
    With ``input_gates`` the network has input gates from the beginning, and there is a second ONNX
    file that skips blocks, if a block has a separate gate.
    With ``exits`` the network has early exits from the beginning, and there is a second ONNX file
    that ends at the first exit that is sure enough.
    With ``latency`` the network of each round that can use it is timed before its gates learn, so
    that budgets may be in milliseconds.
    """

    name: str
    description: str
    seed: int = Field(0, ge=0, le=SEEDS)
    model: ModelSection
    data: DataSection
    dense: Learning | None = None
    rounds: list[RoundSection] = Field(default_factory=list)
    recover: Learning | None = None
    report: str | None = None
    latency: LatencySection | None = None
    exits: ExitsSection | None = None
    input_gates: InputGatesSection | None = None
    export: ExportSection = Field(default_factory=ExportSection)

    @model_validator(mode="after")
    def _has_gates_in_each_round(self) -> Recipe:
        if self.input_gates is not None and self.rounds:
            raise ValueError(
                "what rounds cut is a graph, of whose input gates the next one knows nothing: "
                "leave out input_gates or rounds"
            )
        return self

    @model_validator(mode="after")
    def _takes_times_for_budgets_in_them(self) -> Recipe:
        if self.latency is None and any(Latency.name in p.limited for p in (*self.rounds, self)):
            self.latency = LatencySection.model_validate({})
        return self


def builtin() -> dict[str, Recipe]:
    """Return the built-in recipes, by name."""
    return {path.stem: load(str(path), []) for path in sorted(RECIPES.glob("*.toml"))}


def find(name: str) -> Path:
    """Return the file of a recipe, given by path or by the name of a built-in one.

    Raises:
        UsageError: there is none.
    """
    for path in (Path(name), RECIPES / f"{name}.toml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in RECIPES.glob("*.toml"))
    raise UsageError(f"there is no recipe {name!r}; built in are {', '.join(known)}.")


def load(name: str, overrides: Sequence[str]) -> Recipe:
    """Read a recipe and apply ``section.key=value`` overrides to it.

    ``section.key=`` removes the recipe's value, so that the default is used.

    Raises:
        FileError: the file cannot be read, or is no TOML.
        UsageError: it is no recipe, or an override is wrong; says where.
    """
    path = find(name)
    content = read_toml(path)
    for override in overrides:
        _override(content, override)
    content.setdefault("name", path.stem)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        given = f" with {' '.join(overrides)}" if overrides else ""
        raise UsageError(f"{path}{given} is no recipe:\n" + "\n".join(lines)) from error
    sections = {name: _located(getattr(recipe, name), path.parent) for name in ("model", "data")}
    report = recipe.report and _placed(recipe.report, path.parent)
    return recipe.model_copy(update={**sections, "report": report})


def _override(content: dict[str, Any], text: str) -> None:
    key, value = key_and_value(text, "finetune.epochs=5", may_be_empty=True)
    *sections, last = key.split(".")
    target = content
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise UsageError(f"{text!r}: {section} is a value, not a section.")
    if not value:
        if last not in target:
            raise UsageError(f"{text!r}: the recipe does not say {key}, so nothing is left out.")
        del target[last]
        return
    target[last] = toml_value(value)


def _located(section: ModelSection | DataSection, folder: Path) -> ModelSection | DataSection:
    placed = {key: _placed(value, folder) for key, value in section if isinstance(value, str)}
    return section.model_copy(update=placed)


def _placed(spec: str, folder: Path) -> str:
    """Resolve a Python file: beside the recipe, else in the working directory, else built in.

    So a copy of a built-in recipe in any folder finds the code that it names.
    """
    path, _, name = spec.rpartition(":")
    if not is_code(spec):
        return spec
    places = (folder / path, Path(path), RECIPES / path)
    found = next((place for place in places if place.is_file()), None)
    return spec if found is None else f"{found.resolve()}:{name}"
