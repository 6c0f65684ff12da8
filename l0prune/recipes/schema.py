"""What a recipe may say: how to get from data to a small ONNX file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from l0prune.errors import UsageError
from l0prune.finetune import Settings
from l0prune.gates import Gate, gate_of


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelPart(_Part):
    """Where the network comes from; paths are relative to the recipe."""

    source: str
    weights: str | None = None


class DataPart(_Part):
    """What it learns from."""

    source: str


class GatePart(_Part):
    """How the gates are put on and set at first."""

    include: list[str] = Field(default_factory=lambda: ["*"])
    exclude: list[str] = Field(default_factory=list)
    open_probability: float | dict[str, float] = 0.99
    jitter: float = 0.01
    seed: int = 0
    kind: str = "hard-concrete"
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_known(self) -> GatePart:
        self.made()
        return self

    def made(self) -> Gate:
        """The kind of gate with its settings."""
        try:
            return gate_of(self.kind, self.settings)
        except UsageError as error:
            raise ValueError(str(error)) from error  # which pydantic reports with its place


def _settings_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of ``l0prune.finetune`` that make sense, so that no stage fails late."""
    try:
        Settings.of(settings)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return settings


Learning = Annotated[dict[str, Any], AfterValidator(_settings_of)]


class RoundPart(_Part):
    """Gates are put on, learned and cut out."""

    gate: GatePart = Field(default_factory=GatePart)
    finetune: Learning = Field(default_factory=dict)


class ExportPart(_Part):
    """Which files to write besides ONNX."""

    pt2: bool = False
    state: bool = False


class Recipe(RoundPart):
    """All of a run.

    ``dense``, ``finetune`` and ``recover`` hold settings of ``l0prune.finetune``: for the network
    before it is gated, for the gated one, and for the small one alone, where they are asked for.
    What ``rounds`` cut beforehand makes the steps of the last round, the recipe's own, cheaper.
    Where a stage distils, the dense network teaches.
    """

    name: str
    description: str
    seed: int = 0
    model: ModelPart
    data: DataPart
    dense: Learning | None = None
    rounds: list[RoundPart] = Field(default_factory=list)
    recover: Learning | None = None
    export: ExportPart = Field(default_factory=ExportPart)
