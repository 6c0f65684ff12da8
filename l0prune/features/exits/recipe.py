"""Section ``exits`` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

import l0prune
from l0prune.data.dataset import chosen
from l0prune.errors import DataError
from l0prune.plan.measures import kind_of
from l0prune.plan.numbers import LARGEST, MOST
from l0prune.progress.stages import stage
from l0prune.running.task import is_split


class Section(BaseModel):
    """Early exits: options of ``add_exits`` and of ``choose_exits``.

    The network has early exits from the beginning, and there is a second ONNX file that ends at the
    first exit that is sure enough.
    """

    model_config = ConfigDict(extra="forbid")
    about: ClassVar[str] = "Early exits."

    at: Annotated[int, Field(ge=1, le=MOST)] | list[str] = Field(
        2, description="Number of exits, or the paths of the modules that they read."
    )
    weights: float | list[float] = Field(1.0, description="Weight of the exits' losses.")
    distill: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="Share of an exit's loss that is distillation from the last exit."
    )
    temperature: Annotated[float, Field(gt=0, le=LARGEST)] = Field(
        2.0, description="Temperature of that distillation."
    )
    held_out: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="Share of the training examples that are held out to choose thresholds."
    )
    criterion: str = Field("confidence", description="confidence, entropy or patience.")
    budget: str | None = Field(None, description="Mean cost of an example, such as `latency=8ms`.")
    tolerance: float | str | None = Field(
        None, description="In place of a budget: how much worse the metric may become (`1%`)."
    )
    measure: str = Field("macs", description="What a tolerance spares: macs or latency.")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.budget is None) == (self.tolerance is None):
            raise ValueError("give either a budget (latency=8ms) or a tolerance (1%)")
        return self

    def check(self, _: Any) -> None:
        """Accept any recipe."""

    def keep_back(self, data: l0prune.Task, source: str) -> tuple[l0prune.Task, Any]:
        """Return the task without the examples for choosing thresholds, and these.

        Raises:
            DataError: no examples can be taken from the source.
        """
        if not is_split(data.train):
            raise DataError(
                f"of {source} no examples can be kept back for the thresholds of exits: give a "
                "data set with a length, not batches"
            )
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
        count = max(1, round(self.held_out * len(order)))
        train, kept = (chosen(data.train, rows) for rows in (order[count:], order[:count]))
        return replace(data, train=train), kept

    def put_on(self, model: nn.Module, args: Any, kwargs: Any, _: int) -> nn.Module:
        """Return the network with exits."""
        options = self.model_dump(include={"at", "weights", "distill", "temperature"})
        return l0prune.add_exits(model, args, kwargs, **options)

    def finish(
        self, small: l0prune.Export, _: nn.Module, data: l0prune.Task, kept: Any, stem: Path
    ) -> dict[str, Any]:
        """Choose the thresholds, write the file, and return the results on the test data."""
        asked = self.model_dump(include={"criterion", "budget", "tolerance", "measure"})
        early = l0prune.choose_exits(small, kept, **asked, loss=data.loss, metric=data.metric)
        file = early.save_onnx(f"{stem}.exits.onnx")
        with stage("testing the network with early exits"):
            found = l0prune.evaluate(early.module, data, device="cpu")
        name = data.metric_name
        return {**early.to_dict(), "onnx": str(file), f"test_{name}": found[name]}

    @staticmethod
    def rows(found: Mapping[str, Any], metric: str, form: str) -> Iterator[tuple[str, str]]:
        """Yield rows of the table of a run's result."""
        unit = kind_of(found["measure"])
        shares = ", ".join(f"{share:.0%}" for share in found["shares"])
        yield f"leave at {', '.join(found['at'])}, the end", shares
        expected, whole = unit.brief(found["expected"]), unit.brief(found["costs"][-1])
        yield "expected, of the whole way", f"{expected} of {whole}"
        yield f"test {metric} with exits", format(found[f"test_{metric}"], form)
        yield "file with exits", found["onnx"]
