"""Section ``input_gates`` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

import l0prune
from l0prune.errors import UsageError, warn
from l0prune.gating.kinds.base import gate_of
from l0prune.plan.numbers import LARGEST, MOST
from l0prune.progress.stages import stage


class Section(BaseModel):
    """Input gates: options of ``add_input_gates``.

    The network has input gates from the beginning, and there is a second ONNX file that skips
    blocks, if a block has a separate gate.
    """

    model_config = ConfigDict(extra="forbid")
    about: ClassVar[str] = "Gates that follow the input."

    at: str | list[str] = Field("*", description="Paths of the blocks that get them, or globs.")
    target: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Mean share of the MACs that the gates leave; 0.7 without a price."
    )
    price: Annotated[float, Field(ge=0, le=LARGEST)] | None = Field(
        None, description="In place of a target: what the loss pays for all of these MACs."
    )
    shape: Annotated[float, Field(ge=0, le=LARGEST)] = Field(
        0.0, description="Weight of batch-shaping."
    )
    skip: bool = Field(True, description="Add a gate for all channels of each residual block.")
    per: Literal["example", "position"] = Field(
        "example", description="One set of gates for each example, or for each position."
    )
    hidden: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        None, description="Width of the gating modules; by default chosen by the block."
    )
    gate: Literal["hard-concrete", "binary-concrete"] = Field(
        "hard-concrete", description="Kind of gate."
    )

    def check(self, recipe: Any) -> None:
        """Raise ValueError for a recipe with rounds."""
        if recipe.rounds:
            raise ValueError(
                "what rounds cut is a graph, of whose input gates the next one knows nothing: "
                "leave out input_gates or rounds"
            )

    def keep_back(self, data: l0prune.Task, _: str) -> tuple[l0prune.Task, None]:
        """Keep back no examples."""
        return data, None

    def put_on(self, model: nn.Module, args: Any, kwargs: Any, seed: int) -> nn.Module:
        """Return the network with input gates."""
        own = {"gate": gate_of(self.gate, {}), "seed": seed}
        return l0prune.add_input_gates(model, args, kwargs, **self.model_dump() | own)

    def finish(
        self, small: l0prune.Export, tuned: nn.Module, data: l0prune.Task, _: None, stem: Path
    ) -> dict[str, Any]:
        """Count the MACs under input gates on the test data, and write the file that skips."""
        with stage("counting what input gates open"):
            found = l0prune.input_macs(tuned, data)
        file = None
        try:
            file = str(l0prune.save_skipping(small, f"{stem}.skipping.onnx"))
        except UsageError as error:
            warn(f"there is no file that leaves out blocks: {error}")
        blocks = [asdict(each) for each in found.blocks]
        return {**asdict(found), "blocks": blocks, "onnx": file}

    @staticmethod
    def rows(found: Mapping[str, Any], _: str, __: str) -> Iterator[tuple[str, str]]:
        """Yield rows of the table of a run's result."""
        yield "MACs expected, of all", f"{found['expected']:,.0f} of {found['whole']:,.0f}"
        if found["onnx"] is not None:
            yield "file without closed blocks", found["onnx"]
