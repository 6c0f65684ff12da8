"""What is known of a run before its first step, for whoever reads of it later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from l0prune.data.preprocessing import Preprocessing
from l0prune.running.environment import device_name, environment
from l0prune.training.phases import Phases
from l0prune.training.settings import Settings


def facts_of(
    settings: Settings,
    fingerprint: Mapping[str, str],
    phases: Phases,
    device: torch.device,
    preprocessing: Preprocessing | None = None,
) -> dict[str, Any]:
    """Settings, phases in steps, the command, versions, machine and data; plain data."""
    return {
        "epochs": settings.epochs,
        "steps": phases.total,
        "warmup": phases.warmup,
        "settle": phases.settle,
        "seed": settings.seed,
        "settings": dict(fingerprint),
        "device": device_name(device),
        "preprocessing": None if preprocessing is None else preprocessing.model_dump(),
        **environment(),
    }
