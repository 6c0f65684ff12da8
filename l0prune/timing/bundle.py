"""A folder with networks to be timed on the device that will serve them, and what times them.

Jobs: the networks that a runtime times, and its settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from l0prune.errors import FileError
from l0prune.exporting.onnx import collect
from l0prune.files.checked_json import read_json, read_text
from l0prune.gating.attaching import gates_of
from l0prune.plan.numbers import NETWORKS, SEEDS, check_whole
from l0prune.running.stages import stage
from l0prune.timing.facts import facts_to_json, plan_id
from l0prune.timing.network_files import DENSE, NetworkFiles
from l0prune.timing.sampling import sampled_widths, slots_of

ABOUT, SCRIPT = "bundle.json", "run.py"


def write_bundle(
    model: nn.Module, folder: Path, *, batch: int, samples: int, seed: int = 0
) -> None:
    """Write networks of random widths, a script that times them, and what it is all about.

    A folder that holds the same already is left as it is.

    Raises:
        NotGated: the model carries no gates.
        UsageError: it becomes several ONNX files, or its files differ by more than sizes.
    """
    check_whole("batch", batch)
    check_whole("samples", samples, most=NETWORKS)
    check_whole("seed", seed, 0, SEEDS)
    plan = gates_of(model).plan
    chosen = list(islice(sampled_widths(plan, seed), samples))
    wanted = {
        "format": collect.FORMAT,
        "plan": plan_id(plan),
        "batch": batch,
        "seed": seed,
        "widths": chosen,
    }
    known = _known(folder)
    if known | wanted == known:
        return
    files = NetworkFiles(model, batch, folder)
    with stage(f"writing {samples} networks of other widths"):
        names = [f"{number:03d}.onnx" for number in range(samples)]
        for name, widths in zip(names, chosen, strict=True):
            files.write(name, plan.kept(slots_of(plan, widths)))
        (folder / SCRIPT).write_text(read_text(collect.__file__), encoding="utf-8")
        about = wanted | {"dense": DENSE, "samples": names} | facts_to_json(files.facts)
        about["id"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _known(folder: Path) -> dict[str, Any]:
    """Return the folder's description, empty if it has none."""
    try:
        known = read_json(folder / ABOUT)
    except FileError:
        return {}
    return known if isinstance(known, dict) else {}


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
