"""Number of this process among those that a launcher started; without torch."""

from __future__ import annotations

import os
import sys


def is_first_process() -> bool:
    """Return whether this is the first process, by its process group or its launcher."""
    dist = sys.modules.get("torch.distributed")  # if not loaded, there can be no group
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return not is_launched() or int(os.environ["RANK"]) == 0


def is_launched() -> bool:
    """Return whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
