"""Jobs: the networks that a runtime times, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn


@dataclass(frozen=True)
class Job:
    """Networks to time, and how.

    Attributes:
        model: gated.
        folder: where files and results are kept.
        threads: that one call may use.
        batch: examples in a call.
        samples: networks.
        seed: of their widths.
        progress: called with how many networks are timed, and of how many.
    """

    model: nn.Module
    folder: Path
    threads: int
    batch: int
    samples: int = 0
    seed: int = 0
    progress: Callable[[int, int], None] | None = None

    @property
    def out(self) -> Path:
        """Folder of the results."""
        return self.folder / "results.json"
