"""Result of ``shrink_experts``: the smaller model, and the experts that stayed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from l0prune.exporting.certify.certificate import Check
from l0prune.files.atomic import PathLike, replaced_folder
from l0prune.files.model_sources import write_model

MAP = "experts.json"


@dataclass
class FewerExperts:
    """A model whose mixtures have fewer experts.

    Attributes:
        model: of its own class at the new sizes; ready for ``gate``, ``shrink`` and ``export``.
        kept: by the path of a mixture the former numbers of its experts, int64, ascending.
        loads: by the same, how many of the observed inputs got each expert before.
        params_before: parameters stored in the whole model.
        active_before: number of these that one input uses.
        active: the same of the smaller model.
        checks: the comparisons with the whole model whose closed experts are never chosen, all of
            which passed, in float64 and float32.
    """

    model: nn.Module = field(repr=False)
    kept: Mapping[str, Tensor]
    loads: Mapping[str, Tensor] = field(repr=False)
    params_before: int
    active_before: int
    active: int
    checks: tuple[Check, ...] = field(repr=False)

    @property
    def params(self) -> int:
        """Parameters stored in the smaller model."""
        return sum(each.numel() for each in self.model.parameters())

    @property
    def error(self) -> float:
        """The largest difference that was found, relative to the largest output."""
        return max(check.error for check in self.checks)

    def save(self, folder: PathLike) -> None:
        """Write a folder with the model, and in ``experts.json`` the former numbers of its experts.

        A model of transformers is written by ``save_pretrained``; another as ``model.pt``, pickled.

        Raises:
            FileError: it cannot be written.
        """
        with replaced_folder(folder, MAP, ()) as scratch:
            write_model(self.model, scratch)
            content = {path: numbers.tolist() for path, numbers in self.kept.items()}
            Path(scratch, MAP).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the cut, as JSON data."""
        return {
            "kept": {path: numbers.tolist() for path, numbers in self.kept.items()},
            "params": self.params,
            "params_before": self.params_before,
            "active": self.active,
            "active_before": self.active_before,
            "error": self.error,
        }

    def __str__(self) -> str:
        mixtures = [
            f"{path}: {len(self.loads[path])} → {len(numbers)} experts"
            for path, numbers in self.kept.items()
        ]
        counts = (
            f"{self.params_before:,} → {self.params:,} parameters are stored, "
            f"{self.active_before:,} → {self.active:,} meet one input; outputs differ by "
            f"{self.error:.1e}"
        )
        return "\n".join([*mixtures, counts])
