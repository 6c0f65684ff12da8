"""Who started this process: what the environment says, known before torch is loaded."""

from __future__ import annotations

import os
import sys


def is_first_process() -> bool:
    """Return whether this process speaks to the user, as far as its launcher says."""
    dist = sys.modules.get("torch.distributed")  # not loaded: nobody can have made a group
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return not is_launched() or int(os.environ["RANK"]) == 0


def is_launched() -> bool:
    """Return whether torchrun started this process with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
