"""Recipes: TOML files that describe a run from data to a small ONNX file, and their schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from l0prune.cli.opening import free_dims
from l0prune.cli.project import find_recipe, read_recipe
from l0prune.doors import inner_first, missing
from l0prune.errors import UsageError
from l0prune.files.checked_json import read_toml
from l0prune.files.consent import RECIPES
from l0prune.gating import defaults
from l0prune.gating.kinds.base import Gate, gate_of
from l0prune.plan.limits import limits
from l0prune.plan.measures import Latency
from l0prune.plan.numbers import LARGEST, MOST, NETWORKS, SEEDS, THREADS
from l0prune.plan.targets import TARGET, check_target
from l0prune.running.criteria import check_name
from l0prune.selection import scores
from l0prune.training.fields import in_words
from l0prune.training.settings import Settings


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelSection(_Section):
    """The network."""

    source: str = Field(
        description="Code or a model by name: `file.py:function` (a path relative to the recipe), "
        "`torchvision:NAME`, `timm:NAME`, `transformers:NAME`, a `.pt` or `.onnx` file."
    )
    weights: str | None = Field(
        None,
        description="File of a state_dict, or for torchvision the name of published weights, such "
        "as DEFAULT.",
    )


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator by a function that raises UsageError; None is not checked."""

    def passed(given: Any) -> Any:
        try:
            if given is not None:
                check(given)
        except UsageError as error:
            raise ValueError(str(error)) from error  # pydantic reports it with its place
        return given

    return AfterValidator(passed)


class DataSection(_Section):
    """Data, loss and metric."""

    source: str = Field(
        description="As `--data`: a data set by name, `imagefolder:DIR`, a text, or "
        "`file.py:function` (a path relative to the recipe)."
    )
    tokenizer: str | None = Field(
        None, description="Folder or name of the tokenizer of a text; by default the model's."
    )
    loss: Annotated[str | None, _checked(lambda given: check_name(given, "loss"))] = Field(
        None, description="Loss by name or `file.py:function`; by default that of the data."
    )
    metric: Annotated[str | None, _checked(lambda given: check_name(given, "metric"))] = Field(
        None, description="Metric by name or `file.py:function`; by default that of the data."
    )
    answers: bool = Field(
        False,
        description="Learn from the dense network's outputs in place of labels "
        "(`with_pseudo_labels`), in the precision of `finetune.autocast`.",
    )


class GateSection(_Section):
    """Options of ``gate``, and the gates' initial state."""

    include: list[str] = Field(
        list(defaults.INCLUDE), description="Axes and branches to gate: names or globs."
    )
    exclude: list[str] = Field(
        list(defaults.EXCLUDE), description="Axes and branches to leave whole, even if included."
    )
    keep: list[str] = Field(
        list(defaults.KEEP), description="Layers to leave whole on all sides: paths or globs."
    )
    dynamic: Annotated[list[str], _checked(lambda given: free_dims(given, None))] = Field(
        [], description="Sizes of inputs that stay free in the files, as `input_ids:1=length`."
    )
    open_probability: float | dict[str, float] = Field(
        defaults.OPEN_PROBABILITY,
        description="Initial probability that a gate is open; a table sets it by globs of axes.",
    )
    jitter: Annotated[float, Field(ge=0, le=LARGEST)] = Field(
        defaults.JITTER, description="Standard deviation of the noise on the initial log α."
    )
    seed: Annotated[int, Field(ge=0, le=SEEDS)] = Field(
        defaults.SEED, description="Seed of that noise."
    )
    keep_class: bool | Literal["native"] = Field(
        defaults.KEEP_CLASS,
        description="Keep equally many slots where the model's code has one number, so that the "
        'result is of its own class; "native": with layers of torch alone.',
    )
    branches: bool | list[str] | None = Field(
        defaults.BRANCHES,
        description="Branches that get a gate of their own, so that whole blocks can be removed: "
        "true, false, or names and globs; by default all that include and exclude leave.",
    )
    uniform: bool = Field(
        defaults.UNIFORM, description="Keep one share of the width of all layers."
    )
    loadable_by: str | None = Field(
        defaults.LOADABLE_BY,
        description='Gate only what this program loads by itself: "transformers", "vllm", "gguf".',
    )
    outputs: list[str] = Field(
        list(defaults.OUTPUTS),
        description="Outputs that matter: names, first parts of names or globs; by default all, of "
        "a transformers model its logits or last hidden state.",
    )
    kind: str = Field(
        defaults.KIND,
        description="Kind of gate: hard-concrete, continuous-sparsification or binary-concrete.",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of that kind, such as `estimator`."
    )

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


# Checked early, so that no later stage fails by them.
Learning = Annotated[dict[str, Any], _checked(Settings.of)]


class FitSection(_Section):
    """Options of closing gates by a score, in one shot (``l0prune.score``, ``l0prune.fit``)."""

    budget: str | list[str] | dict[str, Any] = Field(
        description="What the network may cost: `macs=0.5`, `params=10k`, `latency=12ms`, …"
    )
    score: Annotated[str, _checked(scores.check_name)] = Field(
        "magnitude", description="Score by name, auto, or `file.py:function`."
    )
    batches: int | None = Field(
        None, ge=1, le=MOST, description="Batches of data for scores that need data."
    )
    batch_size: int = Field(100, ge=1, le=MOST, description="Examples in each of these batches.")
    round_to: Annotated[int, Field(ge=1, le=MOST)] | Literal["auto"] = Field(
        "auto", description="Widths are multiples of this; auto: of the target's fastest blocks."
    )
    target: Annotated[str, _checked(check_target)] = Field(
        TARGET, description="Runtime that the result is for."
    )
    kinds: list[str] = Field(
        [], description="Kinds of axes whose gates may be closed; empty for all."
    )


class RoundSection(_Section):
    """Round of pruning: gates are added, learned (or closed by a score), and cut out."""

    gate: GateSection = Field(
        default_factory=lambda: GateSection.model_validate({}), description="Where gates are put."
    )
    fit: FitSection | None = Field(
        None, description="Close gates in one shot by a score; without it the gates learn."
    )
    finetune: Learning = Field(default_factory=dict, description="Settings of training with gates.")

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

    runtime: str = Field("onnxruntime", description="Runtime, by its name in `l0prune measure`.")
    provider: str | None = Field(None, description="Execution provider of ONNX Runtime.")
    threads: int = Field(1, ge=1, le=THREADS, description="Threads that a call may use.")
    batch: int = Field(1, ge=1, le=MOST, description="Examples of a call.")
    samples: Annotated[int, Field(ge=1, le=NETWORKS)] | Literal["auto"] = Field(
        "auto", description="Networks of other widths that are timed."
    )


class ExportSection(_Section):
    """Files to write besides ONNX."""

    pt2: bool = Field(False, description="Write an exported program of torch.")
    state: bool = Field(False, description="Write a state_dict and its shapes.")


class Recipe(RoundSection):
    """Whole recipe of a run.

    ``dense``, ``finetune`` and ``recover`` hold settings of ``l0prune.finetune``: for the network
    before it is gated, for the gated one, and for the small one alone, if given.
    ``rounds`` cut the network beforehand, which makes the steps of the last round, that of the
    recipe itself, cheaper. If a stage distils, the dense network is the teacher. ``report`` is a
    ``file.py:function`` for measurements beside the metric: given the dense network and the path
    of the ONNX file, it returns them by name.
    With ``latency`` the network of each round that can use it is timed before its gates learn, so
    that budgets may be in milliseconds. ``WHOLE`` has the sections of features, too.
    """

    name: str = Field(description="Name of the run, its folder and files.")
    description: str = Field(description="One sentence, which `l0prune recipes ls` shows.")
    seed: int = Field(0, ge=0, le=SEEDS, description="Seed of everything that is drawn at random.")
    model: ModelSection = Field(description="The network.")
    data: DataSection = Field(description="Data, loss and metric.")
    dense: Learning | None = Field(
        None, description="Settings of training the network before it is gated."
    )
    rounds: list[RoundSection] = Field(
        default_factory=list,
        description="Rounds of pruning before the last one, which is that of the recipe itself.",
    )
    recover: Learning | None = Field(
        None, description="Settings of training the small network alone, at the end."
    )
    report: str | None = Field(
        None,
        description="Measurements beside the metric: `file.py:function`, which is given the dense "
        "network and the path of the ONNX file, and returns them by name.",
    )
    latency: LatencySection | None = Field(
        None, description="How the network is timed, for budgets in milliseconds."
    )
    export: ExportSection = Field(
        default_factory=lambda: ExportSection.model_validate({}),
        description="Files to write besides ONNX.",
    )

    @property
    def further(self) -> dict[str, Any]:
        """The sections of features that it has, by name, in the order in which they work."""
        found = {name: getattr(self, name, None) for name in SECTIONS}
        return {name: section for name, section in found.items() if section is not None}

    @model_validator(mode="after")
    def _agrees_with_sections_of_features(self) -> Self:
        for section in self.further.values():
            section.check(self)
        return self

    @model_validator(mode="after")
    def _takes_times_for_budgets_in_them(self) -> Self:
        parts: list[RoundSection] = [*self.rounds, self]
        if self.latency is None and any(Latency.name in part.limited for part in parts):
            self.latency = LatencySection.model_validate({})
        return self


# Sections of features, classes ``Section``: each changes the network before it is trained
# (``put_on``) and makes something of the export (``finish``, ``rows``) with examples that it kept
# back (``keep_back``). ``check`` refuses a recipe; ``about`` describes the section.
SECTIONS: dict[str, Any] = {
    name: feature.module("sections", name).Section for name, feature in inner_first("sections")
}
_FIELDS: dict[str, Any] = {
    name: (section | None, Field(None, description=section.about))
    for name, section in SECTIONS.items()
}
WHOLE: type[Recipe] = create_model("Recipe", __base__=Recipe, **_FIELDS)


def builtin() -> dict[str, Recipe]:
    """Return the built-in recipes by name, without those of features that are not installed."""
    paths = sorted(RECIPES.glob("*.toml"))
    return {p.stem: load(str(p), []) for p in paths if not _lacking(read_toml(p))}


def _lacking(content: Mapping[str, Any]) -> str | None:
    """Return the sentence about a feature that a recipe has a section of, if it is not there."""
    return next(filter(None, map(missing, content.keys() - WHOLE.model_fields.keys())), None)


def load(name: str, overrides: Sequence[str]) -> Recipe:
    """Read a recipe and apply ``section.key=value`` overrides to it.

    ``section.key=`` removes the recipe's value, so that the default is used.

    Raises:
        FileError: the file cannot be read, or is no TOML.
        UsageError: it is no recipe, or an override is wrong; says where.
    """
    content = read_recipe(name, overrides)
    path = find_recipe(name)
    if sentence := _lacking(content):
        raise UsageError(f"{path} is no recipe here: {sentence}")
    try:
        return WHOLE.model_validate(content)
    except ValidationError as error:
        lines = [f"  {text}" for text in in_words(error, WHOLE, content)]
        given = f" with {' '.join(overrides)}" if overrides else ""
        raise UsageError(f"{path}{given} is no recipe:\n" + "\n".join(lines)) from error
